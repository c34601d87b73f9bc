"""Runs over ranks that share matrices, by the names that tests of optimizers and of forecasts know them by."""

from __future__ import annotations

from cut_runs import Run, batches, build, cut_logits, loss_of, model_of, one_step

__all__ = ["Run", "batches", "build", "cut_logits", "loss_of", "model_of", "one_step"]
