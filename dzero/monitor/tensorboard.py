"""TensorBoard sink: scalars by step; the resolved config, the plan, notes and the closing summary as text.

loss/train  loss/held_out  loss/held_out_<source>            nats; the last of each source of a mixture
perplexity/held_out  perplexity/held_out_<source>            exp(loss)
data/<source>_tokens  data/<source>_epochs                  of a mixture: tokens counted in a step, epochs so far
optim/lr  optim/grad_norm  optim/loss_scale  optim/skipped_steps (so far)
speed/tokens_per_s  speed/mfu (a fraction)  speed/step_s  speed/tokens (so far)
memory/<kind>_gib  traffic/<kind>_gib                       GiB of rank 0; traffic is that of one step
offload/<lane>_busy_s  .._waited_s  .._moved_gib            of rank 0 in one step: busy, waited for, moved
memory/planned_gib                                          planned peak of the device, without the process
plan                                                        image
plan  config  note  summary                                 text; notes of one step are one entry
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from dzero.errors import RunError
from dzero.monitor.records import RunSummary, StepRecord, perplexity
from dzero.monitor.summary import summary_tables
from dzero.utils.terminal import Table, plain

GIB = 2**30


def check_folder(folder: Path) -> None:
    """Create `folder` for event files; raise RunError if it cannot be created or is not writable."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise RunError(f"--tensorboard={folder}: {there} is no folder; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunError(f"--tensorboard={folder}: this user may not write in {there}; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--tensorboard={folder}: it cannot be made: {error.strerror}; name another folder") from error


class TensorBoardSink:
    """Sink that writes event files to `folder`, with the run's configuration as YAML. Use it on one rank only."""

    def __init__(self, folder: Path, *, resolved_config: str = "", scalars_every_steps: int = 1) -> None:
        self._every = scalars_every_steps
        self._writer = SummaryWriter(str(folder))
        threading.excepthook = partial(_unless_writers, threading.excepthook)
        self._notes, self._notes_step = list[str](), 0
        if resolved_config:
            self._writer.add_text("config", code_block(resolved_config, "yaml"), 0)

    def step(self, record: StepRecord) -> None:
        """Write the scalars of every `scalars_every_steps`-th step; unknown values are left out."""
        self._write_notes()
        if record.step % self._every == 0:
            for tag, value in scalars(record).items():
                if value is not None:
                    self._writer.add_scalar(tag, value, record.step)

    def held_out(self, step: int, loss: float, by_source: Mapping[str, float]) -> None:
        """Write a held-out loss [nats] and its perplexity, and those of each source of a mixture."""
        for tag, value in held_out_scalars(loss, by_source).items():
            self._writer.add_scalar(tag, value, step)

    def note(self, step: int, message: str) -> None:
        """Buffer a message; all messages of a step are written as one text."""
        if step != self._notes_step:
            self._write_notes()
        self._notes_step = step
        self._notes.append(message)

    def plan(
        self, step: int, tables: Sequence[Table], verdict: str, picture: np.ndarray[Any, Any] | None, peak_bytes: int
    ) -> None:
        """Write a plan at a step: tables and verdict as text, a picture (uint8 [height, width, RGB]), and the peak."""
        self._writer.add_text("plan", code_block(f"{plain(tables)}\n\n{verdict}"), step)
        self._writer.add_scalar("memory/planned_gib", peak_bytes / GIB, step)
        if picture is not None:
            self._writer.add_image("plan", picture, step, dataformats="HWC")

    def summary(self, summary: RunSummary) -> None:
        """Write the closing tables as text."""
        self._writer.add_text("summary", code_block(plain(summary_tables(summary))), summary.steps)

    def close(self) -> None:
        """Flush to disk and end the writer's thread."""
        self._write_notes()
        self._writer.close()

    def _write_notes(self) -> None:
        if self._notes:
            self._writer.add_text("note", code_block("\n".join(self._notes)), self._notes_step)
            self._notes = []


def _unless_writers(otherwise: Callable[[Any], Any], failure: threading.ExceptHookArgs) -> None:
    """Print no traceback for TensorBoard's writer thread, because the next call of the writer raises the same error."""
    if not type(failure.thread).__module__.startswith("tensorboard."):
        otherwise(failure)


def scalars(record: StepRecord) -> dict[str, float | None]:
    """Return the values of a record by tag; None if unknown."""
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
        **{f"memory/{kind}_gib": count / GIB for kind, count in record.memory_bytes.items()},
        **{f"traffic/{kind}_gib": count / GIB for kind, count in record.traffic_bytes.items()},
        **{
            f"offload/{lane.replace(' ', '_')}_{what}": value
            for lane, use in record.lanes.items()
            for what, value in (
                ("busy_s", use.busy_s),
                ("waited_s", use.waited_s),
                ("moved_gib", use.moved_bytes / GIB),
            )
        },
        **{f"data/{name}_tokens": float(use.tokens) for name, use in record.sources.items()},
        **{f"data/{name}_epochs": use.epochs for name, use in record.sources.items()},
    }


def held_out_scalars(loss: float, by_source: Mapping[str, float]) -> dict[str, float]:
    """Return the held-out loss and its perplexity, and those of each source of a mixture, by tag."""
    losses = {"held_out": loss, **{f"held_out_{name}": each for name, each in by_source.items()}}
    return {f"loss/{name}": each for name, each in losses.items()} | {
        f"perplexity/{name}": perplexity(each) for name, each in losses.items()
    }


def code_block(text: str, language: str = "") -> str:
    """Return `text` as a Markdown code block, which keeps its columns."""
    return f"```{language}\n{text}\n```"
