"""Parallel styles for a mixture of experts, in which a rank sends its own part of every sequence to experts.

    style        module       a rank holds       its input and output              gradients
    OwnTokens    mixture      as its children    its tokens, plain tensors         whole
    Routing      router       everything         its tokens, plain tensors         partial sums, which FSDP2 adds

Experts are whole on the ranks that share them, which include those of tp (parallel/expert/dispatch.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.distributed.tensor.parallel.style import ParallelStyle

from dzero.parallel.cut_params import local_params
from dzero.parallel.forward_wrapping import Forward, wrap_method


class OwnTokens(PrepareModuleInput):
    """Style of a mixture that keeps a rank's own tokens, with the input split as `layout`.

    The module must have a method `over_tokens(sums)` that returns its input. The style replaces it, so that it returns
    the sums over the tokens of all ranks.
    """

    def __init__(self, layout: Shard) -> None:
        super().__init__(input_layouts=layout, desired_input_layouts=layout, use_local_output=True)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.token_mesh = device_mesh  # type: ignore[assignment]
        wrap_method([module], "over_tokens", _summed)
        prepared: nn.Module = super()._apply(module, device_mesh)
        return prepared


class Routing(ParallelStyle):
    """Style of a router, which is replicated and runs on a rank's own tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, param in [*module.named_parameters(recurse=False)]:
            copy = distribute_tensor(param.detach(), device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            setattr(module, name, nn.Parameter(copy, param.requires_grad))
        wrap_method([module], "forward", _on_own_tokens)
        return module


def _summed(_: Forward) -> Forward:
    def over_tokens(self: Any, sums: Tensor) -> Tensor:
        """Sum over ranks; gradients are not summed, as every rank computes the same loss from the result."""
        parts = DTensor.from_local(sums, self.token_mesh, (Partial(),), run_check=False)
        return parts.redistribute(placements=(Replicate(),)).to_local()

    return over_tokens


def _on_own_tokens(forward: Forward) -> Forward:
    def of_part(self: nn.Module, tokens: Tensor) -> object:
        with local_params(self, (Partial(),)):
            return forward(self, tokens)

    return of_part
