"""Median times of several rounds after a warm-up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

from dzero import streams

LEAST_ROUNDS, MOST_ROUNDS = 5, 1000


def seconds_of(do: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the median time of `do` after a warm-up, timing it for about `budget_s` seconds in all."""
    first_s = median_of_rounds(do, device, 1)
    return median_of_rounds(do, device, min(MOST_ROUNDS, max(LEAST_ROUNDS, math.ceil(budget_s / max(first_s, 1e-6)))))


def median_of_rounds(do: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median time of `rounds` calls after one warm-up call."""
    times = []
    for _ in range(rounds + 1):
        streams.synchronize_device(device)
        start = time.perf_counter()
        do()
        streams.synchronize_device(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])
