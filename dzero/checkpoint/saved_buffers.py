"""Persistent buffers in a checkpoint, which ranks may have with different values.

A model's buffers are equal on all ranks, unless a forward writes what it saw of its rank's data into them, as BatchNorm
does with its running statistics. Before each save, ranks compare digests:

    buffer                      saved by                             loaded by
    equal on all ranks          the first rank that has it           all
    another value on a rank     that rank too, for itself alone      the rank in the same place of an equal mesh; with
                                                                     other ranks all take the first rank's, as
                                                                     DistributedDataParallel broadcasts it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from hashlib import blake2b

import torch
import torch.distributed as dist

from dzero.checkpoint.box import Box
from dzero.checkpoint.format import BUFFER, StoredBox
from dzero.checkpoint.reader import Checkpoint
from dzero.mesh import AXES, PIPELINE
from dzero.utils.torch_internals import is_persistent, without_wrappers
from dzero.zero.sharded import Sharded

OF_RANK = "rank_buffer."
"""Beginning of the names of entries that a rank saves for itself."""
Agree = Callable[[Callable[[], str]], list[str]]


class SavedBuffers:
    """Persistent buffers of a sharded model that this rank saves to a checkpoint and loads from it."""

    def __init__(self, sharded: Sharded) -> None:
        self._sharded = sharded
        along_model = [group for axis, group in sharded.model_groups.items() if axis != PIPELINE]
        groups = [*(sharded.mesh.get_group(axis) for axis in AXES), *along_model]
        self._is_first = not any(group.rank() for group in groups)
        self._of_rank: frozenset[str] = frozenset()
        data_ranks = sharded.mesh.size()
        self.axes = {"data": data_ranks, **{axis: group.size() for axis, group in sharded.model_groups.items()}}
        """Number of ranks along the axes that give a rank data, or a part of the model, of its own."""

    def parts(self, agree: Agree) -> dict[str, StoredBox]:
        """Return the parts that `write` saves next, by entry and in order. Collective.

        Args:
            agree: Calls a function on every rank, and returns the results of all.
        """
        mine = {name: [_digest(buffer), saves] for name, buffer, saves in self._buffers()}
        digests: dict[str, str] = {}
        for of_rank in (json.loads(row) for row in agree(lambda: json.dumps(mine))):
            digests = {name: digest for name, (digest, saves) in of_rank.items() if saves} | digests
        self._of_rank = frozenset(
            name for name, (digest, saves) in mine.items() if not saves and digest != digests[name]
        )
        return {
            entry: StoredBox.unplaced(None if entry.startswith(OF_RANK) else entry, buffer.dtype, tuple(buffer.shape))
            for entry, buffer in self._saved()
        }

    def write(self, put: Callable[[str, torch.Tensor], None]) -> None:
        """Pass the parts that `parts` returned last to `put`, as they are now."""
        for entry, buffer in self._saved():
            put(entry, buffer)

    def take(self, checkpoint: Checkpoint, axes: dict[str, int] | None) -> list[str]:
        """Load the buffers of a checkpoint whose ranks had `axes`; return messages for the user."""
        names = [name for name, _, _ in self._buffers()]
        entries = [
            {without_wrappers(entry): entry for entry in index.parts if entry.startswith(OF_RANK)}
            for index in checkpoint.indexes
        ]
        differing = {name.removeprefix(OF_RANK) for of_rank in entries for name in of_rank}
        is_same = axes == self.axes and checkpoint.manifest.ranks == dist.get_world_size()
        own = entries[dist.get_rank()] if is_same else {}
        for name, buffer, _ in self._buffers():
            checkpoint.check_shape(f"{BUFFER}.{name}", tuple(buffer.shape))
            if (entry := own.get(f"{OF_RANK}{name}")) is not None:
                buffer.copy_(checkpoint.read_entries(dist.get_rank(), [entry])[entry])
            else:
                buffer.copy_(checkpoint.read(f"{BUFFER}.{name}", Box.whole(tuple(buffer.shape))))
        if is_same or not (here := sorted(differing.intersection(names))):
            return []
        others = f" and {len(here) - 1} more" if len(here) > 1 else ""
        return [f"resume: other ranks than those that saved: {here[0]}{others}, which differed, is now that of rank 0"]

    def _saved(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the entries that this rank saves."""
        for name, buffer, saves in self._buffers():
            if saves:
                yield f"{BUFFER}.{name}", buffer
            elif name in self._of_rank:
                yield f"{OF_RANK}{name}", buffer

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield the persistent buffers of this rank, and whether it saves them for all.

        The first rank does; for those that only one pipeline stage has, it is the first rank of that stage.
        """
        sharded, stages = self._sharded, self._sharded.stages
        of_stage = {
            module
            for name in (stages.own_modules if stages else ())
            for module in sharded.model.get_submodule(name).modules()
        }
        has_first = stages is None or stages.rank == 0
        for prefix, module in sharded.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if is_persistent(module, name):
                    saves = self._is_first and (has_first or module in of_stage)
                    yield without_wrappers(f"{prefix}.{name}".lstrip(".")), buffer, saves


def _digest(buffer: torch.Tensor) -> str:
    """Return a digest of a buffer's bytes."""
    flat = buffer.detach().cpu().contiguous().view(-1)
    return blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
