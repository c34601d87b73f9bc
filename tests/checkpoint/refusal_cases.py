"""What saves and commands say where the system refuses: python refusal_cases.py CASE FOLDER.

Each prints what it saw as its last line, in JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import written_checkpoints as by_hand
from in_process import dzero as command
from torch import nn
from written_checkpoints import LATEST, MANIFEST, data_name, index_name

import dzero
from dzero import CheckpointConfig, Checkpointer, CheckpointError

MIB = 1 << 20
STEP = "step_00000001"


def saving(folder: Path | str, **settings: Any) -> Checkpointer:
    """Of a small model, which locks the folder at once."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sharded = dzero.shard(nn.Linear(2, 2), stage=1, precision="fp32")
    config = CheckpointConfig(folder=str(folder), every=1, **settings)
    return Checkpointer(config, sharded, dzero.AdamW(sharded))


def save(checkpoints: Checkpointer, step: int, count: int) -> str | None:
    """A checkpoint of `count` bytes and a few, worse than those before; its name. Raises CheckpointError."""
    checkpoints.save(step, {"held_out_loss": step}, local={"a": torch.full((count // 4,), float(step))})
    return checkpoints.finish()


def told(work: Callable[[], object]) -> str:
    """The text of the error that it raises."""
    try:
        return f"no error: {work()}"
    except CheckpointError as error:
        return str(error)


def held(folder: Path) -> float:
    """The value of every element of the latest checkpoint."""
    with saving(folder.parent / "unused") as checkpoints:
        resumed = checkpoints.resume(str(folder))
    assert resumed is not None
    assert resumed.local is not None
    (value,) = resumed.local["a"].unique().tolist()
    return float(value)


def free(path: Path) -> int:
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def small_disks(folder: Path) -> str:
    """Disks of 8 MiB in `small` and `kept`, a read-only folder in `fixed`, for this process; or why it may not."""
    namespaces, owner = 0x10000000 | 0x00020000, (os.getuid(), os.getgid())  # CLONE_NEWUSER, CLONE_NEWNS
    if ctypes.CDLL(None, use_errno=True).unshare(namespaces):
        return os.strerror(ctypes.get_errno())
    Path("/proc/self/setgroups").write_text("deny")
    for kind, own in zip(("uid", "gid"), owner, strict=True):
        Path(f"/proc/self/{kind}_map").write_text(f"0 {own} 1")
    for name in ("small", "kept", "fixed"):
        (folder / name).mkdir()
    (folder / "fixed" / ".lock").touch()
    for name in ("small", "kept"):
        mount("-t", "tmpfs", "-o", "size=8m", "none", folder / name)
    mount("--bind", folder / "fixed", folder / "fixed")
    mount("-o", "remount,bind,ro", folder / "fixed")
    return ""


def mounted(folder: Path) -> dict[str, Any]:
    """Saves on full disks and on one that is read-only."""
    if why := small_disks(folder):
        return {"not permitted": why}
    small, kept, fixed = (folder / name for name in ("small", "kept", "fixed"))
    seen: dict[str, Any] = {"read_only": told(lambda: saving(fixed))}
    with saving(small, keep=1) as checkpoints:
        save(checkpoints, 1, 3 * MIB)
        before = free(small)
        seen["second"] = told(lambda: save(checkpoints, 2, 6 * MIB))
        seen["left"], seen["given back"] = sorted(os.listdir(small)), free(small) - before
        seen["third"] = save(checkpoints, 3, 3 * MIB)
        with (small / "others").open("wb", buffering=0) as others:
            while count := free(small):
                others.write(bytes(min(count, MIB)))
        seen["no room"] = told(lambda: save(checkpoints, 4, 1024))
        os.truncate(small / "others", (small / "others").stat().st_size - 8192)
        seen["no room for the index"] = told(lambda: save(checkpoints, 5, 1024))
    seen["latest then"] = held(small)
    with saving(kept, keep=3) as checkpoints:
        seen["kept"] = [save(checkpoints, step, 3 * MIB) for step in (1, 2)]
        seen["kept, no room"] = told(lambda: save(checkpoints, 3, 3 * MIB))
    with saving(kept, keep=1, keep_best=True) as checkpoints:
        checkpoints.resume("auto")
        told(lambda: save(checkpoints, 3, 3 * MIB))
        seen["the best, no room"] = sorted(os.listdir(kept))
    with saving(kept, keep=1) as checkpoints:
        checkpoints.resume("auto")
        seen["smaller keep"] = save(checkpoints, 3, 3 * MIB), sorted(os.listdir(kept))
    path = by_hand.write_llama(folder / "large", {}, vocab=3 * MIB // 20)
    seen["export"] = command("export", path, kept / "out", "--dtype", "fp32").stderr.strip(), sorted(os.listdir(kept))
    return seen


def limited(folder: Path) -> dict[str, Any]:
    """What a save takes of memory, what another run in the folder is told, and a save above the limit of files."""
    states = 64 * MIB
    with saving(folder, staging_bytes=MIB) as checkpoints:
        save(checkpoints, 1, MIB)  # threads, and what else is there once
        seen: dict[str, Any] = {"saved": grown(lambda: save(checkpoints, 2, states))}
        seen["verified"] = grown(lambda: command("inspect", folder, "--verify"))
        large = by_hand.write_llama(folder.parent / "large", {}, vocab=states // 4096, width=1024)
        small = by_hand.write_llama(folder.parent / "small", {})
        command("export", small, folder.parent / "first")
        seen["exported"] = grown(lambda: command("export", large, folder.parent / "out", "--dtype", "fp32"))
        seen["bytes exported"] = (folder.parent / "out" / "model.safetensors").stat().st_size
        seen["another run"] = told(lambda: saving(folder))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))  # Python ignores the signal of it
        seen["too large"] = told(lambda: save(checkpoints, 3, 2 * MIB))
    return seen | {"left": sorted(os.listdir(folder))}


def grown(work: Callable[[], object]) -> int:
    """Bytes by which the most memory that was ever resident is more after `work` than before."""

    def most() -> int:
        return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

    Path("/proc/self/clear_refs").write_text("5")
    before = most()
    work()
    return most() - before


MAY_NOT = "Permission denied: this user may not; change the permissions, or checkpoint.folder"
ELSEWHERE = "Permission denied: choose another folder; nothing was exported"


def forbidden(folder: Path) -> dict[str, Any]:
    """What a user may not do with a checkpoint when it is taken from them, by a loop of one's own and by commands."""
    shelf, fixed, wrong = folder / "shelf", folder / "fixed", list[str]()
    path = by_hand.write_llama(shelf / STEP, {})
    by_hand.point(shelf, STEP)
    fixed.mkdir()
    data, index, manifest = path / data_name(0), path / index_name(0), path / MANIFEST
    of_shelf = f"{shelf}/{MANIFEST}: {MAY_NOT}"
    rows: list[tuple[Path, int, Callable[[], object] | str, str]] = [
        (data, 0, lambda: by_hand.verified(path), f"{data}: {MAY_NOT}"),
        (index, 0, lambda: by_hand.verified(path), f"{index}: {MAY_NOT}"),
        (path, 0, lambda: by_hand.verified(path), f"{manifest}: {MAY_NOT}"),
        (shelf, 0, lambda: by_hand.verified(shelf), of_shelf),
        (shelf / LATEST, 0, lambda: by_hand.verified(shelf), f"{shelf}/{LATEST}: {MAY_NOT}"),
        (shelf, 0o555, lambda: saving(shelf), f"{shelf}/.lock: {MAY_NOT}"),
        (shelf, 0o555, lambda: saving(shelf / "new" / "er"), f"{shelf}/new: {MAY_NOT}"),
        (shelf, 0, f"inspect {shelf}", f"error: {of_shelf}"),
        (path, 0, f"inspect {path} --verify", f"error: {manifest}: {MAY_NOT}"),
        (manifest, 0, f"inspect {path}", f"error: {manifest}: {MAY_NOT}"),
        (path, 0, f"export {path} {folder}/out", f"error: {manifest}: {MAY_NOT}"),
        (shelf, 0, f"export {shelf} {folder}/out", f"error: {of_shelf}"),
        (data, 0, f"export {path} {folder}/out", f"error: {data}: {MAY_NOT}"),
        (fixed, 0o555, f"export {path} {fixed}/out", f"error: {fixed}/out.partial: {ELSEWHERE}"),
        (fixed, 0, f"export {path} {fixed}/new/out", f"error: {fixed}/new: {ELSEWHERE}"),
    ]
    for taken, mode, work, says in rows:
        before = taken.stat().st_mode
        taken.chmod(mode)
        found = command(*work.split()).stderr.strip() if isinstance(work, str) else told(work)
        taken.chmod(before)
        wrong += [] if found == says else [f"{says!r}, but {found!r}"]
    return {"wrong": wrong, "left": sorted(os.listdir(folder))}


if __name__ == "__main__":
    cases = {each.__name__: each for each in (mounted, limited, forbidden)}
    try:
        print(json.dumps(cases[sys.argv[1]](Path(sys.argv[2]))), flush=True)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
