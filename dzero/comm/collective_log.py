"""Where a rank is: its last collective and how many it began, so that ranks which disagree can be told apart.

    ranks began other collectives    who notices                                what it costs
    of the same size                 the checksum of a step, with its decision  8 bytes a step and rank
    the same, but not every module   that checksum, of names without gradient   nothing
    of other sizes                   nothing matches, so the timeout            nothing
    any, before data moves           `check`                                    a small gather before every collective

Every rank begins the same collectives in the same order, so a number says the same on all of them: at one number two
ranks have diverged where their collectives differ, and the rank with the lowest is behind. Not so in a pipeline, whose
parts begin collectives of their own: there the rank that computes, or hangs, is the one that waits for no other.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import TracebackType

import torch
import torch.distributed as dist

from dzero import streams

KEPT = 10_000
"""Collectives of a step that are remembered one by one, where nobody ends the step (inference)."""


@dataclass(frozen=True)
class Collective:
    """One collective. `elems`: of the part that each rank contributes (all_reduce: of the whole), of `dtype`."""

    kind: str
    unit: str
    axis: str
    elems: int
    dtype: torch.dtype

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, kind: str, unit: str, axis: str, elems: int, dtype: torch.dtype) -> Collective:
        """Return the one with these values, which a step has many times."""
        return cls(kind, unit, axis, elems, dtype)

    @cached_property
    def text(self) -> str:
        """A line that names it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind} of {self.unit or 'the root'} over {self.axis} [{self.elems} x {dtype}]"

    @cached_property
    def encoded(self) -> bytes:
        """The same, for checksums."""
        return self.text.encode()

    def __str__(self) -> str:
        return self.text


class CollectiveLog:
    """This rank's collectives of the step, and their checksum (32 bits, exact in fp64).

    `check`: compare every collective with the other ranks' before it moves data. `failed`: one raised, so other ranks
    are gone, hang, or do something else. `of_parts`: this rank has a part of a pipeline; `moves`: and waits for
    another. `is_waiting`: for a collective. `device`: where collectives are enqueued, so that the host goes on while
    they wait for other ranks; None where it waits with them.
    """

    def __init__(self) -> None:
        self.check = self.failed = self.of_parts = self.moves = self.is_waiting = False
        self.count = self.checksum = 0
        self.device: torch.device | None = None
        self._behind: streams.Event = None  # the last collective's
        self._last: tuple[int, Collective] | None = None  # one object, so that other threads read both or neither
        self.step: deque[Collective | str] = deque(maxlen=KEPT)

    @property
    def at(self) -> tuple[int, str]:
        """The number of the collective this rank began last, and what it is. From any thread."""
        count, collective = self._last or (0, "before its first collective")
        return count, f"#{count} {collective}" if count else str(collective)

    def within(self, collective: Collective, group: dist.ProcessGroup) -> Waiting:
        """Begin a collective; what may wait for other ranks happens inside of what is returned, or of `waiting`."""
        self.count += 1
        self.step.append(collective)
        self._last = self.count, collective
        self.checksum = zlib.crc32(collective.encoded, self.checksum)
        if self.check:
            with self.waiting():
                self._check(collective, group)
        return self.waiting()

    def note(self, what: str) -> None:
        """Count `what` into the checksum: ranks must agree on it, and the size of no collective shows it."""
        self.step.append(what)
        self.checksum = zlib.crc32(what.encode(), self.checksum)

    def waiting(self) -> Waiting:
        """Return a context in which this rank waits for others."""
        return Waiting(self)

    @property
    def waits(self) -> bool:
        """Whether this rank waits for others, as far as is known. From any thread."""
        return self.is_waiting or self.moves

    @property
    def is_on_device(self) -> bool:
        """Whether the device has not come to the end of the last collective. From any thread."""
        return not streams.is_over(self._behind)

    def enqueued(self) -> None:
        """Remember where the current stream is, behind a collective that was enqueued on it."""
        if self.device is not None:
            self._behind = streams.record_event(self.device)

    def end_step(self) -> None:
        """Forget the step's collectives; the numbers go on."""
        self.step.clear()
        self.checksum = 0

    def _check(self, collective: Collective, group: dist.ProcessGroup) -> None:
        said = gather_texts(f"#{self.count} {collective}", group)
        if any(each != said[0] for each in said):
            raise RuntimeError(f"ranks begin different collectives:\n{by_rank(said, group)}")

    def divergence(self, group: dist.ProcessGroup) -> str:
        """The first collective of the step that differs between the ranks of `group`. They all call this."""
        steps = [text.split("\n") for text in gather_texts("\n".join(map(str, self.step)), group)]
        for index in range(max(map(len, steps))):
            at = [step[index] if index < len(step) else "none" for step in steps]
            if any(each != at[0] for each in at):
                return f"collective {index + 1} of the step was\n{by_rank(at, group)}"
        return "the collectives of the step were the same"


class Waiting:
    """A context in which the rank of a `CollectiveLog` waits for others; an exception there marks it as failed."""

    __slots__ = ("_before", "_collective_log")

    def __init__(self, collective_log: CollectiveLog) -> None:
        self._collective_log, self._before = collective_log, False

    def __enter__(self) -> None:
        self._before, self._collective_log.is_waiting = self._collective_log.is_waiting, True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._collective_log.is_waiting = self._before
        self._collective_log.enqueued()
        if isinstance(error, Exception):
            self._collective_log.failed = True


def by_rank(texts: Sequence[str], group: dist.ProcessGroup) -> str:
    """A line for each rank of `group`."""
    return "\n".join(
        f"  rank {rank}: {text}" for rank, text in zip(dist.get_process_group_ranks(group), texts, strict=True)
    )


def gather_texts(text: str, group: dist.ProcessGroup) -> list[str]:
    """What every rank of `group` says, in rank order."""
    device = torch.device("cpu" if "cpu" in dist.get_backend_config(group) else "cuda")
    mine = torch.tensor([*text.encode()], dtype=torch.uint8, device=device)
    length = torch.tensor([mine.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(group.size())]
    dist.all_gather(lengths, length, group=group)
    padded = mine.new_zeros(max(int(each) for each in lengths))
    padded[: mine.numel()] = mine
    every = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(every, padded, group=group)
    return [
        bytes(each.tolist())[: int(size)].decode(errors="replace") for each, size in zip(every, lengths, strict=True)
    ]
