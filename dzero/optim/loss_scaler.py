"""Dynamic loss scaling for fp16: the one number by which losses are multiplied so that gradients do not vanish."""

from __future__ import annotations

from dataclasses import dataclass

from dzero.utils.ranges import check, positive, whole

MOST_SCALE = 2.0**40


@dataclass(frozen=True, kw_only=True)
class ScalerConfig:
    """Dynamic loss scaling, for precision.param=fp16."""

    init: float = 65536.0
    """First loss scale."""
    growth_interval: int = 2000
    """Good steps in a row after which the scale doubles."""
    hysteresis: int = 1
    """Bad steps in a row at which it halves, and at each one after. 1: at once."""
    floor: float = 1.0
    """Smallest scale."""

    def __post_init__(self) -> None:
        scale = positive(MOST_SCALE)
        check("scaler", self, init=scale, floor=scale, growth_interval=whole(), hysteresis=whole())
        if self.floor > self.init:
            raise ValueError(f"scaler.floor={self.floor}, scaler.init={self.init}: need 0 < floor ≤ init")


class LossScaler:
    """The scale and its history. Every rank feeds it the same decisions, so every rank holds the same scale."""

    def __init__(self, config: ScalerConfig | None) -> None:
        self._config = config
        self.scale = config.init if config else 1.0
        self._good_steps = 0
        self._bad_steps = 0

    def update(self, *, finite: bool) -> None:
        """After each step: grow or back off; a fixed scale of 1 (no config) never moves."""
        config = self._config
        if config is None:
            return
        if finite:
            self._bad_steps = 0
            self._good_steps += 1
            if self._good_steps >= config.growth_interval:
                self.scale, self._good_steps = self.scale * 2, 0
        else:
            self._good_steps = 0
            self._bad_steps += 1
            if self._bad_steps >= config.hysteresis:
                self.scale = max(self.scale / 2, config.floor)

    def state_dict(self) -> dict[str, float | int]:
        """Plain numbers; nothing of a fixed scale."""
        if self._config is None:
            return {}
        return {"scale": self.scale, "good_steps": self._good_steps, "bad_steps": self._bad_steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Continue where `state_dict` was taken; as it is where one of both is fixed (16 bits of another kind)."""
        if self._config is None or not state:
            return
        self.scale = float(state["scale"])
        self._good_steps, self._bad_steps = int(state["good_steps"]), int(state["bad_steps"])
