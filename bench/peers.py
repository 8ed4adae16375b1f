#!/usr/bin/env python3
"""The rows of `kvferry bench plane` through other engines, in turns with ours, every byte verified.

    peers.py KVFERRY [--rows 256 1024 4096 65536] [--rounds 5] [--mebibytes 256] [--json FILE]

Run by ./dev peers, which makes the virtual environment with the engines. Each engine moves the same rows in the same
order: 16 rows to a page, packed at the source and at 4 times their size at the target, pages of both sides in random
order. An engine's own preparation of its list is inside the time, where a user pays it for every request; connecting
and registering memory are not."""
import argparse
import ctypes
import json
import mmap
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROWS_PER_PAGE, SPREAD, POISON = 16, 4, 0xEE
MOONCAKE_QUEUE = 1024
# (engine, transport) -> environment. Each as well as its documentation allows, as far as we found:
# NIXL with a progress thread on both sides and its descriptors as one array; Mooncake with its connection pool.
ENVIRONMENTS = {
    ("nixl", "tcp"): {"UCX_TLS": "tcp"},
    ("nixl", "shm"): {"UCX_TLS": "sm,self,tcp"},
    ("mooncake", "tcp"): {"MC_FORCE_TCP": "1", "MC_TCP_ENABLE_CONNECTION_POOL": "1"},
}
HOW = """how the peers are configured
  nixl tcp      UCX_TLS=tcp, progress thread on both sides, lists as NumPy arrays
  nixl shm      UCX_TLS=sm,self,tcp (posix and cma carry the bytes, tcp the address exchange), otherwise the same
  mooncake tcp  MC_FORCE_TCP=1, MC_TCP_ENABLE_CONNECTION_POOL=1, batch_transfer_sync_write with as many rows as its queue takes (1024), P2P handshake"""


def orders(pages, seed):
    return np.random.default_rng(seed).permutation(pages).astype(np.uint64)


def addresses(base, pages, row, spread, seed):
    page = row * ROWS_PER_PAGE * spread
    rows = np.arange(ROWS_PER_PAGE, dtype=np.uint64) * np.uint64(row * spread)
    return (np.uint64(base) + orders(pages, seed)[:, None] * np.uint64(page) + rows[None, :]).reshape(-1)


def pattern(pages, row, seed, round_number):
    """What belongs into each page, by its place in the order: no byte is compared with a copy of itself."""
    places = np.arange(pages * ROWS_PER_PAGE * row // 8, dtype=np.uint64)
    words = (places + np.uint64(round_number * 1000003)) * np.uint64(0x9E3779B97F4A7C15)
    return (words ^ (words >> np.uint64(29))) | np.uint64(0x0101010101010101)


class Memory:
    def __init__(self, size):
        self.map = mmap.mmap(-1, size)
        self.array = np.frombuffer(self.map, dtype=np.uint8)
        self.array[:] = POISON
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Nixl:
    def __init__(self, name, memory, size):
        import nixl_cu12._bindings as b
        self.b = b
        self.agent = b.nixlAgent(name, b.nixlAgentConfig(True))
        self.backend = self.agent.createBackend("UCX", {})
        regions = b.nixlRegDList(b.DRAM_SEG, [(memory.base, size, 0, "")])
        self.agent.registerMem(regions, [self.backend])

    def address(self):
        return self.agent.getLocalMD().hex()

    def connect(self, peer):
        self.peer = self.agent.loadRemoteMD(bytes.fromhex(peer))
        self.peer = self.peer.decode() if isinstance(self.peer, bytes) else self.peer
        self.agent.makeConnection(self.peer, [])

    def write(self, source, target, row):
        b, n = self.b, len(source)
        columns = [np.full(n, row, np.uint64), np.zeros(n, np.uint64)]
        mine = b.nixlXferDList(b.DRAM_SEG, np.ascontiguousarray(np.stack([source, *columns], axis=1)))
        theirs = b.nixlXferDList(b.DRAM_SEG, np.ascontiguousarray(np.stack([target, *columns], axis=1)))
        request = self.agent.createXferReq(b.NIXL_WRITE, mine, theirs, self.peer)
        status = self.agent.postXferReq(request)
        while status == b.NIXL_IN_PROG:
            time.sleep(0.0005)
            status = self.agent.getXferStatus(request)
        self.agent.releaseXferReq(request)
        if status != b.NIXL_SUCCESS:
            raise RuntimeError(f"nixl: {status}")


class Mooncake:
    def __init__(self, name, memory, size):
        from mooncake.engine import TransferEngine
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("mooncake: initialize failed")
        if self.engine.register_memory(memory.base, size) != 0:
            raise RuntimeError("mooncake: register_memory failed")

    def address(self):
        return f"127.0.0.1:{self.engine.get_rpc_port()}"

    def connect(self, peer):
        self.peer = peer

    def write(self, source, target, row):
        source, target, lengths = source.tolist(), target.tolist(), [row] * MOONCAKE_QUEUE
        for i in range(0, len(source), MOONCAKE_QUEUE):
            part = source[i:i + MOONCAKE_QUEUE]
            if self.engine.batch_transfer_sync_write(self.peer, part, target[i:i + MOONCAKE_QUEUE], lengths[:len(part)]) != 0:
                raise RuntimeError("mooncake: the transfer failed")


def serve(engine, row, pages):
    """The receiving process: lines in, lines out. File descriptor 3 carries the answers: engines print on the others."""
    out = os.fdopen(3, "w", buffering=1)
    size = pages * ROWS_PER_PAGE * row * SPREAD
    memory = Memory(size)
    peer = {"nixl": Nixl, "mooncake": Mooncake}[engine]("target", memory, size)
    out.write(json.dumps({"address": peer.address(), "base": memory.base}) + "\n")
    for line in sys.stdin:
        question = json.loads(line)
        if "verify" in question:
            view = memory.array.reshape(pages, ROWS_PER_PAGE, SPREAD * row)[orders(pages, 12)]
            expected = pattern(pages, row, 0, question["verify"]).view(np.uint8).reshape(pages, ROWS_PER_PAGE, row)
            wrong = int((view[:, :, :row] != expected).sum()) + int((view[:, :, row:] != POISON).sum())
            memory.array[:] = POISON
            out.write(json.dumps({"wrong": wrong}) + "\n")
        else:
            out.write(json.dumps({"cpu": cpu()}) + "\n")


def drive(engine, row, pages):
    """The sending process, of the same kind: one round for each line."""
    out = os.fdopen(3, "w", buffering=1)
    size = pages * ROWS_PER_PAGE * row
    memory = Memory(size)
    peer = {"nixl": Nixl, "mooncake": Mooncake}[engine]("source", memory, size)
    out.write(json.dumps({"address": peer.address()}) + "\n")
    target_base = None
    for line in sys.stdin:
        question = json.loads(line)
        if "connect" in question:
            peer.connect(question["connect"])
            target_base = question["base"]
            source = addresses(memory.base, pages, row, 1, 11)
            target = addresses(target_base, pages, row, SPREAD, 12)
            out.write("{}\n")
            continue
        ordered = pattern(pages, row, 0, question["round"]).view(np.uint8).reshape(pages, ROWS_PER_PAGE * row)
        memory.array.reshape(pages, ROWS_PER_PAGE * row)[orders(pages, 11)] = ordered
        before, begin = cpu(), time.monotonic()
        peer.write(source, target, row)
        seconds = time.monotonic() - begin
        out.write(json.dumps({"seconds": seconds, "cpu": cpu() - before}) + "\n")


class Process:
    def __init__(self, role, engine, transport, row, pages):
        read, write = os.pipe()
        self.log = tempfile.TemporaryFile()
        self.child = subprocess.Popen(
            [sys.executable, __file__, "--role", role, "--engine", engine, "--rows", str(row), "--pages", str(pages)],
            stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, text=True, pass_fds=(write,),
            env={**os.environ, **ENVIRONMENTS[engine, transport], "KVFERRY_PEERS_FD": str(write)})
        os.close(write)
        self.answers = os.fdopen(read)

    def hear(self):
        line = self.answers.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError("the process ended: " + self.log.read().decode(errors="replace")[:3000])
        return json.loads(line)

    def ask(self, question):
        self.child.stdin.write(json.dumps(question) + "\n")
        self.child.stdin.flush()
        return self.hear()

    def end(self):
        self.child.kill()
        self.child.wait()

    def signal(self, number):
        self.child.send_signal(number)


class Peer:
    """Both processes of one engine over one transport, for one row size."""

    def __init__(self, engine, transport, row, pages):
        self.bytes = pages * ROWS_PER_PAGE * row
        self.target = Process("serve", engine, transport, row, pages)
        self.source = Process("drive", engine, transport, row, pages)
        there, here = self.target.hear(), self.source.hear()
        del here
        self.source.ask({"connect": there["address"], "base": there["base"]})

    def round(self, number):
        before = self.target.ask({"cpu": True})["cpu"]
        result = self.source.ask({"round": number})
        burned = result["cpu"] + self.target.ask({"cpu": True})["cpu"] - before
        wrong = self.target.ask({"verify": number})["wrong"]
        return self.bytes / result["seconds"] / 1e9, burned / self.bytes * 1e9, wrong

    # Progress threads that spin would take the cores from whoever has its turn.
    def rest(self):
        self.source.signal(signal.SIGSTOP)
        self.target.signal(signal.SIGSTOP)

    def wake(self):
        self.target.signal(signal.SIGCONT)
        self.source.signal(signal.SIGCONT)

    def end(self):
        self.source.end()
        self.target.end()


class Ours:
    def __init__(self, tool, transport, row, mebibytes):
        self.command = [tool, "bench", "plane", "--rows", str(row), "--pairs", "1", "--mebibytes", str(mebibytes),
                        "--plane", "tcp" if transport == "tcp" else "shm_ring"]

    def round(self, number):
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            done = subprocess.run([*self.command, "--json", out.name], capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError("kvferry bench: " + done.stderr)  # wrong bytes are an error there
            figure = json.load(out)[0]
        return figure["value"], figure["cpu_seconds_per_gigabyte"], 0

    def rest(self):
        pass

    wake = end = rest


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tool", nargs="?")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024, 4096, 65536])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--json")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--pages", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        os.dup2(int(os.environ["KVFERRY_PEERS_FD"]), 3)
        return (serve if options.role == "serve" else drive)(options.engine, options.rows[0], options.pages)

    print(HOW)
    table, failed = [], False
    for transport in ("tcp", "shm"):
        for row in options.rows:
            pages = (options.mebibytes << 20) // (row * ROWS_PER_PAGE)
            contenders = {"kvferry": lambda: Ours(options.tool, transport, row, options.mebibytes)}
            for engine in ("nixl", "mooncake"):
                if (engine, transport) in ENVIRONMENTS:
                    contenders[engine] = lambda engine=engine: Peer(engine, transport, row, pages)
            running = {}
            for name, make in contenders.items():
                running[name] = make()
                running[name].rest()
            results = {name: [] for name in running}
            for number in range(options.rounds + 1):
                for name, contender in running.items():
                    contender.wake()
                    result = contender.round(number)
                    contender.rest()
                    if number > 0 or result[2]:  # the first round warms up
                        results[name].append(result)
            for name, contender in running.items():
                contender.end()
                speed, burned = (statistics.median(r[i] for r in results[name]) for i in (0, 1))
                wrong = sum(r[2] for r in results[name])
                failed |= wrong > 0
                table.append({"row_bytes": row, "engine": name, "transport": transport, "gigabytes_per_second": speed,
                              "cpu_seconds_per_gigabyte": burned, "wrong_bytes": wrong})
                print(f"{transport:4} rows of {row:6}  {name:9} {speed:8.3f} GB/s {burned:9.2f} CPU s/GB  {wrong} wrong bytes", flush=True)
    print("\nkvferry against the best of the others, same run")
    for transport in ("tcp", "shm"):
        for row in options.rows:
            speeds = {t["engine"]: t["gigabytes_per_second"] for t in table if t["row_bytes"] == row and t["transport"] == transport}
            best = max(v for k, v in speeds.items() if k != "kvferry")
            print(f"{transport:4} rows of {row:6}  {speeds['kvferry'] / best:7.1f} x")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as out:
            json.dump(table, out, indent=2)
            out.write("\n")
    return 1 if failed else 0


sys.exit(main())
