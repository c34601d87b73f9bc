"""Properties of a pipeline that are known before it runs: the order of microbatches, and its traffic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dzero.comm.ledger import Entry, Traffic, dtype_key
from dzero.mesh import PIPELINE
from dzero.parallel.pipeline.split import ModelStages


@dataclass(frozen=True)
class HiddenStates:
    """Shape and dtype of the hidden states of one microbatch, which pipeline stages exchange."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of one microbatch."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def on(self, device: torch.device | str) -> Tensor:
        """Return an uninitialized tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def order_of(schedule: str, microbatches: int, stage: int, stages: int) -> list[tuple[str, int]]:
    """Return what stage `stage` of `stages` runs, alone on its rank: ("forward" or "backward", microbatch), in order.

    Raises:
        ValueError: If the schedule has several stages on a rank.
    """
    if schedule not in ("1f1b", "gpipe"):
        raise ValueError(f"mesh.pp_schedule={schedule}: only of 1f1b and gpipe is the order known beforehand")
    ahead = microbatches if schedule == "gpipe" else min(microbatches, stages - stage)
    order = [("forward", index) for index in range(ahead)]
    for index in range(microbatches):
        order.append(("backward", index))
        if ahead + index < microbatches:
            order.append(("forward", ahead + index))
    return order


def expected_pipeline(stages: ModelStages, hidden: HiddenStates, *, microbatches: int) -> dict[Entry, Traffic]:
    """Return the calls and bytes that this rank sends in a step, by ledger entry (phase pipeline).

    Hidden states of every microbatch are sent by each stage but the last, and their gradients by each stage but the
    first.
    """
    forward = sum(stage.index < stages.count - 1 for stage in stages.own)
    back = sum(stage.index > 0 for stage in stages.own)
    calls = (forward + back) * microbatches
    entry = Entry("pipeline", "send", PIPELINE, dtype_key(hidden.dtype))
    return {entry: Traffic(calls, calls * hidden.bytes)} if calls else {}
