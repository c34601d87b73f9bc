"""What changes inside a block without changing the model: activation checkpointing and compilation.

Blocks are the elements of the model's outermost ModuleLists and Sequentials. Each gets a subclass of its own class,
with the same name, whose forward is wrapped; parameters, their names and the block's attributes stay as they are.
Apply it before the model is sharded: hooks that gather a unit then run outside the wrapped forward, once for
forward and once for backward, and what is recomputed finds the parameters gathered.

    activations  kept from forward                          recomputed in backward
    none         all that backward needs                    nothing
    selective    the block's input, matmuls, attention      norms, activations, rotary, residual sums
    full         the block's input                          everything
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ACTIVATIONS = ("none", "selective", "full")
KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]

Forward = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """`activation_checkpoint`: see the table above. `compile`: torch.compile each block (unset: on CUDA only)."""

    activation_checkpoint: str = "none"
    compile: bool | None = None

    def __post_init__(self) -> None:
        if self.activation_checkpoint not in ACTIVATIONS:
            raise ValueError(
                f"block.activation_checkpoint={self.activation_checkpoint!r}: choose one of {[*ACTIVATIONS]}"
            )


def apply_blocks(model: nn.Module, config: BlockConfig, device_type: str) -> None:
    """Wrap the forward of each block of `model` in place; the gradients stay the same to the bit on CPU.

    Raises ValueError when the model has no blocks and a setting asks for them.
    """
    blocks = [block for _, block in find_blocks(model)]
    compiles = device_type == "cuda" if config.compile is None else config.compile
    if not blocks and (config.activation_checkpoint != "none" or config.compile):
        raise ValueError(
            f"block.activation_checkpoint={config.activation_checkpoint} and block.compile={config.compile}: idle, "
            f"as {type(model).__name__} has no blocks (elements of an nn.ModuleList or nn.Sequential); "
            "take activation_checkpoint=none and leave compile unset"
        )
    # The compiler goes outside: it then sees what may be recomputed, and compiles that too.
    if config.activation_checkpoint == "full":
        wrap_method(blocks, "forward", _checkpointed)
    if config.activation_checkpoint == "selective":
        selective = partial(create_selective_checkpoint_contexts, KEPT)
        wrap_method(blocks, "forward", partial(_checkpointed, context_fn=selective))
    if compiles:
        wrap_method(blocks, "forward", torch.compile)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every element with parameters of the outermost ModuleLists and Sequentials, in order."""
    return [(name, block) for name, block in _elements("", model) if any(True for _ in block.parameters())]


def _elements(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield f"{prefix}{name}", child
        else:
            yield from _elements(f"{prefix}{name}.", child)


def wrap_method(blocks: list[nn.Module], method: str, wrap: Callable[[Forward], Forward]) -> None:
    """Give each block a subclass whose `method` is wrapped: one per class, so that equal blocks share a compilation."""
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for block in dict.fromkeys(blocks):
        cls = type(block)
        if cls not in classes:
            wrapped = {
                method: wrap(getattr(cls, method)),
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
            }
            classes[cls] = type(cls.__name__, (cls,), wrapped)
        block.__class__ = classes[cls]


def _checkpointed(forward: Forward, **options: Any) -> Forward:
    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        """`forward`, run again in backward for what it did not keep."""
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return recomputed
