"""Saves in the background while training continues.

    training thread                        background thread of each rank           rank 0, in addition
    wait for the previous save
    get a name from rank 0  -->
    copy states to buffers  -->            write buffers, checksums, fsync
    (training continues)                   read back, compare
                                           exchange success or error with all  -->  manifest, rename, latest.json
                                                                                    remove old checkpoints
    next step checks        <--            done, or an error

The ranks agree over a process group of their own (checkpoint/rank_consensus.py). A rank that dies during a save leaves
a partial folder, which the next run removes; the previous checkpoint is not affected.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dzero.checkpoint.block_reader import BlockReader
from dzero.checkpoint.config import CheckpointConfig
from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.format import MANIFEST, VERSION, Manifest, StoredBox, index_name, seal
from dzero.checkpoint.io_buffers import BLOCK_BYTES, IOBuffers
from dzero.checkpoint.lineage import Lineage
from dzero.checkpoint.rank_consensus import RankConsensus
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.selection import keep, refuse_foreign
from dzero.checkpoint.store import CheckpointStore, Directory
from dzero.checkpoint.writer import ShardWriter
from dzero.offload.memory_pool import ALIGNMENT_BYTES

logger = logging.getLogger(__name__)
Write = Callable[[Callable[[str, torch.Tensor], None]], None]


class Saver:
    """Background saves of a run, whose states may be on `device`. Collective: every rank constructs one.

    Raises `CheckpointError` if another run saves to the folder, or a rank does not see it.
    """

    def __init__(self, config: CheckpointConfig, ranks: RankConsensus, device: torch.device | None = None) -> None:
        self._config, self._ranks, self._shelf, self._device = config, ranks, CheckpointStore(config.folder), device
        self._rank = dist.get_rank()
        self._buffers: IOBuffers | None = None
        self._touched: Future[None] | None = None
        self._under_way: Future[str] | None = None
        self._lineage: Lineage | None = None
        self._needed_bytes: int | None = None  # of a checkpoint, from the first save on
        with ExitStack() as undo:
            self._thread = undo.enter_context(ThreadPoolExecutor(1, "checkpoint"))
            locked = partial(undo.enter_context, self._shelf.locked())
            word = ranks.agree(locked if self._rank == 0 else str)[0]
            all_see(ranks, config.folder, lambda: self._shelf.word() == word)
            self._undo = undo.pop_all()

    def claim(self, lineage: Lineage, source: Path | None = None) -> None:
        """Begin a run of `lineage`, which may have resumed from a checkpoint `source`. Collective.

        Partial checkpoints of runs that died are removed. If the folder holds checkpoints of another run, raise
        `CheckpointError`; nothing has changed then.
        """

        def take() -> str:
            """Check and clean the folder, on rank 0."""
            refuse_foreign(self._shelf, lineage, source)
            self._shelf.clean()
            return ""

        self._ranks.agree(take if self._rank == 0 else str)
        self._lineage = lineage

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        if self._under_way is not None and (error := self._under_way.exception()) is not None:
            logger.warning(f"the last checkpoint was not saved: {error}")

    def prepare(self, parts: Mapping[str, StoredBox]) -> None:
        """Allocate buffers for `parts` in the background, so that the first save takes no longer than later ones."""
        self._touched = self._thread.submit(self._staging(parts).touch)

    def save(
        self, step: int, describe: Callable[[], Mapping[str, StoredBox]], write: Write, state: dict[str, Any]
    ) -> None:
        """Save parts as they are now; return when they may change. Collective.

        Args:
            step: Step that they belong to.
            describe: Returns the parts. It may have ranks agree on them: it is called when the save before this one,
                whose thread has them agree as well, is over.
            write: Passes every part in order to `put(name, tensor)`.
            state: Plain JSON; that of rank 0 is saved.

        Raises:
            CheckpointError: The save before this one failed, or this one cannot begin.
        """
        self.finish()
        parts = describe()
        if self._lineage is None:
            self.claim(Lineage().resumed(0))
        assert self._lineage is not None
        if self._needed_bytes is None:
            sizes = self._ranks.agree(lambda: str(sum(part.size_bytes for part in parts.values())))
            self._needed_bytes = sum(map(int, sizes))
        name = self._ranks.agree(partial(self._begin, step) if self._rank == 0 else str)[0]
        stack, staged = ExitStack(), Future[Callable[[], str]]()
        self._under_way = self._thread.submit(self._complete, name, step, state, self._lineage, staged)
        try:
            folder = stack.enter_context(Directory(self._shelf.partial(name)))
            writer = stack.enter_context(ShardWriter(folder, self._rank, parts, self._staging(parts)))
            write(writer.put)
            staged.set_result(partial(self._finish, folder, writer, stack))
        except BaseException as error:  # the background thread reports this to the waiting ranks
            stack.close()
            staged.set_exception(error)
            if not isinstance(error, CheckpointError):
                raise

    def finished(self) -> str | None:
        """Return the name of a newly completed checkpoint, or None; raise `CheckpointError` if the save failed."""
        if self._under_way is None or not self._under_way.done():
            return None
        return self.finish()

    def finish(self) -> str | None:
        """Wait for a save in progress, then return or raise as `finished` does."""
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else under_way.result()

    def _begin(self, step: int) -> str:
        """Begin a checkpoint; if there is no room for it, first remove what would be removed behind it."""
        room = os.statvfs(self._shelf.path)
        assert self._needed_bytes is not None
        assert self._lineage is not None
        if room.f_blocks > 0 and room.f_bavail * room.f_frsize < self._needed_bytes:
            stay, best = max(1, self._config.keep - 1), self._config.keep_best
            if gone := keep(self._shelf, stay, self._lineage, keep_best=best):
                logger.warning(
                    f"{self._shelf.path}: removed {', '.join(gone)} before step {step} is saved and not after it, "
                    f"because there was no room (checkpoint.keep={self._config.keep})"
                )
        return self._shelf.begin(step)

    def _complete(
        self, name: str, step: int, state: dict[str, Any], lineage: Lineage, staged: Future[Callable[[], str]]
    ) -> str:
        """Complete a checkpoint on rank 0 once every rank's part is on disk; runs in the background."""
        try:
            seals = self._ranks.agree(lambda: staged.result()())
            manifest = Manifest(VERSION, step, tuple(seals), state, *lineage, time.time_ns())
            self._ranks.agree(partial(self._publish, name, manifest) if self._rank == 0 else str)
        except BaseException as error:
            if self._rank == 0:
                self._shelf.discard(name)
            if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                raise
            # A run may be configured to survive errors of this class.
            raise CheckpointError("", f"rank {self._rank}: {type(error).__name__}: {error}") from error
        return name

    def _finish(self, folder: Directory, writer: ShardWriter, stack: ExitStack) -> str:
        """Make this rank's file and index durable, verify the file if configured, and return the index's seal."""
        with stack:
            index = writer.finish()
            data, sealed = seal(index)
            folder.write(index_name(self._rank), data)
            if self._config.verify:
                with BlockReader(folder, {self._rank: index}, self._buffers) as files:
                    for _ in files.verify(self._rank):
                        pass
        return sealed

    def _publish(self, name: str, manifest: Manifest) -> str:
        with Directory(self._shelf.partial(name)) as folder:
            folder.write(MANIFEST, seal(manifest)[0])
        with Checkpoint(self._shelf.partial(name)):  # checks that the ranks' parts make up whole tensors
            self._shelf.publish(name)
        self._shelf.point(name, manifest.origin)
        keep(self._shelf, self._config.keep, manifest.origin, keep_best=self._config.keep_best)
        return ""

    def _staging(self, parts: Mapping[str, StoredBox]) -> IOBuffers:
        """Return buffers for all of `parts`, or as many as `staging_bytes` allows; later saves reuse them."""
        if self._touched is not None:
            self._touched.result()
        needed = sum(part.size_bytes for part in parts.values())
        block_bytes = min(BLOCK_BYTES, self._config.staging_bytes // (2 * ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        count = min(max(2, self._config.staging_bytes // block_bytes), needed // block_bytes + 2)
        if self._buffers is None or self._buffers.count < count:
            self._buffers = IOBuffers(count, block_bytes=block_bytes, device=self._device)
        return self._buffers


def all_see(ranks: RankConsensus, path: Path | str, looks: Callable[[], bool]) -> bool:
    """Return whether every rank sees `path`, as reported by `looks`; False if no rank does. Collective.

    If only some ranks see it, raise `CheckpointError`, which names them and their hosts.
    """
    rows = [row.split(" ", 1) for row in ranks.agree(lambda: f"{int(looks())} {socket.gethostname()}")]
    hosts: dict[str, dict[str, list[int]]] = {"0": {}, "1": {}}
    for rank, (sees, host) in enumerate(rows):
        hosts[sees].setdefault(host, []).append(rank)
    if not all(hosts.values()):
        return bool(hosts["1"])
    without, by = (", ".join(f"{_ranks(found)} on {host}" for host, found in hosts[sees].items()) for sees in "01")
    what = f"seen by {by}, but not by {without}: checkpoint.folder must name one folder that all nodes share"
    raise CheckpointError(str(path), what)


def _ranks(ranks: list[int]) -> str:
    """Format numbers as `rank 3`, `ranks 0-7` or `ranks 0, 2, 4`."""
    first, last = ranks[0], ranks[-1]
    if first == last:
        return f"rank {first}"
    return f"ranks {first}-{last}" if last - first == len(ranks) - 1 else f"ranks {', '.join(map(str, ranks))}"
