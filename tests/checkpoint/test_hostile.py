"""Checkpoints that were written to harm are refused; nothing runs, hangs, is written elsewhere or takes much memory."""

from __future__ import annotations

import json
import os
import pickle
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import written_checkpoints as by_hand
from pool import Pool
from training_loops import sharded_net
from written_checkpoints import LATEST, LOCK, MANIFEST, PAGE, data_name, index_name, write_sealed

from dzero import AdamW, CheckpointConfig, Checkpointer, CheckpointError

DATA, INDEX, STEP = data_name(0), index_name(0), "step_00000001"
MOST_GROWN = 64 << 20
"""What reading an index of the largest size may take; the claims are of terabytes."""
Body = dict[str, Any]
Change = Callable[[Body], object]


def honest(shelf: Path) -> Path:
    """A checkpoint that is whole: a, 1100 of int64, and b, 5 x 3 of fp32, behind it."""
    tensors = {"a": by_hand.bits(torch.int64, (1100,), 0), "b": by_hand.bits(torch.float32, (5, 3), 1)}
    pieces = {name: by_hand.piece(name, tensor) for name, tensor in tensors.items()}
    path = by_hand.write(shelf / STEP, [pieces], step=1)
    by_hand.point(shelf, STEP)
    return path


# What is sealed as it should be, and false


def sealed(path: Path, change: Change | bytes) -> str:
    """Change the body of a file in place, or by what is returned, or give it another; its new checksum."""
    body = by_hand.body_of(path)
    found = change(body) if callable(change) else change
    return write_sealed(path, found if isinstance(found, bytes) else body)


def claim(index: Change | bytes, shelf: Path) -> None:
    """Seal an index that says something else, and the manifest that names it."""
    claim_of_manifest(says(seals=[sealed(shelf / STEP / INDEX, index)]), shelf)


def claim_of_manifest(change: Change | bytes, shelf: Path) -> None:
    sealed(shelf / STEP / MANIFEST, change)


def says(**changes: Any) -> Change:
    return lambda index: index.update(changes)


def part(**changes: Any) -> Change:
    """Of the tensor b."""
    return lambda index: index["parts"]["b"].update(changes)


def twice(key: bytes, index: Body) -> bytes:
    """The index, with one entry of it given a second time."""
    body = msgspec.json.encode(index, order="sorted")
    start = body.index(key)
    end = body.index(b"}", start) + 1 if body[start + len(key) :].startswith(b"{") else body.index(b",", start)
    return body[:start] + body[start:end] + b"," + body[start:]


def of_one_tensor(index: Body) -> None:
    for each in index["parts"].values():
        each.update(of="a")


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


NESTED, BEYOND, NO_SEAL = b"[" * 100_000 + b"]" * 100_000, [1 << 40, 1 << 40, 0], "0" * 16
INDEXES: dict[str, Change | bytes] = {
    "no JSON": b"\x80\x04.",
    "nested too deep": NESTED,
    "a bomb of names": lambda _: b'{"parts":{%s}}' % b",".join(b'"%d":0' % n for n in range(10**6)),
    "an index beyond 64 MiB": lambda _: b'{"parts":{"a":"%s"}}' % (b"a" * (64 << 20)),
    "an integer of 4000 digits": b'{"block_bytes":%s}' % (b"9" * 4000),
    "an integer of 5000 digits": b'{"block_bytes":%s}' % (b"9" * 5000),
    "a part's name twice": partial(twice, b'"b":'),
    "a key twice": partial(twice, b'"rank":'),
    "a key unknown": says(code="import os"),
    "spaces": lambda index: json.dumps(index).encode(),
    "a rank's number": says(rank=1),
    "a number as a text": says(rank="0"),
    "a negative start": part(start=-4, end=56),
    "a negative offset": part(offset=[-1, 0]),
    "a negative size": part(size=[-5, -3]),
    "an end before its start": part(start=8860, end=8800),
    "bytes twice": part(start=8740, end=8800),
    "a hole between parts": part(start=8804, end=8864),
    "beyond the file": part(shape=[9, 3], size=[9, 3], end=8800 + 108),
    "beyond the tensor": part(offset=[1, 0]),
    "bytes that are not the size's": part(shape=[5, 4], size=[5, 4]),
    "a part of another size than its shape": part(shape=[6, 3]),
    "dims that differ": part(offset=[0]),
    "a thousand dims": part(shape=[1] * 1000, offset=[0] * 1000, size=[1] * 1000),
    "a dtype that is none": part(dtype="F8_E9"),
    "a dtype that is code": part(dtype="__import__('os').system('touch /tmp/x')"),
    "a shape beyond 64 bits": part(shape=BEYOND, offset=[0, 0, 0], size=BEYOND, end=8800),
    "a dim beyond 64 bits": part(shape=[0, 1 << 64], offset=[0, 0], size=[0, 1 << 64], end=8800),
    "a shape of which nothing is there": of_nothing,
    "one tensor of two shapes": of_one_tensor,
    "two parts in one place": overlapping,
    "a file of a terabyte": says(file_bytes=1 << 40),
    "a block of a terabyte": says(block_bytes=1 << 40, sums=[NO_SEAL]),
    "a block of half a page": says(block_bytes=2048),
    "a block of nothing": says(block_bytes=0),
    "too few checksums": lambda index: index.update(sums=index["sums"][1:]),
    "a checksum that is none": lambda index: index.update(sums=["x" * 16] * len(index["sums"])),
    "false checksums": lambda index: index.update(sums=[NO_SEAL] * len(index["sums"])),
    "data before the file": says(data_start=-4096),
    "data behind the file": says(data_start=1 << 20),
}
STATE = b'{"seals":["%s"],"state":{"a":%s},"step":1,"version":1}'
MANIFESTS: dict[str, Change | bytes] = {
    "nested too deep, in the state": STATE % (NO_SEAL.encode(), NESTED),
    "a manifest beyond 16 MiB": lambda body: body.update(state={"a": {"a": "a" * (16 << 20)}}),
    "a step below 0": says(step=-1),
    "another version": says(version=2),
    "no ranks": says(seals=[]),
    "a million ranks": says(seals=[NO_SEAL] * 10**5),
    "a path for a seal": says(seals=["../../../etc/pas"]),
}
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


# What lies in a file's or a folder's place


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


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
PLACES = {DATA: f"{STEP}/{DATA}", INDEX: f"{STEP}/{INDEX}", MANIFEST: f"{STEP}/{MANIFEST}", LATEST: LATEST, STEP: STEP}


def instead(make: Callable[[Path, Path], object], place: str, shelf: Path) -> None:
    """Something else in a place, from which what was there is moved out of the shelf."""
    path, outside = shelf / place, shelf.parent / "outside" / Path(place).name
    outside.parent.mkdir(exist_ok=True)
    path.rename(outside)
    make(path, outside)


CASES: dict[str, Callable[[Path], object]] = {
    **{f"it claims {name}": partial(claim, index) for name, index in INDEXES.items()},
    **{f"it claims {name}": partial(claim_of_manifest, body) for name, body in MANIFESTS.items()},
    **{f"the pointer says {name}": partial(by_hand.point, name=to) for name, to in POINTERS.items()},
    **{
        f"{kind} in place of {name}": partial(instead, make, place)
        for kind, make in KINDS.items()
        for name, place in PLACES.items()
    },
}
REASONS = {
    "it claims a part's name twice": (INDEX, "it is not what dzero writes: cut short, keys twice"),
    "it claims a bomb of names": (INDEX, "Expected `object`, got `int`"),
    "it claims an index beyond 64 MiB": (INDEX, "more than the 67108864 that it may have"),
    "it claims nested too deep, in the state": (MANIFEST, "maximum recursion depth exceeded"),
    "it claims bytes twice": (INDEX, "b starts at byte 8740 where the part before ends at 8800"),
    "it claims beyond the file": (INDEX, "its parts end at byte 13004 of 12956"),
    "it claims a dtype that is none": (INDEX, "b: dtype 'F8_E9', not one of ['F32', "),
    "it claims a dim beyond 64 bits": (INDEX, "no memory holds F32 [0, 18446744073709551616]"),
    "it claims a shape of which nothing is there": (MANIFEST, "0 of 1125899906842624 elements are there"),
    "it claims two parts in one place": (MANIFEST, "a: two parts overlap at [0, 0]"),
    "it claims a file of a terabyte": (INDEX, "4 checksums for 1099511627776 bytes"),
    "it claims false checksums": (DATA, "is not what was written"),
    "it claims another version": (MANIFEST, "install a newer one"),
    "it claims no ranks": (MANIFEST, "step 1 of 0 ranks"),
    f"a link in place of {DATA}": (DATA, "symbolic links are not followed in checkpoints"),
    f"a pipe in place of {INDEX}": (INDEX, "it is no regular file"),
    "the pointer says up": (LATEST, "'../outside' is no name of a checkpoint"),
}
"""The file and the reason of some, which another mistake in the case would not give."""


def listed(folder: Path) -> dict[str, tuple[int, ...]]:
    """Everything below: its kind, size and when it was last changed."""
    found = {}
    for path in folder.rglob("*"):
        told = path.lstat()
        found[str(path)] = (told.st_mode, told.st_size, told.st_mtime_ns, told.st_nlink)
    return found


def peak_bytes() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def tried(rank: int, ranks: int, folder: Path) -> list[Body]:
    """What a program is told that reads all there is of each case, and by how many bytes its memory grew meanwhile."""
    by_hand.verified(honest(folder.parent / "honest"))  # threads, and what else is there once
    found = []
    for number in range(len(CASES)):
        shelf = folder / str(number) / "shelf"
        Path("/proc/self/clear_refs").write_text("5")
        before, seen = peak_bytes(), {"shelf": str(shelf), "refused": False, "path": ""}
        try:
            seen["text"] = f"{by_hand.verified(shelf)} bytes were read"
        except CheckpointError as error:
            seen |= {"refused": True, "path": error.path, "text": str(error)[:500]}
        except Exception as error:
            seen["text"] = repr(error)
        found.append(seen | {"grown": peak_bytes() - before})
    return found


@pytest.fixture(scope="module")
def seen(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Body]:
    """What was told of each; all of them are left as they were."""
    folder = tmp_path_factory.mktemp("hostile") / "cases"
    for number, change in enumerate(CASES.values()):
        (folder / str(number)).mkdir(parents=True)
        honest(folder / str(number) / "shelf")
        change(folder / str(number) / "shelf")
    before = listed(folder)
    (found,) = pool.run(tried, 1, folder, timeout_s=240)
    assert listed(folder) == before
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_with_its_file_in_little_memory(seen: dict[str, Body], name: str) -> None:
    each = seen[name]
    assert each["refused"], each
    assert each["path"].startswith(each["shelf"]), each
    assert each["path"] in each["text"], each
    assert each["grown"] < MOST_GROWN, each
    if name in REASONS:
        file, text = REASONS[name]
        assert text in each["text"]
        assert Path(each["path"]).name == file


def test_what_claims_nothing_else_is_read(tmp_path: Path) -> None:
    """Sealed by the same helper, without a change: nothing is refused for how it was sealed."""
    honest(tmp_path / "shelf")
    claim(says(), tmp_path / "shelf")
    assert by_hand.verified(tmp_path / "shelf") == 4096 + 8800 + 60


def saved_beside_links(rank: int, ranks: int, folder: Path) -> str:
    """Resume and save where links lead to `outside`, then where the lock is one; what is said of the lock."""
    sharded = sharded_net(stage=1)
    optim, config = AdamW(sharded), CheckpointConfig(folder=str(folder / "shelf"), keep=1)
    with Checkpointer(config, sharded, optim) as checkpoints:
        checkpoints.save(1, {})
    for name in ("step_00000007.partial", "step_00000008.going", "step_00000009"):
        (folder / "shelf" / name).symlink_to(folder / "outside")
    for name in (f"{LATEST}.partial", f"{LATEST}.going"):
        (folder / "shelf" / name).symlink_to(folder / "outside" / MANIFEST)
    with Checkpointer(config, sharded, optim) as checkpoints:
        checkpoints.resume("auto")
        checkpoints.save(9, {})
    (folder / "shelf" / LOCK).unlink()
    (folder / "shelf" / LOCK).symlink_to(folder / "outside" / "new")
    with pytest.raises(CheckpointError) as told:
        Checkpointer(CheckpointConfig(folder=config.folder, every=1), sharded, optim)
    return str(told.value)


def test_links_in_a_folder_of_checkpoints_lead_no_save_outside(pool: Pool, tmp_path: Path) -> None:
    """A run that saves, tidies up and keeps one checkpoint touches nothing that a link there points to."""
    honest(tmp_path / "shelf").rename(tmp_path / "outside")
    (tmp_path / "shelf" / LATEST).unlink()
    before = listed(tmp_path / "outside")
    (told,) = pool.run(saved_beside_links, 1, tmp_path)
    assert "symbolic links are not followed" in told
    assert sorted(os.listdir(tmp_path / "shelf")) == [LOCK, LATEST, "step_00000009", "step_00000009_2"]
    assert listed(tmp_path / "outside") == before
