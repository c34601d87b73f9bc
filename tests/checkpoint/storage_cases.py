"""What the storage tests run in other processes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shelves import entry, write
from torch import Tensor

from dzero import CheckpointConfig
from dzero.checkpoint.box import Box
from dzero.checkpoint.rank_consensus import RankConsensus
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.saver import Saver

MIB = 1 << 20


def recorded(rank: int, ranks: int, folder: Path) -> list[tuple[float, str, str]]:
    """Save twice; all calls that write, synchronise or rename: when it had returned, what it did, to which path.

    The calls are the system's own; only their wrappers in `os` are exchanged for ones that take notes.
    """
    calls: list[tuple[float, str, str]] = []
    really: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in ("pwritev", "fsync", "rename")}

    def path_of(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def noted(name: str, path: Callable[..., str], what: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            touched = path(*args, **kwargs)
            done = really[name](*args, **kwargs)
            if not calls or calls[-1][1:] != (what, touched):
                calls.append((time.monotonic(), what, touched))
            return done

        return call

    def renamed(old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> str:
        return str(new) if dst_dir_fd is None else f"{path_of(dst_dir_fd)}/{new}"

    try:
        os.pwritev = noted("pwritev", lambda fd, *_: path_of(fd), "write")  # type: ignore[assignment]
        os.fsync = noted("fsync", path_of, "sync")  # type: ignore[assignment]
        os.rename = noted("rename", renamed, "rename")  # type: ignore[assignment]
        agreement = RankConsensus(str(folder))
        with Saver(CheckpointConfig(folder=str(folder), keep=1), agreement) as saver:
            for step in (1, 2):
                whole = torch.arange(60_000 * ranks, dtype=torch.float32) * step
                part, tensor = entry("a", whole, Box((60_000 * rank,), (60_000,)))
                saver.save(step, lambda part=part: {"a": part}, lambda put, tensor=tensor: put("a", tensor), {})  # type: ignore[misc]
            saver.finish()
        agreement.close()
    finally:
        for name, call in really.items():
            setattr(os, name, call)
    return calls


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def grown(work: Callable[[], object]) -> int:
    """Bytes by which the most memory that was ever resident is more after `work` than before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    work()
    return peak_bytes() - before


def memory(folder: str) -> dict[str, int]:
    """Write and verify 64 tensors of 4 MiB, of which only one is in memory."""
    tensor = torch.arange(MIB, dtype=torch.float32)
    whole: Tensor = tensor.expand(64, MIB)
    entries = {f"a{n}": (entry("a", whole, Box((n, 0), (1, MIB)))) for n in range(64)}
    torch.ones(4 * MIB).sum()  # threads, and what else is there once
    written = grown(lambda: write(Path(folder), 1, [entries], block_bytes=MIB))
    with Checkpoint(Path(folder) / "step_00000001") as checkpoint:
        read = grown(lambda: [*checkpoint.verify()])
    return {"written": written, "read": read, "file_bytes": checkpoint.indexes[0].file_bytes}


if __name__ == "__main__":
    print(json.dumps(memory(sys.argv[1])))
