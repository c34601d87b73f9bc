"""A model's first values from a folder as Hugging Face publishes it; each rank reads the bytes that it keeps.

weights = local_weights(folder, model)                          # names, shapes and files; no values
materialise = Materialiser(model, …, weights=blank(weights))    # shard() then cuts zeros
sharded = shard(model, …, materialise=materialise)
fill(sharded, weights)                                          # before there is an optimizer, whose masters and
optim = AdamW(sharded)                                          # moments begin as in any run: values, zeros
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dzero.checkpoint.shard_boxes import ShardBoxes
from dzero.models.safetensors_reader import StoredTensor
from dzero.zero.dtensors import local_of
from dzero.zero.rounding import to_working
from dzero.zero.shard import Sharded


def blank(model: nn.Module, weights: Mapping[str, StoredTensor]) -> dict[str, Callable[[], Tensor]]:
    """Readers for a Materialiser: zeros for parameters, which `fill` reads; every rank's buffers as stored."""
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: _zero if name in params else stored for name, stored in weights.items()}


@torch.no_grad()
def fill(sharded: Sharded, weights: Mapping[str, StoredTensor]) -> None:
    """Give the parameters of a model without optimizer the values of `weights`, and later masters all their digits.

    Raises RuntimeError when it has an optimizer, ValueError and OSError for a file that was changed or cannot be read.
    """
    shard_boxes = ShardBoxes(sharded)
    for unit in sharded.units:
        if unit.consumer is not None:
            raise RuntimeError("the model has an optimizer, whose masters would not follow: fill it before making one")
        for place in shard_boxes.of(unit):
            values = place.together([weights[place.name].read(box.offset, box.size).float() for box in place.boxes])
            if (origin := unit.origin.get(place.own_name)) is not None:
                origin.put(values if unit.shares is None else values[unit.shares.rows(place.own_name)])
            local_of(place.param).copy_(to_working(values, place.param.dtype))


def _zero() -> Tensor:
    return torch.zeros(())
