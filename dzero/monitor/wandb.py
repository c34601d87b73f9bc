"""Weights & Biases sink (extra `wandb`): the scalars of the TensorBoard sink, under the same names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dzero.errors import import_optional
from dzero.monitor.records import RunSummary, StepRecord, perplexity
from dzero.monitor.tensorboard import held_out_scalars, scalars


class WandbSink:
    """Sink that sends records to a project of Weights & Biases. Use it on one rank only.

    The library's own environment variables apply, such as WANDB_MODE=offline, which writes files to send later.
    """

    def __init__(self, project: str, folder: Path, *, resolved_config: str, scalars_every_steps: int) -> None:
        wandb: Any = import_optional("wandb", f"monitor.wandb={project}", "wandb")
        self._every = scalars_every_steps
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._run = wandb.init(
            project=project,
            dir=str(folder),
            config=OmegaConf.to_container(OmegaConf.create(resolved_config)),
            settings=settings,
            job_type="train",
        )

    def step(self, record: StepRecord) -> None:
        """Send the scalars of every `scalars_every_steps`-th step."""
        if record.step % self._every == 0:
            known = {tag: value for tag, value in scalars(record).items() if value is not None}
            self._run.log(known, step=record.step)

    def held_out(self, step: int, loss: float, by_source: Mapping[str, float]) -> None:
        """Send a held-out loss [nats] and its perplexity, and those of each source of a mixture."""
        self._run.log(held_out_scalars(loss, by_source), step=step)

    def note(self, step: int, message: str) -> None:
        """Leave notes to the log and to TensorBoard."""

    def summary(self, summary: RunSummary) -> None:
        """Set the closing figures of the run."""
        held_out = summary.held_out_loss
        figures = {"loss": summary.loss, "held_out_loss": held_out, "steps": summary.steps}
        if held_out is not None:
            figures["held_out_perplexity"] = perplexity(held_out)
        self._run.summary.update(figures)

    def close(self) -> None:
        """Send what is left, and end the run."""
        self._run.finish()
