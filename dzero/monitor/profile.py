"""A torch profiler trace of chosen steps, per rank, for Perfetto, chrome://tracing or TensorBoard's profile plugin.

    step            1 ... start-2   start-1    start ... start+steps-1    later
    profiler        off             warms up   records                    off

Written to `<run folder>/profile`:
    rank0.pt.trace.json.gz          spans are the `record_function` names of the code, beside torch's own
                                    (`ProfilerStep#k` counts from 0: it is step k + 1); the offload's lanes
                                    FETCH, EVICT, COMPUTE are threads, hence tracks, of their own
    rank0.memory_snapshot.pickle    CUDA only: every allocation of the same steps, for https://pytorch.org/memory_viz
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

SNAPSHOT_EVENTS = 100_000


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps of the run are traced: `steps` of them from the `start_step`-th on (the first is 1).

    `memory_snapshot`: keep the allocations of those steps too; None: where the device is CUDA.
    """

    enabled: bool = False
    start_step: int = 10
    steps: int = 3
    memory_snapshot: bool | None = None

    def __post_init__(self) -> None:
        if self.start_step < 2:
            raise ValueError(
                f"profile.start_step={self.start_step}: must be a whole number ≥ 2, "
                "since the step before warms the profiler up"
            )
        if self.steps < 1:
            raise ValueError(f"profile.steps={self.steps}: must be a whole number ≥ 1")
        if not self.enabled:
            for name in ("start_step", "steps", "memory_snapshot"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(
                        f"profile.{name}={getattr(self, name)} has no effect with profile.enabled=false; "
                        "remove it, or set profile.enabled=true"
                    )

    def check(self, run_steps: int) -> None:
        """Raises ValueError where a run of `run_steps` ends before the trace does."""
        last = self.start_step + self.steps - 1
        if self.enabled and run_steps < last:
            raise ValueError(
                f"profile.start_step={self.start_step}, profile.steps={self.steps}: the trace ends with step "
                f"{last}, but the run has {run_steps}; trace earlier or fewer steps, or train longer"
            )


class Profiler:
    """Traces as its config says. Use as `with Profiler(...) as profiler:`, and call `step()` after every step.

    `run_steps`: steps this run will make. Raises ValueError when they end before the trace does, and when a memory
    snapshot is asked for where there is no CUDA. Disabled, it does nothing.
    """

    def __init__(
        self, config: ProfileConfig, run_folder: Path, *, rank: int, device: torch.device, run_steps: int
    ) -> None:
        folder = run_folder / "profile"
        self.trace_path = folder / f"rank{rank}.pt.trace.json.gz"
        self.snapshot_path: Path | None = None
        self._first = config.start_step
        self._last = config.start_step + config.steps - 1
        self._step = 1
        self._stack = ExitStack()
        self._profile: profile | None = None
        if not config.enabled:
            return
        config.check(run_steps)
        if config.memory_snapshot and device.type != "cuda":
            raise ValueError(
                f"profile.memory_snapshot=true has no effect on {device.type}, only on cuda; set it to null or false"
            )
        if device.type == "cuda" and config.memory_snapshot is not False:
            self.snapshot_path = folder / f"rank{rank}.memory_snapshot.pickle"
        folder.mkdir(parents=True, exist_ok=True)
        self._profile = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
            schedule=schedule(wait=self._first - 2, warmup=1, active=config.steps, repeat=1),
            on_trace_ready=self._write,
            experimental_config=_every_thread(),
        )

    def __enter__(self) -> Self:
        if self._profile is not None:
            self._stack.enter_context(self._profile)
        return self

    def step(self) -> None:
        """The step that ran ends here, the next begins."""
        if self._profile is None or self._step > self._last:
            return
        self._step += 1
        if self.snapshot_path and self._step == self._first:
            _memory_history()._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        self._profile.step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A run that ends inside the traced steps leaves the trace of those that were made."""
        self._stack.close()

    def _write(self, traced: profile) -> None:
        traced.export_chrome_trace(str(self.trace_path))
        if self.snapshot_path:
            memory = _memory_history()
            memory._dump_snapshot(str(self.snapshot_path))
            memory._record_memory_history(enabled=None)


def _every_thread() -> Any:
    """Without this setting, which has no public name, torch leaves threads like the offload's lanes out of a trace."""
    config = getattr(torch.profiler, "_ExperimentalConfig", None)
    return None if config is None else config(profile_all_threads=True)


def _memory_history() -> Any:
    """torch's module that records allocations: it has no public name for this, and writes a pickle, never read here."""
    if not hasattr(torch.cuda.memory, "_record_memory_history") or not hasattr(torch.cuda.memory, "_dump_snapshot"):
        raise RuntimeError(f"torch {torch.__version__} records no memory history; set profile.memory_snapshot=false")
    return torch.cuda.memory
