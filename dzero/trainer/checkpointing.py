"""Saving and resuming of a run: contents of its checkpoints, times of saves, and messages about them.

A resumed run has the same bits as one that was never stopped. So besides the states, a checkpoint stores the position
in the data, the number of steps (which determines the learning rate), the loss scale, every rank's random generators
and, for exports, a description of the model. Settings come from the command line, never from a checkpoint; differences
are reported. Those of the update rule are states too (`resume.override`), so a difference that nobody asked for is
refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.optim.lr_scheduler import LambdaLR

from dzero.checkpoint.checkpointer import Checkpointer, Resumed
from dzero.checkpoint.config import GROUP_SETTINGS
from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.export_hf import BASE
from dzero.checkpoint.format import MANIFEST
from dzero.checkpoint.manifest_types import check_extra
from dzero.checkpoint.selection import HELD_OUT, held_out_loss, step_of
from dzero.checkpoint.store import manifest_at
from dzero.checkpoint.whole_checkpoint import IMPORTED
from dzero.config import RunConfig
from dzero.data.stream import SequenceStream
from dzero.errors import RankLost
from dzero.mesh import PIPELINE, TENSOR
from dzero.models.base_record import base_difference
from dzero.models.published import describe
from dzero.monitor.sinks import Monitor
from dzero.optim.base import MasterOptimizer
from dzero.trainer.held_out import HeldOutRecord
from dzero.utils.renamed import renewed_settings
from dzero.utils.torch_internals import set_last_lr
from dzero.zero.sharded import Sharded

NO_NEWS = ("launch", "monitor", "profile", "checkpoint", "resume")
"""Groups whose settings change no result."""


@dataclass(frozen=True)
class Progress:
    """State of a run that changes with its steps, besides model and optimizer."""

    schedule: LambdaLR
    stream: SequenceStream
    held_out: HeldOutRecord


class RunCheckpoints:
    """Checkpoints of one worker's run. Methods do nothing if the run neither saves nor resumes.

    They raise `CheckpointError` if a checkpoint cannot be loaded or saved. `notes` are messages for the user about what
    `resume` found. With adapters, `base` is the record of the model that they belong to, whose frozen parameters are
    not saved.
    """

    def __init__(
        self,
        config: RunConfig,
        sharded: Sharded,
        optim: MasterOptimizer,
        progress: Progress,
        device: torch.device,
        base: dict[str, Any] | None = None,
    ) -> None:
        self._base = base
        self._config, self._device = config, device
        self._schedule, self._stream, self._held_out = progress.schedule, progress.stream, progress.held_out
        self._optim, self._model, self._readers = optim, sharded.model, config.mesh.readers(sharded.layout.ranks)
        wanted = config.checkpoint.every is not None or config.resume.source is not None
        frozen = [name for name, param in sharded.named_params().items() if not param.requires_grad]
        left_out = frozen if base is not None else []
        self._checkpoints = Checkpointer(config.checkpoint, sharded, optim, left_out=left_out) if wanted else None
        self.notes: list[str] = []

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._checkpoints is not None:
            self._checkpoints.__exit__(kind, error, at)

    def resume(self) -> int:
        """Resume from a checkpoint if the settings ask for it; return the number of steps made before, else 0."""
        if self._checkpoints is None:
            return 0
        config, resumed = self._config.resume, None
        if config.source is not None:
            groups = self._optim.scalars()["groups"]
            resumed = self._checkpoints.resume(config.source, strict=config.strict, override=self._overridden())
            if resumed is None:
                self.notes.append(f"resume: no checkpoint in {self._config.checkpoint.folder}; the run starts afresh")
        if resumed is None:
            if self._config.checkpoint.every is not None:
                self._checkpoints.begin()
            return 0
        for note in resumed.notes:  # immediately, and on stderr, which schedulers mail
            print(f"WARNING: {note}", file=sys.stderr, flush=True)
        if IMPORTED in resumed.extra:
            self._optim.take_settings(groups)
            return self._continue_imported(resumed)
        if missing := sorted({"stream", "step_sequences", "config"} - resumed.extra.keys()):
            raise CheckpointError(str(resumed.path), f"it lacks {', '.join(missing)}: it was not saved by train.py")
        check_extra(str(resumed.path / MANIFEST), resumed.extra)
        self.notes += [*resumed.notes, f"resumed from {resumed.path}, after step {resumed.step}", *self._drift(resumed)]
        self._check_base(resumed)
        self._check_rule(resumed)
        self._stream.load_state_dict(resumed.extra["stream"])
        if "held_out" in resumed.extra:
            self._held_out.load_state_dict(resumed.extra["held_out"])
        self._check_batch(resumed)
        self._set_steps(resumed.step)
        if resumed.local is None or self._shared_otherwise(resumed):
            self.notes.append("resume: other ranks than those that saved; random generators start afresh (dropout)")
        else:
            self._set_generators(resumed.path, resumed.local)
        return resumed.step

    def _continue_imported(self, resumed: Resumed) -> int:
        """Continue a run of another library: after its steps, with the schedule and the data of this run."""
        self.notes += [
            *resumed.notes,
            f"resumed from {resumed.path}, imported after step {resumed.step}: settings, schedule and data are "
            "those of this run, whose data continue where its own steps would have left off",
        ]
        self._stream.samples = resumed.step * self._config.train.sequences(self._readers)
        self._set_steps(resumed.step)
        return resumed.step

    def after(self, step: int, monitor: Monitor, *, stop: bool) -> bool:
        """Save `step` if it is due, the best so far, or the run stops here; report completed saves to `monitor`.

        Return whether the step is saved, if the run ends or stops here.
        """
        if self._checkpoints is None:
            return False
        config, end = self._config.checkpoint, step == self._config.train.steps
        due = stop or (end and config.last) or (config.keep_best and self._held_out.is_best(step))
        saves = config.every is not None and (due or step % config.every == 0)
        self._tell(step, monitor, self._checkpoints.finish if saves else self._checkpoints.finished)
        if saves:
            self._tell(step, monitor, lambda: self._save(step))
        return (end or stop) and self._tell(step, monitor, self._checkpoints.finish)

    def load_best(self, step: int) -> str:
        """Load the states of the best checkpoint after the last `step`, for an export; return a line for the user.

        The model stays as it is if it is the best, or no checkpoint has a held-out loss. If the save of the best
        failed, the best of the others is taken, which may be the model as it is.
        """
        path = None if self._checkpoints is None else self._checkpoints.best()
        if self._checkpoints is None or path is None:
            return "NOT THE BEST: no checkpoint has a held-out loss, so the model of the last step is exported"
        saved, here = held_out_loss(manifest_at(path)), self._held_out.loss_at(step)
        stays = step_of(path.name) == step or (saved is not None and here is not None and here < saved)
        if not stays:
            try:
                self._checkpoints.resume(str(path))
            except CheckpointError as error:
                repair = (
                    "start the run again with resume=auto export.which=last, which exports the model of its last step"
                )
                raise CheckpointError("", f"{error}; it is the best: {repair}") from error
        taken = step if stays else step_of(path.name)
        if taken != self._held_out.best_step:
            best = f"the model after step {self._held_out.best_step}, with a held-out loss of"
            lost = f"NOT THE BEST: {best} {self._held_out.best_loss}, was not saved"
            return f"{lost}, so that after step {taken} is exported"
        return "the best model is that of the last step" if taken == step else f"the best model is that of {path}"

    def _save(self, step: int) -> None:
        assert self._checkpoints is not None
        extra = {
            "stream": self._stream.state_dict(),
            "step_sequences": self._config.train.sequences(self._readers),
            "config": OmegaConf.to_container(OmegaConf.structured(self._config)),
            "model": describe(self._model),
            **({} if self._base is None else {BASE: self._base}),
            "held_out": self._held_out.state_dict(),
            HELD_OUT: self._held_out.loss_at(step),
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._checkpoints.save(step, extra, self._generators())

    def _tell(self, step: int, monitor: Monitor, do: Callable[[], str | None]) -> bool:
        """Call `do` and report the save that it completed, or its failure; return whether a save completed."""
        try:
            name = do()
        except CheckpointError as error:
            if self._config.checkpoint.on_error == "stop" or isinstance(error, RankLost):
                raise
            monitor.note(step, f"NOT SAVED, training goes on (checkpoint.on_error=warn): {error}")
            return False
        if name is not None:
            monitor.note(step, f"saved {self._config.checkpoint.folder}/{name}")
        return name is not None

    def _generators(self) -> dict[str, torch.Tensor]:
        states = {"rng.cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["rng.cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def _set_generators(self, path: Path, states: dict[str, torch.Tensor]) -> None:
        try:
            torch.set_rng_state(states["rng.cpu"])
            if self._device.type == "cuda" and "rng.cuda" in states:
                torch.cuda.set_rng_state(states["rng.cuda"], self._device)
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(str(path), f"no state of random generators is in it: {error}") from error

    def _shared_otherwise(self, resumed: Resumed) -> bool:
        """Return whether other ranks share samples than in the saved run; such ranks need equal random numbers."""
        was: dict[str, Any] = resumed.extra["config"].get("mesh", {})
        return any(was.get(axis, 1) != getattr(self._config.mesh, axis) for axis in (TENSOR, PIPELINE))

    def _set_steps(self, steps: int) -> None:
        """Put the schedule of this run where it is after `steps`, which determines the learning rates."""
        schedule = self._schedule
        schedule.last_epoch = steps
        rates = [base * factor(steps) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
        for group, rate in zip(self._optim.param_groups, rates, strict=True):
            group["lr"] = rate
        set_last_lr(schedule, rates)

    def _overridden(self) -> list[str]:
        """Return the settings of parameter groups that `resume.override` names."""
        keys = [(key, GROUP_SETTINGS[key]) for key in self._config.resume.override]
        return [name for key, own in keys for name in ([*self._config.optim.options] if own is None else [own])]

    def _check_rule(self, resumed: Resumed) -> None:
        """Raise CheckpointError if a setting of the update rule, which resumes with the groups, is given otherwise."""
        for key, was, now in self._changes(resumed):
            setting = "optim.options" if key.startswith("optim.options.") else key
            if setting in GROUP_SETTINGS and setting not in self._config.resume.override:
                raise CheckpointError(
                    str(resumed.path), f"{key} was {was}, is {now}: to change it, add resume.override=[{setting}]"
                )

    def _check_batch(self, resumed: Resumed) -> None:
        """Raise CheckpointError if the number of sequences per step has changed."""
        train, ranks = self._config.train, self._readers
        was, now = resumed.extra["step_sequences"], train.sequences(ranks)
        if was != now:
            per_rank = train.microbatch_sequences * ranks
            repair = f"train.accumulate={was // per_rank}" if was % per_rank == 0 else "other ranks or microbatches"
            repair += f", or train.accumulate=null train.global_sequences={was} in every run"
            raise CheckpointError(
                str(resumed.path), f"a step was {was} sequences and is {now} with these ranks: take {repair}"
            )

    def _check_base(self, resumed: Resumed) -> None:
        """Raise CheckpointError if the checkpoint's adapters belong to another model than that of this run."""
        if self._base is None:
            return
        was = resumed.extra.get(BASE)
        other = "it holds no adapters" if was is None else base_difference(was, self._base)
        if other:
            what = f"its adapters belong to another model than that in {self._config.model.weights_folder}: {other}"
            raise CheckpointError(str(resumed.path), f"{what}; take the one that the run began with")

    def _drift(self, resumed: Resumed) -> list[str]:
        """Return a message for each setting that differs from the saved run."""
        return [f"resume: {key} was {was}, is {now}" for key, was, now in self._changes(resumed)]

    def _changes(self, resumed: Resumed) -> list[tuple[str, Any, Any]]:
        """Return each setting that differs from the saved run, with its values there and here."""
        was = renewed_settings(_flat(resumed.extra["config"]))
        now = _flat(OmegaConf.to_container(OmegaConf.structured(self._config)))
        keys = [key for key in sorted({*was, *now}) if key.split(".")[0] not in NO_NEWS]
        return [(key, was.get(key), now.get(key)) for key in keys if was.get(key) != now.get(key)]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    return {key: value for name, each in tree.items() for key, value in _flat(each, f"{prefix}{name}.").items()}
