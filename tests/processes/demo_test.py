#!/usr/bin/env python3
"""The demo as a user runs it: exit codes, numbers, damage that is seen, and nothing left behind.   demo_test.py KVFERRY CASE"""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import xml.dom.minidom

TOOL = sys.argv[1]
SMALL = ["demo", "--requests", "6", "--tokens", "96", "--scale", "1"]


def run(*arguments):
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        done = subprocess.run([TOOL, *arguments, "--json", str(out)], capture_output=True, text=True, timeout=240)
        numbers = json.loads(out.read_text()) if out.exists() else None
        return done.returncode, numbers, done.stdout + done.stderr


def expect(condition, *what):
    if not condition:
        print("FAILED:", *what)
        sys.exit(1)


def right(*arguments):
    code, numbers, text = run(*SMALL, *arguments)
    expect(code == 0, arguments, code, text)
    expect(numbers["bytes"] == numbers["expected_bytes"] > 0, numbers)
    expect(numbers["wrong_bytes"] == numbers["stray_bytes"] == numbers["failed_rooms"] == 0, numbers)
    expect(numbers["rooms"] == numbers["requests"] == 6, numbers)
    return numbers


def cuts():
    right("--prefill", "tp=2", "--decode", "tp=4")
    right("--prefill", "tp=2,pp=2", "--decode", "tp=1")
    right("--prefill", "dp=2,tp=2", "--decode", "tp=2,dp=2")
    right("--prefill", "pp=2", "--decode", "pp=2", "--page-size", "7")
    right("--model", "deepseek-v3", "--prefill", "tp=4", "--decode", "tp=2")
    # Pages of different sizes: tokens that both have room for; prefixes of whole pages on both sides.
    for sizes in ((16, 64), (64, 16), (48, 32)):
        right("--prefill", "tp=2", "--decode", "tp=4", "--page-size", str(sizes[0]), "--decode-page-size", str(sizes[1]))
    mixed = right("--model", "deepseek-v3.2", "--prefill", "tp=2,pp=2", "--decode", "tp=2", "--page-size", "64", "--decode-page-size", "20")
    expect(mixed["bytes"] == 6 * 2 * (100 * 61 * (2 * 576 + 132) + 64 + 512), mixed)
    # More decode ranks than heads: every rank holds a copy of its head.
    config = {"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        wide = right("--model", file.name, "--prefill", "tp=4", "--decode", "tp=4")
        tokens = -(-96 // 16) * 16
        expect(wide["bytes"] == 6 * (4 * tokens * 3 * 2 * 32 * 2 + 4 * (64 + 512)), wide)
    # The reference's messages: both prefill ranks write the same aux row.
    code, numbers, text = run(*SMALL, "--codec", "sglang", "--prefill", "tp=2", "--decode", "tp=1")
    expect(code == 0 and numbers["bytes"] == numbers["expected_bytes"] + 6 * (64 + 512), text)


def hybrid():
    # Linear attention, sliding windows and an index cache; cuts that do not divide each other, pipelines, context parallelism.
    right("--model", "qwen3-next", "--prefill", "tp=2", "--decode", "tp=4")
    right("--model", "gemma-3", "--prefill", "tp=3,pp=2", "--decode", "tp=2", "--page-size", "7")
    right("--model", "deepseek-v3.2", "--prefill", "tp=2,cp=2", "--decode", "pp=2")
    os.environ["SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"] = "1"
    right("--model", "gemma-3", "--prefill", "cp=3", "--decode", "tp=2")
    del os.environ["SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"]
    # The same over the reference's messages, and from a config.json: 5 layers, the last of every two with a full attention.
    config = {"model_type": "small_next", "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
              "full_attention_interval": 2, "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_num_value_heads": 4,
              "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        small = right("--model", file.name, "--prefill", "tp=2", "--decode", "tp=4")
        slot = 3 * (96 * 3 * 2 + 4 * 8 * 8 * 4)  # in three layers: columns of a convolution, a matrix for each head
        expect(small["bytes"] == 6 * (2 * 2 * 96 * 2 * 2 * 32 * 2 + slot + 4 * (64 + 512)), small)
        code, numbers, text = run(*SMALL, "--model", file.name, "--codec", "sglang", "--prefill", "tp=2", "--decode", "tp=2")
        expect(code == 0 and numbers["wrong_bytes"] == numbers["stray_bytes"] == 0, text)
        # Which layers a stage holds is not in the lists.
        code, _, text = run(*SMALL, "--model", file.name, "--codec", "sglang", "--prefill", "tp=2,pp=2", "--decode", "tp=2")
        expect(code == 1 and "layer ids needed" in text, code, text)
    code, _, text = run(*SMALL, "--model", "gemma-3", "--page-size", "16", "--decode-page-size", "64")
    expect(code == 2 and "pages of different" in text and "pages of 16 tokens on prefill" in text and "64 on decode" in text, code, text)
    code, _, text = run(*SMALL, "--codec", "sglang", "--decode-page-size", "64")
    expect(code == 2 and "pages of 16 tokens" in text and "of 64" in text, code, text)
    code, _, text = run(*SMALL, "--codec", "sglang", "--prefill", "tp=3", "--decode", "tp=2")
    expect(code == 2 and "prefill tp=3, decode tp=2" in text, code, text)


def planes():
    with tempfile.TemporaryDirectory() as folder:
        for arguments, way in ((["tcp"], "bytes_inline"), (["shm"], "bytes_pulled"), (["shm", "--private-memory"], "bytes_ring"),
                               (["auto"], "bytes_pulled"), (["auto", "--private-memory"], "bytes_ring")):
            numbers = right("--shared-directory", folder, "--prefill", "tp=2", "--decode", "tp=4", "--plane", *arguments)
            expect(numbers[way] == numbers["bytes"], arguments, numbers)
        expect(not os.listdir(folder), "sockets left behind", os.listdir(folder))
    # Where no socket can be made, auto takes tcp and shm says why not.
    numbers = right("--shared-directory", "/nowhere")
    expect(numbers["bytes_inline"] == numbers["bytes"], numbers)
    code, _, text = run(*SMALL, "--plane", "shm", "--shared-directory", "/nowhere")
    expect(code == 1 and "cannot listen at /nowhere" in text, code, text)


def trace():
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for i in range(6):
            file.write(json.dumps({"timestamp": i * 10, "input_length": 1200, "output_length": 1, "hash_ids": [1, 2, 10 + i]}) + "\n")
        file.flush()
        code, numbers, text = run("demo", "--trace", file.name, "--scale", "8", "--concurrency", "1", "--speed", "10")
        expect(code == 0, text)
        # Two blocks of 64 tokens are held after the first request: 8 pages of 16 tokens, five times.
        expect(numbers["prefix_bytes_skipped"] == 5 * 128 * 131072, numbers)
        # With pages of 48 tokens there, whole pages on both sides are 96 of these 128 tokens.
        code, numbers, text = run("demo", "--trace", file.name, "--scale", "8", "--concurrency", "1", "--speed", "10",
                                  "--page-size", "48", "--decode-page-size", "32")
        expect(code == 0 and numbers["prefix_bytes_skipped"] == 5 * 96 * 131072, text)


def sabotage():
    for kind, key in (("wrong", "wrong_bytes"), ("drop", "wrong_bytes"), ("stray", "stray_bytes")):
        code, numbers, text = run(*SMALL, "--sabotage", kind)
        expect(code == 1, kind, code, text)
        other = "stray_bytes" if key == "wrong_bytes" else "wrong_bytes"
        # One block: a page of layer 0's K of the first decode rank (2 heads of 256 bytes, 16 tokens).
        expect(numbers[key] == 8192 and numbers[other] == 0, kind, numbers)


def bench():
    """The bench's files have the names that others read; its figures are of this machine and not looked at."""
    with tempfile.TemporaryDirectory() as folder:
        out, drawing = pathlib.Path(folder) / "bench.json", pathlib.Path(folder) / "bench.svg"
        done = subprocess.run([TOOL, "bench", "planner", "rooms", "plane", "--rows", "256", "65536", "--pairs", "1", "--mebibytes", "16",
                               "--json", str(out), "--svg", str(drawing)], capture_output=True, text=True, timeout=240)
        expect(done.returncode == 0, done.stdout + done.stderr)
        figures = json.loads(out.read_text())
        names = {f["name"] for f in figures}
        expect(names == {"planner.fragmented_8k_ms", "planner.slices_2k_ms", "planner.slices_128k_ms", "planner.prove_64x64_ms",
                         "rooms.p50_us", "rooms.p99_us", "rooms.per_second_64",
                         "rooms.cpu_us_per_room_prefill", "rooms.cpu_us_per_room_decode", "rooms.small_beside_large_p99"}
               | {f"plane.{way}.{row}" for way in ("tcp", "shm_ring", "shm_mapped") for row in ("256", "64k")}, names)
        for figure in figures:
            expect(figure["value"] > 0 and figure["baseline"] > 0 and figure["unit"], figure)
            expect(abs(figure["ratio"] - figure["value"] / figure["baseline"]) < 1e-9 * figure["ratio"], figure)
        xml.dom.minidom.parseString(drawing.read_text())
        expect(drawing.read_text().count("<polyline") == 9, "three lines for each way")


def usage():
    for arguments in (["demo", "--model", "nothing"], ["demo", "--prefill", "tp=0"], ["demo", "--plane", "pigeon"], ["demo", "--plane", "shm", "--codec", "sglang"], ["demo", "--codec", "sglang", "--prefill", "tp=2", "--decode", "tp=3"],
                      ["demo", "--trace", "/nowhere"], ["demo", "--scale", "-1"], ["demo", "--nonsense"], ["nonsense"]):
        done = subprocess.run([TOOL, *arguments], capture_output=True, text=True, timeout=60)
        expect(done.returncode == 2, arguments, done.returncode, done.stdout + done.stderr)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"model_type": "llama", "num_hidden_layers": 3}, file)
        file.flush()
        done = subprocess.run([TOOL, "demo", "--model", file.name], capture_output=True, text=True, timeout=60)
        expect(done.returncode == 2 and "num_attention_heads" in done.stderr, done.stderr)


def children_of(pid):
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def interrupt():
    demo = subprocess.Popen([TOOL, "demo", "--requests", "2000", "--tokens", "64", "--scale", "1"], stdout=subprocess.PIPE, text=True)
    for line in demo.stdout:  # the ranks work when the first line of progress is there
        if "%" in line:
            break
    children = children_of(demo.pid)
    expect(len(children) >= 7, "processes", children)
    demo.send_signal(signal.SIGINT)
    demo.stdout.read()
    expect(demo.wait(timeout=60) == 130, demo.returncode)
    left = [pid for pid in children if os.path.exists(f"/proc/{pid}")]
    expect(not left, "processes left behind", left)


globals()[sys.argv[2]]()
print("ok")
