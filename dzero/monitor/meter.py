"""How fast: tokens/s, model FLOP/s utilisation (MFU) and the time left, from the wall time of whole steps.

    begin() | data, forward, backward, update | end(tokens)     what lies between two steps (held-out evaluation) is
                                                                not in tokens/s, but it is in the time left
    warm-up    the first `warmup_steps` steps (compilation, first touches, caches) count in no rate
    now        the median rate of the last `window_steps` counted steps: one slow step does not move it
    overall    tokens over seconds, of all counted steps: the throughput that was had, slow steps included
    MFU        flops_per_token * tokens/s / (peak FLOP/s of a device * devices)

A step must end synchronised with its device (reading the loss does so), or its seconds measure the host alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Throughput:
    """Tokens per second of all ranks together, and MFU as a fraction; None where not known (yet)."""

    tokens_per_s: float | None = None
    mfu: float | None = None


class Meter:
    """Times steps; see the table above.

    `total_steps`: steps this run will make. `flops_per_token`: of forward and backward. `peak_flops`: FLOP/s of one
    device, None where unknown. `ranks`: devices that share the tokens. `clock`: seconds, monotonic.
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
        """Steps after the warm-up: those that rates are made of."""
        return max(0, self.steps - self.warmup_steps)

    def begin(self) -> None:
        """A step begins now."""
        self._began = self._clock()
        if self.steps == self.warmup_steps:
            self._counted_from = self._began

    def end(self, tokens: int) -> float:
        """The step that began last ends now, having consumed `tokens` over all ranks; its seconds."""
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
        """The median over the window; unknown during the warm-up."""
        return self._speed(median(self._rates)) if self._rates else Throughput()

    def overall(self) -> Throughput:
        """The mean over all counted steps; unknown when the run was no longer than its warm-up."""
        return self._speed(self._counted_tokens / self._counted_s) if self.counted_steps else Throughput()

    def eta_s(self) -> float | None:
        """Seconds left at the pace since the warm-up, what lies between steps included; None during the warm-up."""
        if not self.counted_steps:
            return None
        pace_s = (self._ended - self._counted_from) / self.counted_steps
        return pace_s * max(0, self.total_steps - self.steps)

    def _speed(self, tokens_per_s: float) -> Throughput:
        return Throughput(tokens_per_s, None if self._mfu_per_rate is None else self._mfu_per_rate * tokens_per_s)
