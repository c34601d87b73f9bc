"""What tests of the scratch store run in processes of their own: python disk_cases.py CASE ARGUMENT...

Each prints what it saw as its last line, in JSON.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from dzero import DiskError
from dzero.offload.disk import DiskConfig, DiskStore
from dzero.offload.memory_pool import HostMemoryPool
from dzero.offload.scratch_dir import ScratchDir

MIB = 1 << 20


def buffer(count: int, value: int = 7) -> torch.Tensor:
    return HostMemoryPool(count).lease(count, "buffer").data.fill_(value)


def told(error: OSError) -> dict[str, Any]:
    return {"errno": errno.errorcode.get(error.errno or 0), "path": error.filename, "text": str(error)}


def free(path: str) -> int:
    pool = os.statvfs(path)
    return pool.f_bavail * pool.f_frsize


def mounted(folder: str) -> dict[str, Any]:
    """What file systems of every kind do, each in its place under `folder`."""
    place = f"{folder}/{{}}".format
    return {
        "full": full(place("small"), place("large")),
        "buffered": buffered(place("ram0"), place("ram1")),
    }


def full(small: str, large: str) -> dict[str, Any]:
    """`small` has 8 MiB in all. One store takes 5 of them, others want more than is left."""
    seen: dict[str, Any] = {}
    before = free(large), free(small)
    with DiskStore(DiskConfig(paths=[small]), {"a": 5 * MIB}):
        seen["first"] = os.listdir(small)
        left = free(small)
        try:
            DiskStore(DiskConfig(paths=[large, small], block_bytes=MIB), {"a": 10 * MIB}, rank=3)
        except DiskError as error:  # now, and not only when the error and what it refers to are forgotten
            seen["second"] = told(error) | {"count": error.count}
            seen["given_back"] = os.listdir(large), len(os.listdir(small)), left - free(small), before[0] - free(large)
    with open(f"{small}/others", "wb") as others:
        others.write(bytes(free(small)))
        others.flush()
        try:
            ScratchDir(small, 0)
        except DiskError as error:
            seen["no_room_for_a_lock"] = told(error) | {"left": os.listdir(small)}
    os.unlink(f"{small}/others")
    seen["left"] = (os.listdir(small), before[1] - free(small))
    return seen


def buffered(first: str, second: str) -> dict[str, Any]:
    """Neither path has direct I/O."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with DiskStore(DiskConfig(paths=[first, second], block_bytes=4096), {"a": 20_000}) as store:
            data, into = buffer(20_000), buffer(20_000, 0)
            data.random_()
            store.write("a", data).result()
            store.read("a", into).result()
            direct = [file.is_direct for file in store.files]
    own = [str(w.message) for w in caught if "direct I/O" in str(w.message)]
    return {"warnings": own, "equal": torch.equal(data, into), "direct": direct}


def devices(first: str, second: str) -> dict[str, Any]:
    """A store over two block devices, and what the kernel counts on each, in bytes read and written."""
    paths, size = [first, second], 24 * MIB
    with DiskStore(DiskConfig(paths=paths, weights=[2, 1], block_bytes=MIB), {"a": size, "b": size}) as store:
        data, into = buffer(size), buffer(size, 0)
        data.random_()
        before = [moved(path) for path in paths]
        for name in ("a", "b"):
            store.write(name, data).result()
        written = [moved(path) for path in paths]
        for name in ("a", "b"):
            into.zero_()
            store.read(name, into).result()
        read = [moved(path) for path in paths]
        return {
            "equal": torch.equal(data, into),
            "written": [b[1] - a[1] for a, b in zip(before, written, strict=True)],
            "read": [b[0] - a[0] for a, b in zip(written, read, strict=True)],
            "told": store.describe(),
        }


def moved(path: str) -> tuple[int, int]:
    """Bytes that were read from the block device of `path`, and written to it."""
    device = os.stat(path).st_dev
    fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return int(fields[2]) * 512, int(fields[6]) * 512


def hold(path: str, count: str) -> dict[str, Any]:
    """Hold `count` bytes until something is said on standard input."""
    with DiskStore(DiskConfig(paths=[path]), {"a": int(count)}) as store:
        data = buffer(int(count))
        store.write("a", data).result()
        print("holding", flush=True)
        sys.stdin.readline()
        data.zero_()
        store.read("a", data).result()
        return {"read": data.unique().tolist()}


def end(path: str, how: str) -> dict[str, Any]:
    """A store that nobody closes, in a process that ends in some way."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job starts without
    store = DiskStore(DiskConfig(paths=[path], block_bytes=MIB), {"a": 8 * MIB})
    store.write("a", buffer(8 * MIB))
    print("holding", flush=True)
    if how == "error":
        raise SystemExit(f"{store.sizes}")
    if how == "wait":
        time.sleep(60)
    return {"inside": len(os.listdir(path))}


def write_forever(path: str) -> dict[str, Any]:
    """Until it is killed."""
    store = DiskStore(DiskConfig(paths=[path], block_bytes=MIB), {"a": 32 * MIB})
    data = buffer(32 * MIB)
    store.write("a", data).result()
    print("holding", flush=True)
    while True:
        store.write("a", data).result()


def forked(path: str) -> dict[str, Any]:
    """A forked child ends as Python ends, with a copy of the store; then its parent reads."""
    store = DiskStore(DiskConfig(paths=[path]), {"a": 4096})
    data = buffer(4096)
    store.write("a", data).result()
    if (child := os.fork()) == 0:
        del store
        sys.exit(0)
    os.waitpid(child, 0)
    inside = [sorted(os.listdir(Path(path) / name)) for name in os.listdir(path)]
    store.read("a", data).result()
    return {"inside": inside}


if __name__ == "__main__":
    cases = {case.__name__: case for case in (mounted, devices, write_forever, hold, end, forked)}
    print(json.dumps(cases[sys.argv[1]](*sys.argv[2:])), flush=True)
