"""The weights of a sharded model as whole tensors on every rank, for what generates with them between steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec
import torch
from torch import Tensor

from dzero.checkpoint.whole_tensors import WholeTensors
from dzero.models.adapter_names import settings_of
from dzero.models.adapters import adapted_part, has_adapters
from dzero.models.published import Description, describe, published
from dzero.models.tensor_views import Readable
from dzero.zero.sharded import Sharded, check_sharded


def weights(sharded: Sharded, *, merge: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over the names and whole tensors of a sharded model, one at a time, on every rank.

        for name, tensor in dzero.weights(sharded):    # on all ranks
            engine.load_weights([(name, tensor)])

    Names, values and dtypes are those of the files that `save_pretrained` writes: as transformers publishes the model,
    with tied weights once, and with the values after the last step. Offloaded updates end first, as by
    `optim.synchronize()`. A model that transformers does not know has the names that it was built with.

    Every rank gets every tensor, on the device of the mesh. Tensors are copies, gathered when they are asked for: a
    rank holds one at a time, or those that are made of each other, such as the experts of a layer, beside what the
    caller keeps.

    All ranks call this and iterate alike, also where one of them alone uses the tensors: each step of the iterator is
    collective. An iterator may be left early, on all ranks after the same tensor.

    Args:
        sharded: The sharded model.
        merge: Merge adapters of peft into the weights that they belong to, and yield the whole model. False: yield the
            adapter alone, with the names in peft's adapter_model.safetensors. No effect without adapters.

    Returns:
        An iterator over (name, tensor).

    Raises:
        ValueError: If adapters cannot be merged or saved, or some ranks of the process group are not in the mesh.
        RuntimeError: If states are parked (`Sharded.park`), also by the iterator, or if weights changed meanwhile.
    """
    check_sharded(sharded, "dzero.weights", "dzero.weights(sharded)")
    sharded.check_unparked()
    adapted = has_adapters(sharded.model)
    if adapted:
        settings_of(adapted_part(sharded.model).peft_config)
    found = describe(sharded.model)
    tensors = WholeTensors(sharded, torch.device(sharded.mesh.device_type))
    if tensors.ranks != (world := torch.distributed.get_world_size()):
        raise ValueError(
            f"weights() of a model on {tensors.ranks} of the {world} ranks of the process group: it broadcasts within "
            "the whole group; shard over all ranks, or save_pretrained()"
        )
    source: Mapping[str, Readable] = tensors.readable()
    if found is not None:
        base: dict[str, Readable] | None = {} if adapted and merge else None
        described = msgspec.convert(found, Description)
        source = published(described, source, trained=tensors.trained, base=base).tensors
    tensors.expect([each.stored for each in source.values()])
    return _gathered(sharded, source)


def _gathered(sharded: Sharded, source: Mapping[str, Readable]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor when it is asked for, as a copy that shares no memory with another one."""
    uses = Counter(name for each in source.values() for name in each.stored)
    begun = _version(sharded)
    for name, each in source.items():
        sharded.check_unparked()
        if _version(sharded) != begun:
            raise RuntimeError("weights changed since weights() was called: finish an iteration before the next step")
        is_shared = any(uses[stored] > 1 for stored in each.stored)
        # Without a variable, the last tensor is freed before the next one is gathered, unless the caller keeps it.
        yield name, each().clone(memory_format=torch.contiguous_format) if is_shared else each().contiguous()


def _version(sharded: Sharded) -> int:
    """Return the number of steps and writes that changed parameters."""
    return sum(unit.version for unit in sharded.units)
