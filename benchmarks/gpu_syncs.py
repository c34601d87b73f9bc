"""Where does a step wait for the GPU? Counted by line of dzero, as torch's sync debug mode warns of them.

Small llamas, trained by the library; three steps after two that warm up. torch warns where an operation makes the host
wait (a copy to the host, a number that is read), not of waits for events, which are meant. On a CPU a dispatch mode
warns in its place where a number is read from a tensor.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from devices import TINY, Device
from gpu_findings import Findings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from workload import loss_of

import dzero
from dzero import AdamW, OffloadConfig, PrecisionConfig, ZeroConfig, make_mesh, shard
from dzero.models.build import build, materialiser

WARM_STEPS, STEPS = 2, 3
WARNS = "called a synchronizing CUDA operation"
PACKAGE = Path(dzero.__file__).parent
HOST: dict[str, Any] = {"grad": "host", "master": "host", "moments": "host"}
CASES: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, fp16": {"stage": 3, "precision": "fp16"},
    "stage 2, offload=host": {"stage": 2, "offload": HOST},
    "stage 3, offload=host, overlap=forward": {"stage": 3, "offload": {**HOST, "overlap": "forward"}},
}


def syncs(device: Device, found: Findings) -> None:
    """Train every case and count."""
    if not device.on_gpu:
        found.stand_in("a dispatch mode warns of numbers that are read, as sync debug mode does of waits")
    counted: dict[str, dict[str, int]] = {}
    with device.group():
        for name, case in CASES.items():
            counted[name] = dict(count(step_of(device, **case), device).most_common())
            found.note(syncs_by_line=counted, steps=STEPS)
            device.free()
    told = [f"{name}: {sum(lines.values()) / STEPS:.1f} at {len(lines)} lines" for name, lines in counted.items()]
    found.find(f"waits per step that torch sees: {'; '.join(told)}")


def step_of(
    device: Device, *, stage: int, precision: str = "bf16", offload: dict[str, Any] | None = None
) -> Callable[[], None]:
    """Return a step of a user's loop."""
    kind = device.torch.type
    model = build(TINY)
    sharded = shard(
        model,
        ZeroConfig(stage=stage),
        precision=PrecisionConfig(param=precision),
        offload=OffloadConfig(**offload) if offload else None,
        mesh=make_mesh(kind),
        init=materialiser(TINY, model, seed=0, device=device.torch),
    )
    optim = AdamW(sharded, lr=1e-3, max_norm=1.0)
    batch = torch.arange(66, device=device.torch).remainder(256).view(2, 33)

    def step() -> None:
        optim.scale_loss(loss_of(sharded.model, batch)).backward()  # type: ignore[no-untyped-call]
        optim.step()
        optim.zero_grad()

    return step


def count(step: Callable[[], None], device: Device) -> Counter[str]:
    """Return how often each line waited in `STEPS` steps."""
    for _ in range(WARM_STEPS):
        step()
    device.synchronize()
    lines: Counter[str] = Counter()

    def hear(message: Warning | str, *_: Any, **__: Any) -> None:
        if WARNS in str(message):
            lines[line_of(sys._getframe(1))] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hear
        with warned(device):
            for _ in range(STEPS):
                step()
    return lines


def line_of(frame: FrameType | None) -> str:
    """Return the innermost line of dzero on the stack, else the innermost that is not the warnings module's."""
    inner = ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            return f"dzero/{path.relative_to(PACKAGE)}:{frame.f_lineno}"
        if not inner and path.name not in ("warnings.py", Path(__file__).name):
            inner = f"{path.parent.name}/{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return inner


@contextmanager
def warned(device: Device) -> Iterator[None]:
    """Let torch warn of every wait while inside; on a CPU, its stand-in."""
    if not device.on_gpu:
        with ReadsWarn():
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class ReadsWarn(TorchDispatchMode):
    """Warns where a number is read from a tensor, which on a GPU would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        if func is torch.ops.aten._local_scalar_dense.default:
            warnings.warn(f"{WARNS} (stand-in)", stacklevel=1)
        result: Tensor = func(*args, **(kwargs or {}))
        return result
