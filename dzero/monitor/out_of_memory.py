"""Error report for a device that ran out of memory: what this rank held, for the user to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from dzero.errors import RunError
from dzero.hardware import format_bytes
from dzero.utils.torch_internals import dump_allocations

SNAPSHOT = "out_of_memory_rank_*.pickle"
REPAIRS = (
    "Needs less: block.activation_checkpoint=full, fewer train.microbatch_sequences (and more train.accumulate), "
    "block.loss_tiles, zero.stage=3 on more ranks, offload=host. zero=auto looks for what fits; `dzero plan` with the "
    "same settings shows when each kind is largest"
)


@contextmanager
def explained(
    folder: Path,
    rank: int,
    device: torch.device,
    held: Callable[[], Mapping[str, int]],
    planned: Callable[[], int | None],
) -> Iterator[None]:
    """Turn torch's OutOfMemoryError into a RunError that lists the memory held, and the planned peak.

    `held` returns the bytes of this rank at its peak, by kind; `planned` those of the plan, or None before the end of
    the first step. CUDA devices write the allocator's snapshot to `folder`.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        kinds = ", ".join(f"{kind} {format_bytes(count)}" for kind, count in held().items() if count)
        plan = "" if (peak := planned()) is None else f"; planned were {format_bytes(peak)} in all"
        lines = [
            f"rank {rank} ran out of memory on {device}: {str(error).splitlines()[0]}",
            f"at its peak it held {kinds}{plan}",
            REPAIRS,
        ]
        if device.type == "cuda":
            path = folder / SNAPSHOT.replace("*", str(rank))
            try:
                dump_allocations(str(path))
                lines.append(f"the allocator's blocks are in {path}, for https://pytorch.org/memory_viz")
            except (OSError, RuntimeError) as unwritten:
                lines.append(f"the allocator's blocks could not be written to {path}: {unwritten}")
        raise RunError("\n".join(lines)) from error
