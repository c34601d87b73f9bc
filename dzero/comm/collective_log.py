"""Log of a rank's collectives, which shows ranks that diverge or hang.

    ranks begin                          detected by                                    cost
    different collectives of one size    a checksum per step, sent with its decision    8 bytes per step and rank
    the same ones, but skip a module     that checksum, by names without gradient       none
    collectives of different sizes       the timeout, because nothing matches           none
    any of these, before data moves      `check`                                        a small gather per collective

Every rank begins the same collectives in the same order, so numbers of collectives are comparable between ranks. Two
ranks have diverged if their collectives of one number differ, and the rank with the lowest number is behind. Stages of
a pipeline begin different collectives: there the rank that computes, or hangs, is the one that waits for no other.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import TracebackType
from typing import NamedTuple
from weakref import ref

import torch
import torch.distributed as dist

from dzero import streams

KEPT = 10_000
"""Maximum number of collectives that are kept, for loops that never end a step (inference)."""


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        unit: Name of the unit, empty for the root; or what else is sent, e.g. `scalars`.
        elems: Number of elements that each rank contributes; for all_reduce, of the whole tensor.
    """

    kind: str
    unit: str
    axis: str
    elems: int
    dtype: torch.dtype

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, kind: str, unit: str, axis: str, elems: int, dtype: torch.dtype) -> Collective:
        """Return a cached instance, because every step repeats its collectives."""
        return cls(kind, unit, axis, elems, dtype)

    @cached_property
    def text(self) -> str:
        """One-line description."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind} of {self.unit or 'the root'} over {self.axis} [{self.elems} x {dtype}]"

    @cached_property
    def encoded(self) -> bytes:
        """The description as bytes, for checksums."""
        return self.text.encode()

    def __str__(self) -> str:
        return self.text


class _Begun(NamedTuple):
    """The collective that a rank began last."""

    number: int
    collective: Collective
    at_s: float
    thread: int
    group: ref[dist.ProcessGroup]


class CollectiveLog:
    """This rank's collectives of the step, and their checksum.

    Attributes:
        check: Whether to compare every collective with the other ranks' before it moves data.
        is_pipeline: Whether this rank runs stages of a pipeline.
        moves: Whether this rank waits for transfers between stages.
        transfers: How many times it has done so.
        is_waiting: Whether this rank waits inside a collective.
        count: Number of collectives begun so far.
        checksum: 32-bit checksum of the step's collectives, which fp64 represents exactly.
        device: Device on which collectives are enqueued, so that the host continues; None if the host waits for them.
        step: The step's collectives and notes.
        explain: Called with the error of a collective; raises one that says which ranks are missing, if it knows.
        beside: What the rank waits for beside collectives, and the thread that does; None: nothing.
    """

    def __init__(self) -> None:
        self.check = self.is_pipeline = self.moves = self.is_waiting = False
        self.count = self.checksum = self.transfers = 0
        self.device: torch.device | None = None
        self._behind: streams.Event = None  # after the last collective
        self._last: _Begun | None = None  # one object, so that other threads read all or none
        self.step: deque[Collective | str] = deque(maxlen=KEPT)
        self.explain: Callable[[Exception], None] = lambda error: None
        self.beside: tuple[str, int] | None = None
        self._model = ""

    def belong_to(self, number: int) -> None:
        """Tell this model's collectives from those of models that were sharded on the same ranks before it."""
        if number > 1:
            self._model = f" of model {number}"
            self.note(f"the step{self._model}")

    @property
    def at(self) -> tuple[int, str]:
        """Number and description of the collective that this rank began last; thread-safe."""
        if (last := self._last) is None:
            return 0, "before its first collective"
        return last.number, f"#{last.number} {last.collective}{self._model}"

    @property
    def begun_s(self) -> float:
        """When the last collective began, by the monotonic clock; 0 before the first. Thread-safe."""
        return 0.0 if (last := self._last) is None else last.at_s

    @property
    def thread(self) -> int | None:
        """The thread that began the last collective; None before the first. Thread-safe."""
        return None if (last := self._last) is None else last.thread

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of the last collective; None before the first, or if it is gone. Thread-safe."""
        return None if (last := self._last) is None else last.group()

    def within(self, collective: Collective, group: dist.ProcessGroup) -> Waiting:
        """Log a collective that begins now; run code that may wait for other ranks in the returned context."""
        self.count += 1
        self.step.append(collective)
        self._last = _Begun(self.count, collective, time.monotonic(), threading.get_ident(), ref(group))
        self.checksum = zlib.crc32(collective.encoded, self.checksum)
        if self.check:
            with self.waiting():
                self._check(group)
        return self.waiting()

    def note(self, what: str) -> None:
        """Add `what` to the checksum: a fact that ranks must agree on, but which no size of a collective shows."""
        self.step.append(what)
        self.checksum = zlib.crc32(what.encode(), self.checksum)

    def waiting(self) -> Waiting:
        """Return a context in which this rank waits for others."""
        return Waiting(self)

    @contextmanager
    def waiting_beside(self, what: str) -> Iterator[None]:
        """Context in which this thread waits for other ranks, but not in a collective of training."""
        self.beside = what, threading.get_ident()
        try:
            yield
        finally:
            self.beside = None

    @property
    def waits(self) -> bool:
        """Whether this rank is known to wait for others; thread-safe."""
        return self.is_waiting or self.moves

    @property
    def is_on_device(self) -> bool:
        """Whether the device has not finished the last collective yet; thread-safe."""
        return not streams.is_over(self._behind)

    def enqueued(self) -> None:
        """Record an event behind the collective that was just enqueued on the current stream."""
        if self.device is not None:
            self._behind = streams.record_event(self.device)

    def end_step(self) -> None:
        """Forget the step's collectives; their numbers continue."""
        self.step.clear()
        self.checksum = 0
        if self._model:
            self.note(f"the step{self._model}")

    def _check(self, group: dist.ProcessGroup) -> None:
        said = gather_texts(self.at[1], group)
        if any(each != said[0] for each in said):
            raise RuntimeError(f"ranks begin different collectives:\n{by_rank(said, group)}")

    def divergence(self, group: dist.ProcessGroup) -> str:
        """Describe the first collective of the step that differs between ranks of `group`, which all call this."""
        steps = [text.split("\n") for text in gather_texts("\n".join(map(str, self.step)), group)]
        for index in range(max(map(len, steps))):
            at = [step[index] if index < len(step) else "none" for step in steps]
            if any(each != at[0] for each in at):
                return f"collective {index + 1} of the step was\n{by_rank(at, group)}"
        return "the collectives of the step were the same"


class Waiting:
    """Context in which the rank of a `CollectiveLog` waits for others; an exception inside is explained."""

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
            self._collective_log.explain(error)


def by_rank(texts: Sequence[str], group: dist.ProcessGroup) -> str:
    """Return one line of text for each rank of `group`."""
    return "\n".join(
        f"  rank {rank}: {text}" for rank, text in zip(dist.get_process_group_ranks(group), texts, strict=True)
    )


def gather_texts(text: str, group: dist.ProcessGroup) -> list[str]:
    """Return the texts of all ranks of `group`, in rank order."""
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
