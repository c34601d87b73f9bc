"""Saves while training goes on.

    the run's thread                       this rank's background thread             rank 0's, besides
    wait for the save before this one
    a name from rank 0      -->
    states into blocks      -->            blocks to disk, checksums, fsync
    (the run goes on)                      read back, compare
                                           tell all ranks: whole, or why not  -->    manifest, its name, latest
                                                                                     remove what is too old
    the next step asks      <--            done, or what went wrong

The ranks agree over a group of their own (agreement.py). One that dies meanwhile leaves a partial folder, which the
next run removes; the checkpoint before is untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from dzero.checkpoint.agreement import Agreement
from dzero.checkpoint.config import CheckpointConfig
from dzero.checkpoint.contents import Checkpoint
from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.folder import Folder, Shelf
from dzero.checkpoint.format import DTYPES, MANIFEST, VERSION, Manifest, Part, index_name, seal
from dzero.checkpoint.reader import Files
from dzero.checkpoint.writer import BLOCK_BYTES, Blocks, ShardWriter
from dzero.offload.pinned import ALIGNMENT_BYTES

Write = Callable[[Callable[[str, torch.Tensor], None]], None]


class Saver:
    """A run's checkpoints. Collective: every rank makes one. Raises CheckpointError where another run saves there."""

    def __init__(self, config: CheckpointConfig, ranks: Agreement) -> None:
        self._config, self._ranks, self._shelf = config, ranks, Shelf(config.folder)
        self._rank = dist.get_rank()
        self._blocks: Blocks | None = None
        self._under_way: Future[str] | None = None
        with ExitStack() as undo:
            self._thread = undo.enter_context(ThreadPoolExecutor(1, "checkpoint"))
            why = ""
            if self._rank == 0:
                try:
                    undo.enter_context(self._shelf.locked())
                    self._shelf.clean()
                except CheckpointError as error:
                    why = str(error)
            ranks.reach(why)
            self._undo = undo.pop_all()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.close()

    def save(self, step: int, parts: Mapping[str, Part], write: Write, state: dict[str, Any]) -> None:
        """Take `parts` as they are now, which `write` gives one by one; returns when they may change.

        state: what is no tensor; rank 0's counts. Collective. Raises CheckpointError for this save, or the one before.
        """
        self.finish()
        name = self._begin(step)
        stack = ExitStack()
        try:
            folder = stack.enter_context(Folder(self._shelf.partial(name)))
            writer = stack.enter_context(ShardWriter(folder, self._rank, parts, self._staging(parts)))
            write(writer.put)
        except BaseException as error:
            stack.close()
            self._under_way = self._thread.submit(self._give_up, name, error)
            if not isinstance(error, CheckpointError):
                raise
            return
        self._under_way = self._thread.submit(self._complete, name, step, folder, writer, stack, state)

    def finished(self) -> str | None:
        """The name of a checkpoint that became whole since the last call. Raises CheckpointError if it failed."""
        if self._under_way is None or not self._under_way.done():
            return None
        return self.finish()

    def finish(self) -> str | None:
        """As `finished`, but waits for one that is under way."""
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else under_way.result()

    def _complete(
        self, name: str, step: int, folder: Folder, writer: ShardWriter, stack: ExitStack, state: dict[str, Any]
    ) -> str:
        """In the background: this rank's file and index become durable and are read back; then all ranks' agree."""
        why = sealed = ""
        try:
            with stack:
                index = writer.finish()
                data, sealed = seal(index)
                folder.write(index_name(self._rank), data)
                if self._config.verify:
                    with Files(folder, {self._rank: index}) as files:
                        files.verify(self._rank)
        except Exception as error:  # whatever it is, the others wait for an answer
            why = _why(error)
        seals = self._agree(name, why, sealed)
        if self._rank == 0:
            why = self._publish(name, Manifest(VERSION, step, tuple(seals), state))
        self._agree(name, why)
        return name

    def _give_up(self, name: str, error: BaseException) -> str:
        """In the background: tell the others that this rank's part will not come."""
        self._agree(name, f"rank {self._rank}: {error}")
        raise AssertionError("unreachable: the ranks have agreed that it failed")

    def _publish(self, name: str, manifest: Manifest) -> str:
        """Why not, or nothing."""
        try:
            with Folder(self._shelf.partial(name)) as folder:
                folder.write(MANIFEST, seal(manifest)[0])
            with Checkpoint(self._shelf.partial(name)):  # the ranks' parts make up whole tensors
                self._shelf.publish(name)
            self._shelf.point(name)
            self._shelf.keep(self._config.keep)
        except Exception as error:
            return _why(error)
        return ""

    def _begin(self, step: int) -> str:
        """A partial folder, made by rank 0; its name."""
        name = why = ""
        if self._rank == 0:
            try:
                name = self._shelf.begin(step)
            except CheckpointError as error:
                why = str(error)
        return self._ranks.reach(why, name)[0]

    def _agree(self, name: str, why: str, say: str = "") -> list[str]:
        """As `Agreement.reach`; where it fails, what was written of `name` is removed."""
        try:
            return self._ranks.reach(why, say)
        except CheckpointError:
            if self._rank == 0:
                self._shelf.discard(name)
            raise

    def _staging(self, parts: Mapping[str, Part]) -> Blocks:
        """Blocks for all of it, or as many as may be taken; kept for the next save."""
        if self._blocks is None:
            needed = sum(part.box.elems * DTYPES[part.dtype].itemsize for part in parts.values())
            block_bytes = min(BLOCK_BYTES, self._config.staging_bytes // (2 * ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
            most = max(2, self._config.staging_bytes // block_bytes)
            self._blocks = Blocks(min(most, needed // block_bytes + 2), block_bytes=block_bytes)
        return self._blocks


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
