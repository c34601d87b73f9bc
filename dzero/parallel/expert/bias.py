"""Balance of experts without a loss: after a step each router moves its bias by what all ranks counted in it."""

from __future__ import annotations

from typing import Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dzero.comm.expert_exchange import SumOverRanks
from dzero.comm.ledger import Entry, Ledger, Traffic


@runtime_checkable
class BalancedModule(Protocol):
    """A module with `load`, int64 [experts]: choices that it counted since the last `rebalance`; None where it counts
    none. rebalance: move once by the load [experts] of all ranks, and count anew."""

    load: Tensor | None

    def rebalance(self, load: Tensor) -> None:
        """The same on every rank."""


class BiasUpdate:
    """Of all balanced modules of a model. groups: of the axes along which ranks see tokens of their own, over which
    loads are summed.

    Sums are whole numbers, so that ranks never drift apart.
    """

    def __init__(self, model: nn.Module, groups: dict[str, dist.ProcessGroup], ledger: Ledger) -> None:
        self._routers = [
            cast(BalancedModule, module)
            for module in model.modules()
            if isinstance(module, BalancedModule) and module.load is not None
        ]
        self._total = SumOverRanks(groups, ledger)

    def step(self, *, made: bool = True) -> None:
        """After every optimizer step, on all ranks. made: or it was skipped, and its loads do not count."""
        if not self._routers:
            return
        loads = [router.load for router in self._routers if router.load is not None]
        total = torch.cat(loads)
        self._total(total)
        for router, load in zip(self._routers, torch.split(total, [len(each) for each in loads]), strict=True):
            if made:
                router.rebalance(load)
            elif router.load is not None:
                router.load.zero_()

    def expected(self) -> dict[Entry, Traffic]:
        """Calls and bytes sent per rank and step, by the ledger's entries."""
        numbers = sum(len(router.load) for router in self._routers if router.load is not None)
        return self._total.expected(numbers) if numbers else {}
