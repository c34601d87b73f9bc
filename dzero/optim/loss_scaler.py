"""Dynamic loss scaling for fp16: losses are multiplied by a scale so that small gradients do not underflow."""

from __future__ import annotations

from dataclasses import dataclass

from dzero.utils.ranges import check, positive, whole

MOST_SCALE = 2.0**40


@dataclass(frozen=True, kw_only=True)
class ScalerConfig:
    """Settings of dynamic loss scaling, for precision.param=fp16."""

    init: float = 65536.0
    """Initial loss scale."""
    growth_interval: int = 2000
    """Consecutive finite steps after which the scale doubles."""
    hysteresis: int = 1
    """Consecutive non-finite steps after which the scale halves, and halves again at each further one."""
    floor: float = 1.0
    """Minimum loss scale."""

    def __post_init__(self) -> None:
        scale = positive(MOST_SCALE)
        check("scaler", self, init=scale, floor=scale, growth_interval=whole(), hysteresis=whole())
        if self.floor > self.init:
            raise ValueError(f"scaler.floor={self.floor}, scaler.init={self.init}: need 0 < floor ≤ init")


class LossScaler:
    """Loss scale that grows after finite steps and shrinks after non-finite ones.

    All ranks pass the same decisions to `update`, so all ranks have the same scale.

    Args:
        config: Settings. None: the scale is fixed at 1.
    """

    def __init__(self, config: ScalerConfig | None) -> None:
        self._config = config
        self.scale = config.init if config else 1.0
        self._good_steps = 0
        self._bad_steps = 0

    def update(self, *, finite: bool) -> None:
        """Grow or reduce the scale after a step; a fixed scale does not change."""
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
        """Return the scale and its step counts as plain numbers; empty for a fixed scale."""
        if self._config is None:
            return {}
        return {"scale": self.scale, "good_steps": self._good_steps, "bad_steps": self._bad_steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore the state of `state_dict`, unless the saved or this scale is fixed (fp16 on one side only)."""
        if self._config is None or not state:
            return
        self.scale = float(state["scale"])
        self._good_steps, self._bad_steps = int(state["good_steps"]), int(state["bad_steps"])
