"""What the tests of damage run in other processes: python damage_cases.py CASE ARGUMENT...

Each prints what it saw as its last line, in JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import by_hand
import torch
import torch.distributed as dist
from shelves import entry, write
from training_loops import sharded_net

import dzero.cli.checkpoints  # noqa: F401  # as `main` does when it has a command, while this user may still read them
from dzero import AdamW, CheckpointConfig, Checkpointer, CheckpointError
from dzero.__main__ import main
from dzero.checkpoint.box import Box
from dzero.checkpoint.format import MANIFEST, data_name, index_name, seal
from dzero.checkpoint.rank_consensus import RankConsensus
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.saver import Saver
from dzero.checkpoint.store import LATEST, CheckpointStore

MIB = 1 << 20
PUBLISHED = {"kind": "hf", "config": "{}"}


def resumed_from_damaged_pointers(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Step and notes of what a run resumes from, by what was done to the pointer; or the error's text."""
    sharded = sharded_net("uneven", stage=3)
    seen: dict[str, Any] = {}
    pointer, elsewhere = folder / LATEST, folder.parent / "elsewhere.json"
    with Checkpointer(CheckpointConfig(folder=str(folder)), sharded, AdamW(sharded, lr=1e-3)) as checkpoints:
        for step in (2, 3):
            checkpoints.save(step, {})
        checkpoints.finish()

        def case(name: str, change: Callable[[], object], which: str = "auto") -> None:
            dist.barrier()
            if rank == 0:
                change()
            dist.barrier()
            try:
                resumed = checkpoints.resume(which)
                assert resumed is not None
                seen[name] = [resumed.step, resumed.notes]
            except CheckpointError as error:
                seen[name] = str(error)

        def flip(path: Path) -> None:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)

        def link() -> None:
            elsewhere.write_bytes(seal({"name": "step_00000002"})[0])
            pointer.unlink()
            pointer.symlink_to(elsewhere)

        def directory() -> None:
            pointer.unlink()
            pointer.mkdir()

        def name(text: str) -> None:
            pointer.rmdir() if pointer.is_dir() else None
            pointer.write_bytes(seal({"name": text})[0])

        case("whole", lambda: None)
        case("flipped", lambda: flip(pointer))
        case("cut", lambda: pointer.write_bytes(b""))
        case("a link", link)
        case("a folder", directory)
        case("not a checkpoint's name", lambda: name("../step_00000002"))
        case("missing", pointer.unlink)
        case("by its name", lambda: None, str(folder / "step_00000002"))
        case("the newest is damaged, too", lambda: (name("?"), flip(folder / "step_00000003" / MANIFEST)))
        case("nothing opens", lambda: flip(folder / "step_00000002" / MANIFEST))
    return seen


def alone(folder: Path) -> RankConsensus:
    """A group of one, for a process that has none."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return RankConsensus(str(folder))


def save(saver: Saver, step: int, count: int) -> str | None:
    """A checkpoint of `count` bytes; its name. Raises CheckpointError."""
    part, tensor = entry("a", torch.full((count // 4,), float(step)))
    saver.save(step, lambda: {"a": part}, lambda put: put("a", tensor), {})
    return saver.finish()


def told(work: Callable[[], object]) -> str:
    """The text of the error that it raises."""
    try:
        return f"no error: {work()}"
    except CheckpointError as error:
        return str(error)


def latest(folder: Path) -> float:
    """The value of every element of the latest checkpoint."""
    with Checkpoint(folder / (CheckpointStore(folder).latest() or "")) as checkpoint:
        (value,) = checkpoint.read("a", Box.whole(checkpoint.part("a").shape)).unique().tolist()
    return float(value)


def free(path: Path) -> int:
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def mounted(folder: str) -> dict[str, Any]:
    """Disks of 8 MiB in `small` and `kept`, a read-only folder in `fixed`."""
    small, kept, fixed = (Path(folder) / name for name in ("small", "kept", "fixed"))
    seen: dict[str, Any] = {}
    with Saver(CheckpointConfig(folder=str(small), keep=1), alone(small)) as saver:
        save(saver, 1, 3 * MIB)
        before = free(small)
        seen["second"] = told(lambda: save(saver, 2, 6 * MIB))
        seen["left"], seen["free"], seen["first"] = sorted(os.listdir(small)), before - free(small), latest(small)
        seen["third"] = save(saver, 3, 3 * MIB)
        with (small / "others").open("wb", buffering=0) as others:
            while count := free(small):
                others.write(bytes(min(count, MIB)))
        seen["no room"] = told(lambda: save(saver, 4, 4096))
        os.truncate(small / "others", (small / "others").stat().st_size - 8192)
        seen["no room for the index"] = told(lambda: save(saver, 5, 4096))
        seen["latest then"] = latest(small)
    with Saver(CheckpointConfig(folder=str(kept), keep=3), alone(kept)) as saver:
        seen["kept"] = [save(saver, step, 3 * MIB) for step in (1, 2)]
        seen["kept, no room"] = told(lambda: save(saver, 3, 3 * MIB))
        lineage = saver._lineage
        assert lineage is not None
    with Saver(CheckpointConfig(folder=str(kept), keep=1), alone(kept)) as saver:
        saver.claim(lineage.resumed(2), kept / "step_00000002")
        seen["smaller keep"] = save(saver, 3, 3 * MIB), sorted(os.listdir(kept))
    return {"full": seen, "read_only": told(lambda: Saver(CheckpointConfig(folder=str(fixed)), alone(fixed)))}


def too_large(folder: str) -> dict[str, Any]:
    """The process's limit on file sizes is 1 MiB; a signal of it is ignored by Python."""
    with Saver(CheckpointConfig(folder=folder), alone(Path(folder))) as saver:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        return {"told": told(lambda: save(saver, 1, 2 * MIB)), "left": os.listdir(folder)}


def forbidden(folder: str) -> dict[str, str]:
    """What a user may not do with a checkpoint when it is taken from them; root becomes nobody first."""
    shelf = Path(folder) / "shelf"
    path = write(shelf, 1, [{"a": entry("a", torch.ones(4))}])
    agreement, config = alone(shelf), CheckpointConfig
    if os.geteuid() == 0:
        for each in (Path(folder), shelf, path, *path.iterdir(), *shelf.iterdir()):
            os.chown(each, 65534, 65534)
        os.seteuid(65534)
    seen: dict[str, str] = {}

    def without(each: Path, mode: int, name: str, work: Callable[[], object]) -> None:
        before = each.stat().st_mode
        each.chmod(mode)
        seen[name] = told(work)
        each.chmod(before)

    def read() -> float:
        return latest(shelf)

    without(shelf, 0o555, "save in a folder of others", lambda: Saver(config(folder=str(shelf)), agreement))
    without(shelf, 0o555, "save below it", lambda: Saver(config(folder=f"{shelf}/new/er"), agreement))
    without(path / data_name(0), 0, "read data", read)
    without(path / index_name(0), 0, "read index", read)
    without(path, 0, "read folder", read)
    without(shelf, 0, "read shelf", lambda: CheckpointStore(shelf).names())
    without(shelf / LATEST, 0, "latest", read)
    return seen


def denied(folder: str) -> dict[str, str]:
    """What `dzero inspect` and `dzero export` say of what this user may not do; root becomes nobody first."""
    shelf, fixed = Path(folder) / "shelf", Path(folder) / "fixed"
    path = by_hand.write(
        Path(folder) / "shelf" / "step_00000001", {"master.model.w": torch.ones(4)}, extra={"model": PUBLISHED}
    )
    fixed.mkdir()
    if os.geteuid() == 0:
        for each in (Path(folder), shelf, path, fixed, *path.iterdir()):
            os.chown(each, 65534, 65534)
        os.seteuid(65534)
    seen: dict[str, str] = {}

    def without(each: Path, mode: int, name: str, *words: str) -> None:
        before, sys.argv = each.stat().st_mode, ["dzero", *words]
        each.chmod(mode)
        try:
            main()
        except SystemExit as error:
            seen[name] = str(error.code)
        each.chmod(before)

    without(shelf, 0, "inspect a folder", "inspect", str(shelf))
    without(path, 0, "inspect a checkpoint", "inspect", str(path), "--verify")
    without(path / MANIFEST, 0, "inspect a manifest", "inspect", str(path))
    without(path, 0, "export a checkpoint", "export", str(path), f"{folder}/out")
    without(shelf, 0, "export a folder", "export", str(shelf), f"{folder}/out")
    without(path / data_name(0), 0, "export data", "export", str(path), f"{folder}/out")
    without(fixed, 0o555, "export to", "export", str(path), f"{fixed}/out")
    without(fixed, 0, "export below", "export", str(path), f"{fixed}/new/out")
    return seen


if __name__ == "__main__":
    cases = {each.__name__: each for each in (mounted, too_large, forbidden, denied)}
    try:
        print(json.dumps(cases[sys.argv[1]](*sys.argv[2:])), flush=True)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
