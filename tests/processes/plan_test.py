#!/usr/bin/env python3
"""`kvferry plan` as a user runs it: exit codes, JSON, pictures, layouts from files.   plan_test.py KVFERRY"""
import json
import pathlib
import subprocess
import sys
import tempfile
import xml.dom.minidom

TOOL = sys.argv[1]
TEMPORARY = tempfile.TemporaryDirectory()
FOLDER = pathlib.Path(TEMPORARY.name)


def plan(*arguments):
    out = FOLDER / "plan.json"
    out.unlink(missing_ok=True)
    done = subprocess.run([TOOL, "plan", *arguments, "--json", str(out)], capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(out.read_text()) if out.exists() else None, done.stdout + done.stderr


def expect(condition, *what):
    if not condition:
        print("FAILED:", *what)
        sys.exit(1)


def proved(*arguments):
    code, numbers, text = plan(*arguments)
    expect(code == 0 and numbers["proved"] and not numbers["problems"], arguments, text)
    expect(sum(pair["bytes"] for pair in numbers["pairs"]) == numbers["bytes"] > 0, numbers)
    return numbers


def refused(*arguments):
    code, numbers, text = plan(*arguments)
    expect(code == 1 and not numbers["proved"] and numbers["problems"], arguments, code, text)
    return numbers["problems"][0]


# By hand: 2,048 tokens x 32 layers x 8 heads x 128 elements x 2 bytes, K and V; aux rows of 64 and 512 bytes for each decode rank.
numbers = proved("--prefill", "tp=2", "--decode", "tp=4")
expect(numbers["bytes"] == 2048 * 32 * 8 * 128 * 2 * 2 + 4 * 576, numbers["bytes"])
expect([(p["prefill_rank"], p["decode_rank"], p["heads"], p["layers"]) for p in numbers["pairs"]] ==
       [(0, 0, "0-1", "0-31"), (0, 1, "2-3", "0-31"), (1, 2, "4-5", "0-31"), (1, 3, "6-7", "0-31")], numbers["pairs"])
expect(numbers["responses_expected"] == 1 and not numbers["redundant"], numbers)
# Every row of a page apart, for K and V of every layer; two aux rows.
expect(numbers["pairs"][0]["copies"] == 128 * 16 * 64 + 2, numbers["pairs"][0])

# T04: sizes that do not divide each other.
for sizes in (("tp=4", "tp=6"), ("tp=3", "tp=2")):
    proved("--prefill", sizes[0], "--decode", sizes[1])
    why = refused("--prefill", sizes[0], "--decode", sizes[1], "--codec", "sglang")
    expect(f"prefill {sizes[0]}, decode {sizes[1]}" in why, why)

# Pages of different sizes: whole tokens of both, cut into parts of 16; the reference's ranks cannot.
mixed = proved("--prefill", "tp=2", "--decode", "tp=4", "--decode-page-size", "64")
expect(mixed["bytes"] == numbers["bytes"], mixed["bytes"])
why = refused("--prefill", "tp=2", "--decode", "tp=4", "--decode-page-size", "64", "--codec", "sglang")
expect("16" in why and "64" in why, why)

# T28: eight context-parallel ranks: the first alone, or all.
one = proved("--prefill", "cp=8", "--decode", "tp=1")
expect(one["responses_expected"] == 1 and len(one["pairs"]) == 1, one)
every = proved("--prefill", "cp=8", "--decode", "tp=1", "--all-cp-ranks")
expect(every["responses_expected"] == 8 and len(every["pairs"]) == 8 and every["bytes"] == one["bytes"], every)

# MLA: one writer; the reference's ranks pair the same way, its aux rows may have several writers.
latent = proved("--model", "deepseek-v3.2", "--prefill", "tp=4", "--decode", "tp=2")
expect(len(latent["pairs"]) == 2 and len(latent["dummies"]) == 2, latent)
for model in ("qwen3-next", "gemma-3"):
    proved("--model", model, "--prefill", "tp=3,pp=2", "--decode", "tp=2,pp=3", "--page-size", "64", "--tokens", "5000")

# More ranks than heads: in the reference's pairs several ranks write the same bytes. Allowed, and said.
wide = proved("--model", "qwen3-30b-a3b", "--prefill", "tp=8", "--decode", "tp=2", "--codec", "sglang")
expect(wide["redundant"] and "written more than once, by prefill tp0, prefill tp1" in wide["redundant"][0], wide["redundant"][:1])
expect(not proved("--model", "qwen3-30b-a3b", "--prefill", "tp=8", "--decode", "tp=2")["redundant"], "native pairs have one writer")

# Layouts from files: what was saved gives the same plan; a layer that nobody holds is refused, an overlap is no layout.
prefix = str(FOLDER / "small")
first = proved("--prefill", "tp=2", "--decode", "tp=4", "--save-layouts", prefix)
files = ["--prefill", prefix + "-prefill.json", "--decode", prefix + "-decode.json"]
expect(proved(*files)["pairs"] == first["pairs"], "layouts that were saved")
source = json.loads((FOLDER / "small-prefill.json").read_text())
source["ranks"][0]["slabs"] = [s for s in source["ranks"][0]["slabs"] if s["layer"] != 7 or s["component"] != "value"]
(FOLDER / "small-prefill.json").write_text(json.dumps(source))
why = refused(*files)
expect("waits for value of layer 7, head 0" in why, why)
source["ranks"][0]["slabs"].append(source["ranks"][0]["slabs"][0])
(FOLDER / "small-prefill.json").write_text(json.dumps(source))
code, _, text = plan(*files)
expect(code == 2 and "heads from 0 are there twice" in text, code, text)

picture = FOLDER / "plan.svg"
proved("--model", "gemma-3", "--prefill", "tp=2,pp=2", "--decode", "tp=4", "--svg", str(picture))
svg = xml.dom.minidom.parse(str(picture))
expect(len([p for p in svg.getElementsByTagName("path") if p.getElementsByTagName("title")]) == 8, "arrows")

for bad in (["--prefill", "tp=0"], ["--prefill", "tp=x"], ["--prefill", "/nowhere.json", "--decode", "/nowhere.json"],
            ["--prefill", "tp=2", "--decode", prefix + "-decode.json"], ["--model", "nothing"], ["--codec", "other"], ["--tokens", "0"]):
    code, _, text = plan(*bad)
    expect(code == 2 and text, bad, code, text)
print("ok")
