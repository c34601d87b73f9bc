"""Block transformations that leave the model unchanged: tiling, activation checkpointing and compilation.

Blocks are the elements of the model's outermost ModuleLists and Sequentials, or where an element has no forward, such
as a ModuleList of attention and MLP, the modules in it that have one. Each gets a subclass of its own class, with the
same name, whose forward is wrapped. Parameters, their names and the block's attributes stay as they are. Apply
the transformations before the model is sharded: the hooks that gather a unit then run outside the wrapped forward, once
in forward and once in backward, and the parameters are gathered during recomputation.

    activations  kept from forward                          recomputed in backward
    none         all that backward needs                    nothing
    selective    the block's input, matmuls, attention      norms, activations, rotary, residual sums
    full         the block's input                          everything
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from dzero.parallel.config import BlockConfig
from dzero.parallel.forward_wrapping import checkpointed, wrap_method
from dzero.parallel.tiling.loss import tile_large_loss, tile_loss
from dzero.parallel.tiling.tile import MLPS, find_tiles, is_mlp, tile_all
from dzero.utils.torch_internals import attention_operators

KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    *(operator.default for operator in attention_operators()),
]


def apply_blocks(model: nn.Module, config: BlockConfig, device_type: str, tokens: int | None = None) -> None:
    """Wrap the forward of each block of `model` in place; without tiles, gradients on CPU do not change by a bit.

    Args:
        model: Model, before it is sharded.
        config: Transformations.
        device_type: Type of the device that the model runs on.
        tokens: Tokens of a microbatch, by which large logits are tiled where `config` leaves that open. None: they are
            not.

    Raises:
        ValueError: If a setting needs blocks or modules to tile and the model has none.
    """
    if config.tiles > 1:
        _tile_mlps(model, config)
    if config.embedding_tiles > 1:
        tile_all([_embedding_of(model, config)], config.embedding_tiles)
    apply_loss_tiles(model, config, tokens)
    blocks = [block for _, block in find_blocks(model)]
    compiles = config.compiles(device_type)
    if not blocks and (config.activation_checkpoint != "none" or config.compile):
        raise ValueError(
            f"block.activation_checkpoint={config.activation_checkpoint} and block.compile={config.compile}: idle, "
            f"as {type(model).__name__} has no blocks (elements of an nn.ModuleList or nn.Sequential); "
            "take activation_checkpoint=none and leave compile unset"
        )
    # The compiler wraps the checkpointed forward, so that it also compiles the recomputation.
    if config.activation_checkpoint == "full":
        wrap_method(blocks, "forward", checkpointed)
    if config.activation_checkpoint == "selective":
        selective = partial(create_selective_checkpoint_contexts, KEPT)
        wrap_method(blocks, "forward", partial(checkpointed, context_fn=selective))
    if compiles:
        wrap_method(blocks, "forward", torch.compile)


def apply_loss_tiles(
    model: nn.Module, config: BlockConfig, tokens: int | None = None, *, tp: int = 1, pp: int = 1
) -> None:
    """Tile the loss of `model` in place; with tp or pp along tokens, before the model is cut along these axes.

    Args:
        model: Model, before it is sharded.
        config: Transformations.
        tokens: As for `apply_blocks`.
        tp: Ranks that the vocabulary will be split over.
        pp: Ranks that the layers will be split over.

    Raises:
        ValueError: If tiles are set and the model's loss cannot be tiled.
    """
    if config.loss_tiles is None and tokens is not None:
        tile_large_loss(model, tokens, tp)
    elif config.loss_tiles is not None and config.loss_tiles > 1:
        tile_loss(model, config.loss_tiles, by_tokens=tp * pp > 1)


def _tile_mlps(model: nn.Module, config: BlockConfig) -> None:
    tiled = {m for _, each in find_tiles(model) for m in each.modules()}
    inside = (m for _, block in find_blocks(model) for m in block.modules())
    mlps = dict.fromkeys(m for m in inside if is_mlp(m) and m not in tiled)
    if not mlps:
        raise ValueError(
            f"block.tiles={config.tiles}: the blocks of {type(model).__name__} have no MLP of three nn.Linear named "
            f"as in {[[*widening, narrowing] for widening, narrowing in MLPS]}; take block.tiles=1, or tile modules of "
            "your choice with dzero.parallel.tiling.tile.tile before shard()"
        )
    tile_all([*mlps], config.tiles, recompute=config.activation_checkpoint == "full")


def _embedding_of(model: nn.Module, config: BlockConfig) -> nn.Module:
    found = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(found, nn.Embedding):
        raise ValueError(
            f"block.embedding_tiles={config.embedding_tiles}: {type(model).__name__} has no nn.Embedding as what "
            "get_input_embeddings() returns; take block.embedding_tiles=1, or tile a module of your choice with "
            "dzero.tile before shard()"
        )
    return found


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the elements with parameters of all outermost ModuleLists and Sequentials, in order.

    An element that is not called, because it has no forward, is replaced by the outermost modules in it that are.
    """
    return [(name, block) for name, block in _elements("", model) if any(True for _ in block.parameters())]


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward; lists, dicts and a bare nn.Module() only hold others, or parameters."""
    return "forward" in vars(module) or getattr(type(module), "forward", None) is not nn.Module.forward


def _elements(prefix: str, module: nn.Module, is_listed: bool = False) -> Iterator[tuple[str, nn.Module]]:
    is_listed = is_listed or isinstance(module, (nn.ModuleList, nn.Sequential))
    for name, child in module.named_children():
        if is_listed and is_called(child):
            yield f"{prefix}{name}", child
        else:
            yield from _elements(f"{prefix}{name}.", child, is_listed)
