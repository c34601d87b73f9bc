"""Balancing of experts without a loss: after a step each router adjusts its bias to the load on all ranks."""

from __future__ import annotations

from typing import Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dzero.comm.expert_exchange import SumOverRanks
from dzero.comm.ledger import Entry, Ledger, Traffic


@runtime_checkable
class BalancedModule(Protocol):
    """A module that counts how often its experts are chosen.

    Attributes:
        load: Choices since the last `rebalance`, int64 [experts]; None if the module counts none.
    """

    load: Tensor | None

    def rebalance(self, load: Tensor) -> None:
        """Adjust the bias to the load [experts] of all ranks, and reset `load`."""


class BiasUpdate:
    """Bias updates of all balanced modules of a model.

    `groups` are those of the axes along which ranks have different tokens. Loads are summed over them as integers, so
    that ranks never diverge.
    """

    def __init__(self, model: nn.Module, groups: dict[str, dist.ProcessGroup], ledger: Ledger) -> None:
        self._routers = [
            cast(BalancedModule, module)
            for module in model.modules()
            if isinstance(module, BalancedModule) and module.load is not None
        ]
        self._total = SumOverRanks(groups, ledger)

    def step(self, *, made: bool = True) -> None:
        """Rebalance after an optimizer step, on all ranks; if it was skipped (`made=False`), drop its loads."""
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
        """Return the calls and bytes sent per rank and step, by ledger entry."""
        numbers = sum(len(router.load) for router in self._routers if router.load is not None)
        return self._total.expected(numbers) if numbers else {}
