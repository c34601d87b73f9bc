"""Measurement of tokens/s, model FLOP/s utilization (MFU) and the time left, from the wall time of whole steps.

    begin() | data, forward, backward, update | end(tokens)     time between two steps (held-out evaluation) is excluded
                                                                from tokens/s, but included in the time left
    warm-up    the first `warmup_steps` steps (compilation, first touches, caches) count in no rate
    now        median rate of the last `window_steps` counted steps, which one slow step does not change
    overall    tokens over seconds of all counted steps: the throughput of the run, including slow steps
    MFU        flops_per_token * tokens/s / (peak FLOP/s of a device * devices)

A step must end synchronized with its device, as it is after its loss is read. Otherwise only host time is measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Throughput:
    """Tokens per second of all ranks together, and MFU as a fraction; None if unknown."""

    tokens_per_s: float | None = None
    mfu: float | None = None


class Meter:
    """Timer of the steps of a run; the module's docstring defines its readings.

    `flops_per_token` are the model's FLOPs of forward and backward, `peak_flops` those per second of one device, each
    None if unknown. The tokens are shared by `ranks` devices. `clock` returns seconds and must be monotonic.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        ranks: int = 1,
        warmup_steps: int = 3,
        window_steps: int = 20,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total_steps, self.warmup_steps = total_steps, warmup_steps
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        self._mfu_per_rate = flops_per_token / (peak_flops * ranks) if flops_per_token and peak_flops else None
        self._rates: deque[float] = deque(maxlen=window_steps)
        self._clock = clock
        self._began: float | None = None
        self._counted_from = self._ended = 0.0
        self._counted_tokens, self._counted_s = 0, 0.0

    @property
    def counted_steps(self) -> int:
        """Number of steps after the warm-up, over which rates are measured."""
        return max(0, self.steps - self.warmup_steps)

    def begin(self) -> None:
        """Start timing a step."""
        self._began = self._clock()
        if self.steps == self.warmup_steps:
            self._counted_from = self._began

    def end(self, tokens: int) -> float:
        """End the step, which consumed `tokens` over all ranks; return its seconds."""
        if self._began is None:
            raise RuntimeError("Meter.end() without begin(): call begin() before each step")
        self._ended = self._clock()
        seconds, self._began = self._ended - self._began, None
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds
        if self.counted_steps:
            self._counted_tokens += tokens
            self._counted_s += seconds
            self._rates.append(tokens / seconds)
        return seconds

    def now(self) -> Throughput:
        """Return the median rate over the window; unknown during the warm-up."""
        return self._speed(median(self._rates)) if self._rates else Throughput()

    def overall(self) -> Throughput:
        """Return the mean rate over all counted steps; unknown if the run was not longer than its warm-up."""
        return self._speed(self._counted_tokens / self._counted_s) if self.counted_steps else Throughput()

    def eta_s(self) -> float | None:
        """Return the seconds left at the pace since the warm-up, with time between steps; None during the warm-up."""
        if not self.counted_steps:
            return None
        pace_s = (self._ended - self._counted_from) / self.counted_steps
        return pace_s * max(0, self.total_steps - self.steps)

    def _speed(self, tokens_per_s: float) -> Throughput:
        return Throughput(tokens_per_s, None if self._mfu_per_rate is None else self._mfu_per_rate * tokens_per_s)
