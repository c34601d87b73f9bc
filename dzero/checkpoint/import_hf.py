"""Import of initial values from a Hugging Face folder; each rank reads only the bytes that it keeps.

    weights = local_weights(folder, model)                                    # names, shapes and files; no values
    materialise = MetaInitializer(model, …, weights=blank(model, weights))    # shard() then splits zeros
    sharded = shard(model, …, materialise=materialise)
    fill(sharded, weights)                                                    # before an optimizer is constructed
    optim = AdamW(sharded)

Masters and moments therefore start as in any run: from the values, and from zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dzero.checkpoint.shard_boxes import ShardBoxes
from dzero.models.tensor_views import Readable
from dzero.zero.dtensors import local_of
from dzero.zero.rounding import to_working
from dzero.zero.sharded import Sharded


def blank(model: nn.Module, weights: Mapping[str, Readable]) -> dict[str, Callable[[], Tensor]]:
    """Return readers for a `MetaInitializer`: zeros for parameters, and stored values for buffers.

    `fill` reads the parameters later. Every rank reads all buffers.
    """
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: (lambda: torch.zeros(())) if name in params else stored for name, stored in weights.items()}


@torch.no_grad()
def fill(sharded: Sharded, weights: Mapping[str, Readable]) -> None:
    """Copy `weights` into the parameters that they name, of a sharded model that has no optimizer yet.

    Masters that an optimizer creates later get the values before rounding.
    """
    shard_boxes = ShardBoxes(sharded)
    for unit in sharded.units:
        if unit.consumer is not None:
            raise RuntimeError("the model has an optimizer, whose masters would not follow: fill it before making one")
        for place in shard_boxes.of(unit):
            if place.name not in weights:
                continue
            values = place.together([weights[place.name].read(box.offset, box.size).float() for box in place.boxes])
            if (origin := unit.origin.get(place.own_name)) is not None:
                origin.put(values if unit.replica_shards is None else values[unit.replica_shards.rows(place.own_name)])
            local_of(place.param).copy_(to_working(values, place.param.dtype))
