"""The run for TensorBoard: scalars by step, the resolved config and the closing summary as text.

loss/train  loss/held_out                                   nats
optim/lr  optim/grad_norm  optim/loss_scale  optim/skipped_steps (so far)
speed/tokens_per_s  speed/mfu (a fraction)  speed/step_s  speed/tokens (so far)
memory/<kind>_bytes  traffic/<kind>_bytes                   of rank 0; traffic is that of one step
offload/<lane>_busy_s  .._waited_s  .._moved_bytes          of rank 0 and one step: at work, stood waiting for, moved
memory/planned_bytes                                        what the plan says the device's peak would be, process aside
plan                                                        image
plan  config  note  summary                                 text
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from dzero.monitor.records import RunSummary, StepRecord
from dzero.monitor.tables import summary_tables
from dzero.offload.swap import LaneUse
from dzero.terminal import Table, plain


class TensorBoardSink:
    """Event files under `folder`, which is made if need be. `resolved_config`: YAML text. Use on one rank only."""

    def __init__(self, folder: Path, *, resolved_config: str = "", scalars_every_steps: int = 1) -> None:
        self._every = scalars_every_steps
        self._writer = SummaryWriter(str(folder))
        if resolved_config:
            self._writer.add_text("config", code_block(resolved_config, "yaml"), 0)

    def step(self, record: StepRecord) -> None:
        """Write the scalars of every `scalars_every_steps`-th step; what is not known has no point."""
        if record.step % self._every == 0:
            for tag, value in scalars(record).items():
                if value is not None:
                    self._writer.add_scalar(tag, value, record.step)

    def held_out(self, step: int, loss: float) -> None:
        """Write a held-out loss [nats]."""
        self._writer.add_scalar("loss/held_out", loss, step)

    def note(self, step: int, message: str) -> None:
        """Keep something rare as text."""
        self._writer.add_text("note", code_block(message), step)

    def plan(
        self, step: int, tables: Sequence[Table], verdict: str, picture: np.ndarray[Any, Any] | None, peak_bytes: int
    ) -> None:
        """Keep a plan: its tables as text, its picture (uint8 [height, width, RGB]), the device's peak that it says."""
        self._writer.add_text("plan", code_block(f"{plain(tables)}\n\n{verdict}"), step)
        self._writer.add_scalar("memory/planned_bytes", peak_bytes, step)
        if picture is not None:
            self._writer.add_image("plan", picture, step, dataformats="HWC")

    def summary(self, summary: RunSummary) -> None:
        """Keep the closing tables as text."""
        self._writer.add_text("summary", code_block(plain(summary_tables(summary))), summary.steps)

    def close(self) -> None:
        """Flush to disk and end the writer's thread."""
        self._writer.close()


def scalars(record: StepRecord) -> dict[str, float | None]:
    """Values by tag; None where not known."""
    return {
        "loss/train": record.loss,
        "optim/lr": record.lr,
        "optim/grad_norm": record.grad_norm,
        "optim/loss_scale": record.loss_scale,
        "optim/skipped_steps": record.skipped_steps,
        "speed/tokens_per_s": record.speed.tokens_per_s,
        "speed/mfu": record.speed.mfu,
        "speed/step_s": record.seconds,
        "speed/tokens": record.tokens,
        **{f"memory/{kind}_bytes": count for kind, count in record.memory_bytes.items()},
        **{f"traffic/{kind}_bytes": count for kind, count in record.traffic_bytes.items()},
        **{
            f"offload/{lane.replace(' ', '_')}_{what}": value
            for lane, use in record.lanes.items()
            for what, value in _figures(use)
        },
    }


def _figures(use: LaneUse) -> list[tuple[str, float]]:
    return [("busy_s", use.busy_s), ("waited_s", use.waited_s), ("moved_bytes", use.moved_bytes)]


def code_block(text: str, language: str = "") -> str:
    """`text` as Markdown that keeps its columns."""
    return f"```{language}\n{text}\n```"
