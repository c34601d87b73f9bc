"""Evaluation of held-out data, source by source, and the record of the lowest loss.

The held-out loss of a run is the mean over the held-out tokens that count. Of a mixture, it is the mean of the sources'
losses in the proportions of training, so that a large held-out set of a source that is rarely read does not decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dzero.config import RunConfig
from dzero.data.batch import Batch
from dzero.data.mixture import MixedCorpus, Source, held_out_of
from dzero.data.stream import evaluation_batches
from dzero.trainer.build import BuiltModel


@dataclass(frozen=True)
class HeldOut:
    """Results of one evaluation, in nats.

    Attributes:
        loss: Held-out loss of the run.
        by_source: Loss of each source of a mixture; empty for a single one.
    """

    loss: float
    by_source: dict[str, float]


class HeldOutRecord:
    """The lowest held-out loss of a run and of those that it resumed, which checkpoints keep.

    Attributes:
        losses: Losses of this run's evaluations.
        best_loss: The lowest loss so far in nats, or None.
        best_step: Step of that evaluation.
        worse: Number of evaluations after it.
        last_step: Step of the last evaluation, and `last_loss` its loss.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.best_loss: float | None = None
        self.best_step = self.worse = self.last_step = 0
        self.last_loss = math.nan

    def add(self, step: int, loss: float) -> None:
        """Add the loss of an evaluation after `step` steps."""
        self.losses.append(loss)
        self.last_step, self.last_loss = step, loss
        best = math.nan if self.best_loss is None else self.best_loss
        if self.best_loss is None or loss < best or (math.isnan(best) and not math.isnan(loss)):
            self.best_loss, self.best_step, self.worse = loss, step, 0
        else:
            self.worse += 1

    def is_best(self, step: int) -> bool:
        """Return whether the model after `step` steps has the lowest loss so far, which is finite."""
        return self.best_step == step and self.best_loss is not None and math.isfinite(self.best_loss)

    def loss_at(self, step: int) -> float | None:
        """Return the held-out loss of the model after `step` steps, if it was evaluated and is finite."""
        return self.last_loss if self.last_step == step and math.isfinite(self.last_loss) else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        finite = self.best_loss is not None and math.isfinite(self.best_loss)
        return {"loss": self.best_loss if finite else None, "step": self.best_step, "worse": self.worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the record of a saved run."""
        self.best_loss, self.best_step, self.worse = state["loss"], state["step"], state["worse"]


class Evaluation:
    """Evaluations of a run, the same on all ranks.

    `slices` are the `microbatch_sequences`, `rank` and `ranks` of `evaluation_batches`. If too little is held out,
    construction raises ValueError, not the first evaluation.
    """

    def __init__(
        self, config: RunConfig, corpus: Source | MixedCorpus, built: BuiltModel, multiple: int, slices: dict[str, int]
    ) -> None:
        self._built = built
        most, length = config.train.evaluate_batches, config.train.sequence_tokens
        found = held_out_of(corpus, length, multiple) if most > 0 else {}
        for setting, is_set in (
            (f"train.patience={config.train.patience}", config.train.patience is not None),
            ("checkpoint.keep_best=true", config.checkpoint.keep_best),
        ):
            if is_set and not found:
                raise ValueError(f"{setting}: nothing of {corpus.summary} is held out; give more data, or remove it")
        self._weights = {name: weight for name, (_, weight) in found.items()}
        self._batches: dict[str, Callable[[], Iterator[Batch]]] = {
            name: partial(evaluation_batches, sequences, max_batches=most, **slices)
            for name, (sequences, _) in found.items()
        }
        for batches in self._batches.values():
            batches()

    def __bool__(self) -> bool:
        return bool(self._batches)

    def __call__(self, sum_over_ranks: Callable[[torch.Tensor], list[float]]) -> HeldOut:
        """Return the losses; the model is in evaluation, and gradients are disabled. Collective."""
        with self._built.losses():
            sums = [self._sums(batches()) for batches in self._batches.values()]
        totals = sum_over_ranks(torch.stack(sums).flatten())
        losses = {
            name: total / counted for name, total, counted in zip(self._weights, totals[::2], totals[1::2], strict=True)
        }
        loss = sum(weight * losses[name] for name, weight in self._weights.items() if weight)
        return HeldOut(loss, {name: each for name, each in losses.items() if name})

    def _sums(self, batches: Iterator[Batch]) -> torch.Tensor:
        """Return the sum of losses of microbatches on this rank, and their tokens that count: fp64 [2]."""
        return torch.stack([self._built.held_out(batch) for batch in batches]).sum(0)
