"""What is known of a pipeline before it runs: which microbatches fit, their order, and what travels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dzero.comm.ledger import Entry, Traffic, dtype_key
from dzero.mesh import PIPELINE
from dzero.parallel.pipeline.split import ModelStages


@dataclass(frozen=True)
class HiddenStates:
    """What travels between parts: hidden states of one microbatch, as a rank has them."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of one microbatch."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def on(self, device: torch.device | str) -> Tensor:
        """Room for them."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def order_of(schedule: str, microbatches: int, part: int, parts: int) -> list[tuple[str, int]]:
    """What a rank with one part runs: ("forward" or "backward", microbatch), in order. With one part in all, a backward
    follows its forward. Raises ValueError for a schedule of several parts."""
    if schedule not in ("1f1b", "gpipe"):
        raise ValueError(f"mesh.pp_schedule={schedule}: only of 1f1b and gpipe is the order known beforehand")
    ahead = microbatches if schedule == "gpipe" else min(microbatches, parts - part)
    order = [("forward", index) for index in range(ahead)]
    for index in range(microbatches):
        order.append(("backward", index))
        if ahead + index < microbatches:
            order.append(("forward", ahead + index))
    return order


def expected_pipeline(parts: ModelStages, hidden: HiddenStates, *, microbatches: int) -> dict[Entry, Traffic]:
    """Calls and bytes that this rank sends in a step, by the ledger's entries (phase pipeline): the hidden states of
    every microbatch forward from each part but the last, their gradients back from each but the first."""
    forward = sum(part.index < parts.count - 1 for part in parts.own)
    back = sum(part.index > 0 for part in parts.own)
    calls = (forward + back) * microbatches
    entry = Entry("pipeline", "send", PIPELINE, dtype_key(hidden.dtype))
    return {entry: Traffic(calls, calls * hidden.bytes)} if calls else {}
