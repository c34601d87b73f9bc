"""Faults to be found, planted in a worker around a verification; all but noise leave stage 0 as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dzero import AdamW
from dzero.comm.collectives import AverageReplicas, ReduceGrads, UnshardParams
from dzero.comm.context_exchange import ContextExchange
from dzero.optim.grad_accumulation import UnitGrads
from dzero.optim.pipeline_grads import PipelineGrads
from dzero.trainer import build as assembly
from dzero.trainer import trainer
from dzero.verify.config import VerifyRun
from dzero.verify.report import VerifyReport
from dzero.verify.verify import Verifier

Planted = AbstractContextManager[Any]


def verified(rank: int, ranks: int, run: VerifyRun, folder: Path, fault: str = "none", *args: Any) -> VerifyReport:
    """The report of one rank, with `fault` planted in its process."""
    with FAULTS[fault](*args):
        return Verifier(run, folder, torch.device("cpu")).report()


def wrong_divisor(unit: str, factor: float = 2.0) -> Planted:
    """A unit's gradients are divided by too few ranks, half of them by default, or by too many."""

    def wrongly(self: ReduceGrads, **named: Any) -> None:
        rightly(self, **named)
        if self._unit == unit:
            named["output_tensor"].mul_(factor)

    rightly = ReduceGrads.__call__
    return patch.object(ReduceGrads, "__call__", wrongly)


def dropped_microbatch(unit: str) -> Planted:
    """On the host, nothing is added to a unit's gradients of the first microbatch."""

    def wrongly(self: UnitGrads, buffer: torch.Tensor, pieces: dict[str, torch.Tensor]) -> None:
        if self._unit.shape.name == unit:
            pieces = {name: piece for name, piece in pieces.items() if name not in self.views}
        rightly(self, buffer, pieces)

    rightly = UnitGrads._add_on_host
    return patch.object(UnitGrads, "_add_on_host", wrongly)


def skipped_data(stage: int) -> Planted:
    """A step's first microbatch of data is passed over."""

    def wrongly(self: trainer.Trainer) -> torch.Tensor:
        if self.config.zero.stage == stage:
            self.stream.next()
        return rightly(self)

    rightly = trainer.Trainer._microbatches
    return patch.object(trainer.Trainer, "_microbatches", wrongly)


def stale_parameter(unit: str, gather: int) -> Planted:
    """One gather of a unit, counted from 0 in each run, gives what the first one gave."""

    def wrongly(self: UnshardParams, **named: Any) -> Any:
        if self._unit == unit:
            seen = gathered.setdefault(self, [])
            seen.append(named["input_tensor"].clone())
            if len(seen) == gather + 1:
                named["input_tensor"] = seen[0]
        return rightly(self, **named)

    gathered: dict[UnshardParams, list[torch.Tensor]] = {}
    rightly = UnshardParams.__call__
    return patch.object(UnshardParams, "__call__", wrongly)


def not_updated(unit: str, step: int) -> Planted:
    """A unit is left out of one update."""

    def wrongly(self: AdamW, grads: dict[str, torch.Tensor], factor: float) -> Any:
        if self._sharded.layout.shard > 1 and max(int(s["step"]) for s in self.state.values()) == step - 1:
            grads = {name: grad for name, grad in grads.items() if not name.startswith(unit)}
        return rightly(self, grads, factor)

    rightly = AdamW._plan
    return patch.object(AdamW, "_plan", wrongly)


def tiles_left_out(key: str) -> Planted:
    """Parameters of tiles with that key are never updated."""

    def wrongly(self: AdamW, grads: dict[str, torch.Tensor], factor: float) -> Any:
        kept = {name: grad for name, grad in grads.items() if not (".tiles." in name and name.endswith(key))}
        return rightly(self, kept, factor)

    rightly = AdamW._plan
    return patch.object(AdamW, "_plan", wrongly)


def lonely_keys() -> Planted:
    """Keys and values get the gradients of their own rank's queries alone."""
    return patch.object(ContextExchange, "add", lambda self, parts: parts[self.rank].clone())


def wrong_copy(unit: str) -> Planted:
    """The last of several copies of a shard gets an average of a unit's gradients that is 15/16 of what it is."""

    def wrongly(self: AverageReplicas, grads: torch.Tensor) -> None:
        rightly(self, grads)
        group = self._exchange.group
        if (
            self._span.endswith(f" {unit}")
            and group.size() < dist.get_world_size()
            and group.rank() == group.size() - 1
        ):
            grads.mul_(15 / 16)

    rightly = AverageReplicas.__call__
    return patch.object(AverageReplicas, "__call__", wrongly)


def lonely_ends() -> Planted:
    """Both ends of a pipeline keep their own gradients of tied parameters."""
    return patch.object(PipelineGrads, "complete", lambda self: None)


def loud_rank(module: str) -> Planted:
    """Where matrices are cut, the first rank gives a 16th more of its part of a sum."""

    def wrongly(model: nn.Module, mesh: DeviceMesh, config: Any) -> Any:
        cut = rightly(model, mesh, config)
        if "tp" in (mesh.mesh_dim_names or ()) and mesh.get_local_rank("tp") == 0:
            model.get_submodule(module).register_forward_pre_hook(lambda _, args: (args[0] * 1.0625,))
        return cut

    rightly = assembly.parallelize
    return patch.object(assembly, "parallelize", wrongly)


@contextmanager
def noise(*planted: Any) -> Iterator[None]:
    """A block's output has noise in it, from a generator that nobody seeds; and another fault with its arguments."""

    def noisy(*args: Any) -> nn.Module:
        model = build(*args)
        model.get_submodule("layers.0.ffn").register_forward_hook(add)
        return model

    def add(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out + 1e-4 * torch.randn(out.shape, generator=unseeded).to(out.dtype)

    build, unseeded = assembly.build, torch.Generator()
    unseeded.seed()
    other = FAULTS[planted[0]](*planted[1:]) if planted else nullcontext()
    with patch.object(assembly, "build", noisy), other:
        yield


FAULTS: dict[str, Callable[..., Planted]] = {
    "none": nullcontext,
    "wrong divisor": wrong_divisor,
    "dropped microbatch": dropped_microbatch,
    "skipped data": skipped_data,
    "stale parameter": stale_parameter,
    "not updated": not_updated,
    "noise": noise,
    "lonely keys": lonely_keys,
    "wrong copy": wrong_copy,
    "tiles left out": tiles_left_out,
    "lonely ends": lonely_ends,
    "loud rank": loud_rank,
}
