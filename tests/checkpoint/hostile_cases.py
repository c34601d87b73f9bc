"""Checkpoints that somebody wrote on purpose: sealed as they should be, and false. For test_hostile.py.

python hostile_cases.py FOLDER NAME... tries to open and read each, and prints, by name, what it was told of which file,
and by how many bytes memory grew.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import written_checkpoints as by_hand
from written_checkpoints import LATEST, MANIFEST, PAGE, Piece, data_name, index_name, write_sealed

import dzero

DATA, INDEX = data_name(0), index_name(0)
STEP = "step_00000001"
Body = dict[str, Any]


def claim(folder: Path, manifest: Body | None = None, index: Callable[[Body], object] | bytes = b"") -> None:
    """Seal an index that says something else, and the manifest that names it, with changes of its own."""
    told = by_hand.body_of(folder / INDEX)
    if callable(index):
        index(told)
    sealed = write_sealed(folder / INDEX, index if isinstance(index, bytes) and index else told)
    by_hand.reseal(folder / MANIFEST, lambda body: body.update({"seals": [sealed]} | (manifest or {})))


def part(**changes: Any) -> Callable[[Body], object]:
    """Of the tensor b: 5 x 3, fp32, behind a, 1100 of int64."""
    return lambda index: index["parts"]["b"].update(changes)


def both(**changes: Any) -> Callable[[Body], object]:
    return lambda index: [each.update(changes) for each in index["parts"].values()]


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


def instead(make: Callable[[Path, Path], object], path: Path) -> None:
    """Something else in place of a file or a folder, which is moved out of the checkpoint."""
    shelf = path.parent if path.name in (LATEST, STEP) else path.parent.parent
    outside = shelf.parent / "outside" / path.name
    outside.parent.mkdir(exist_ok=True)
    path.rename(outside)
    make(path, outside)


def listening(path: Path, _: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(here)


def device(path: Path, _: Path) -> None:
    """/dev/zero; a link to it where this user may make none."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        path.symlink_to("/dev/zero")


def hole(path: Path, _: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, outside: path.symlink_to(outside),
    "a link to itself": lambda path, _: path.symlink_to(path.name),
    "a link to endless zeros": lambda path, _: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path, _: path.symlink_to("nothing"),
    "a device": device,
    "a pipe": lambda path, _: os.mkfifo(path),
    "a socket": listening,
    "an empty folder": lambda path, _: path.mkdir(),
    "a pickle": lambda path, _: path.write_bytes(pickle.dumps(Trap(path.parent / "unpickled"))),
    "a file of torch.save": lambda path, _: torch.save({"a": Trap(path.parent / "unpickled")}, path),
    "a hole of a terabyte": hole,
}
"""What lies in a file's or a folder's place."""
NESTED = 100_000
CLAIMS: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda f: claim(f, index=b"\x80\x04."),
    "nested too deep": lambda f: claim(f, index=b"[" * NESTED + b"]" * NESTED),
    "nested too deep, in the state": lambda f: write_sealed(
        f / MANIFEST,
        b'{"seals":["%s"],"state":{"a":%s},"step":1,"version":1}' % (b"0" * 16, b"[" * NESTED + b"]" * NESTED),
    ),
    "a bomb of names": lambda f: claim(f, index=b'{"parts":{%s}}' % b",".join(b'"%d":0' % n for n in range(10**6))),
    "an index beyond 64 MiB": lambda f: claim(f, index=b'{"parts":{"a":"%s"}}' % (b"a" * (64 << 20))),
    "a manifest beyond 16 MiB": lambda f: claim(f, manifest={"state": {"a": {"a": "a" * (16 << 20)}}}),
    "an integer of 4000 digits": lambda f: claim(f, index=b'{"block_bytes":%s}' % (b"9" * 4000)),
    "an integer of 5000 digits": lambda f: claim(f, index=b'{"block_bytes":%s}' % (b"9" * 5000)),
    "a part's name twice": lambda f: claim(f, index=twice(f, b'"b":')),
    "a key twice": lambda f: claim(f, index=twice(f, b'"rank":')),
    "a key unknown": lambda f: claim(f, index=lambda index: index.update(code="import os")),
    "spaces": lambda f: claim(f, index=json.dumps(by_hand.body_of(f / INDEX)).encode()),
    "a rank's number": lambda f: claim(f, index=lambda index: index.update(rank=1)),
    "a number as a text": lambda f: claim(f, index=lambda index: index.update(rank="0")),
    "a negative start": lambda f: claim(f, index=part(start=-4, end=56)),
    "a negative offset": lambda f: claim(f, index=part(offset=[-1, 0])),
    "a negative size": lambda f: claim(f, index=part(size=[-5, -3])),
    "an end before its start": lambda f: claim(f, index=part(start=8860, end=8800)),
    "bytes twice": lambda f: claim(f, index=part(start=8740, end=8800)),
    "a hole between parts": lambda f: claim(f, index=part(start=8804, end=8864)),
    "beyond the file": lambda f: claim(f, index=part(shape=[9, 3], size=[9, 3], end=8800 + 108)),
    "beyond the tensor": lambda f: claim(f, index=part(offset=[1, 0])),
    "bytes that are not the size's": lambda f: claim(f, index=part(shape=[5, 4], size=[5, 4])),
    "a part of another size than its shape": lambda f: claim(f, index=part(shape=[6, 3])),
    "dims that differ": lambda f: claim(f, index=part(offset=[0])),
    "a thousand dims": lambda f: claim(f, index=part(shape=[1] * 1000, offset=[0] * 1000, size=[1] * 1000)),
    "a dtype that is none": lambda f: claim(f, index=part(dtype="F8_E9")),
    "a dtype that is code": lambda f: claim(f, index=part(dtype="__import__('os').system('touch /tmp/x')")),
    "a shape beyond 64 bits": lambda f: claim(
        f, index=part(shape=[1 << 40, 1 << 40, 0], offset=[0, 0, 0], size=[1 << 40, 1 << 40, 0], end=8800)
    ),
    "a dim beyond 64 bits": lambda f: claim(
        f, index=part(shape=[0, 1 << 64], offset=[0, 0], size=[0, 1 << 64], end=8800)
    ),
    "a shape of which nothing is there": lambda f: claim(f, index=of_nothing),
    "one tensor of two shapes": lambda f: claim(f, index=both(of="a")),
    "two parts in one place": lambda f: claim(f, index=lambda index: overlapping(index)),
    "a file of a terabyte": lambda f: claim(f, index=lambda index: index.update(file_bytes=1 << 40)),
    "a block of a terabyte": lambda f: claim(f, index=lambda index: index.update(block_bytes=1 << 40, sums=["0" * 16])),
    "a block of half a page": lambda f: claim(f, index=lambda index: index.update(block_bytes=2048)),
    "a block of nothing": lambda f: claim(f, index=lambda index: index.update(block_bytes=0)),
    "too few checksums": lambda f: claim(f, index=lambda index: index.update(sums=index["sums"][1:])),
    "a checksum that is none": lambda f: claim(
        f, index=lambda index: index.update(sums=["x" * 16] * len(index["sums"]))
    ),
    "false checksums": lambda f: claim(f, index=lambda index: index.update(sums=["0" * 16] * len(index["sums"]))),
    "data before the file": lambda f: claim(f, index=lambda index: index.update(data_start=-4096)),
    "data behind the file": lambda f: claim(f, index=lambda index: index.update(data_start=1 << 20)),
    "a step below 0": lambda f: claim(f, manifest={"step": -1}),
    "another version": lambda f: claim(f, manifest={"version": 2}),
    "a million ranks": lambda f: claim(f, manifest={"seals": ["0" * 16] * 10**5}),
    "a path for a seal": lambda f: claim(f, manifest={"seals": ["../../../etc/pas"]}),
}
"""By what they claim."""
POINTERS = {
    "up": "../outside",
    "absolute": "/etc",
    "here": ".",
    "a path": f"{STEP}/../{STEP}",
    "a NUL": f"{STEP}\0",
    "a line": f"{STEP}\n",
    "digits of another script": "step_٠٠٠٠٠٠٠١",
    "long": "step_" + "0" * 100,
    "half-written": f"{STEP}.partial",
    "nothing": "",
}


def twice(folder: Path, key: bytes) -> bytes:
    """The index, with one entry of it given a second time."""
    body = msgspec.json.encode(by_hand.body_of(folder / INDEX), order="sorted")
    start = body.index(key)
    end = body.index(b"}", start) + 1 if body[start + len(key) :].startswith(b"{") else body.index(b",", start)
    return body[:start] + body[start:end] + b"," + body[start:]


def without_b(index: Body) -> None:
    index["file_bytes"] -= 60
    index["sums"] = index["sums"][: -(-index["file_bytes"] // PAGE)]


def of_nothing(index: Body) -> None:
    """b is of a petabyte, and no byte of it is there."""
    index["parts"]["b"].update(shape=[1 << 50, 1], size=[0, 1], end=8800)
    without_b(index)


def overlapping(index: Body) -> None:
    """Both parts are of one tensor of 2 x 550 int64, which both say they hold the first row of."""
    whole = {"of": "a", "dtype": "I64", "shape": [2, 550], "offset": [0, 0], "size": [1, 550]}
    index["parts"]["a"].update(whole, start=0, end=4400)
    index["parts"]["b"].update(whole, start=4400, end=8800)
    without_b(index)


def honest(shelf: Path) -> Path:
    """A checkpoint that is whole: a, 1100 of int64, and b, 5 x 3 of fp32, behind it."""
    tensors = {"a": by_hand.bits(torch.int64, (1100,), 0), "b": by_hand.bits(torch.float32, (5, 3), 1)}
    pieces: dict[str, Piece] = {name: by_hand.piece(name, tensor) for name, tensor in tensors.items()}
    path = by_hand.write(shelf / STEP, [pieces], step=1)
    by_hand.point(shelf, STEP)
    return path


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def tried(shelf: Path) -> dict[str, Any]:
    """What a program is told that reads all there is, and by how many bytes its memory grew meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")
    before, seen = peak_bytes(), {"shelf": str(shelf), "refused": False, "path": ""}
    try:
        seen["text"] = f"{by_hand.verified(shelf)} bytes were read"
    except dzero.CheckpointError as error:
        seen |= {"refused": True, "path": error.path, "text": str(error)[:500]}
    except Exception as error:
        seen["text"] = repr(error)
    return seen | {"grown": peak_bytes() - before}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    by_hand.verified(honest(folder / "honest"))  # threads, and what else is there once
    print(json.dumps({name: tried(folder / name) for name in sys.argv[2:]}), flush=True)
