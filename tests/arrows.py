#!/usr/bin/env python3
"""The include arrows: which folder may include which. Fails with every line that points the wrong way.

  include, base <- plan <- wire <- proto <- net, sim, runtime <- cli
       ^------------ data ---------------- sim, runtime
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ALLOWED = {
    "include": set(),
    "src/base": set(),
    "src/plan": {"src/base"},
    "src/wire": {"src/base", "src/plan"},
    "src/proto": {"src/base", "src/plan", "src/wire"},
    "src/data": {"src/base", "src/plan"},
    "src/net": {"src/base", "src/plan", "src/wire", "src/proto"},
    "src/sim": {"src/base", "src/plan", "src/wire", "src/proto", "src/data"},
    "src/runtime": {"src/base", "src/plan", "src/wire", "src/proto", "src/data", "src/net"},
    "cli": {"src/base", "src/plan", "src/wire", "src/proto", "src/data", "src/net", "src/runtime"},
}
# What the core must not know: threads, sockets, HTTP, logs.
FORBIDDEN = {
    "src/plan": r"zmq|boost|spdlog|<thread>|<mutex>|<unordered_",
    "src/wire": r"zmq|boost|spdlog|<thread>|<mutex>|<unordered_",
    "src/proto": r"zmq|boost|spdlog|<thread>|<mutex>|<unordered_|<sys/|<unistd",
}


def main() -> int:
    bad = []
    for folder, allowed in ALLOWED.items():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in (".h", ".cc") or path.name.endswith("_test.cc"):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                included = re.match(r'#include ["<]([^">]+)[">]', line)
                if not included:
                    continue
                where = f"{path.relative_to(ROOT)}:{number}: {line}"
                target = included.group(1)
                if target.startswith(("src/", "cli/")):
                    other = next((f for f in ALLOWED if target.startswith(f + "/")), None)
                    if other != folder and other not in allowed:
                        bad.append(where)
                if folder in FORBIDDEN and re.search(FORBIDDEN[folder], line):
                    bad.append(where)
    for line in bad:
        print(line)
    print(f"include arrows: {len(bad)} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
