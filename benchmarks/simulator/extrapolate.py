"""Exact extrapolation of a step from a few equal blocks to many, as every number is affine in the number of blocks.

Two steps are observed, of a model with `SHORT` blocks and of one with `SHORT + 1`. Each moment of the shorter step has
a twin in the longer one. Outside of blocks the twin is the moment at the same place. Inside block k it is the moment in
block k if blocks are counted from the start, or in block k + 1 if they are counted from the end. The difference between
the twins is what one more block holds at that moment, so for L blocks it is added L - SHORT times. In the middle of a
long model a moment's bytes also change evenly from block to block. The maximum is therefore at an end of the middle,
and both ends are included.

For actions, a phase of the longer step is that of the shorter one with a piece inserted. With more blocks the piece is
inserted once for each of them, with its blocks renumbered. Updates are listed in their own order. Tests compare all of
this with steps of the whole model.

Decisions are the exception, because their slices are rounded up. The bytes that they send are computed by formula, and
their buffers, which are kilobytes, are treated as affine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from dzero.comm.ledger import Entry, Traffic
from dzero.zero.unit_shapes import UnitShape
from simulator.observe import DECIDE, Observed, ObservedAction, collective_of, updates
from simulator.storage_meter import Bytes, StorageMoment, Where

SHORT = 3
"""Number of blocks: a first one, a last one, and one in between."""
BLOCK = re.compile(r"\blayers\.(\d+)")


def repeat(
    short: Observed, long: Observed, layers: int, units: Sequence[UnitShape], decision: Mapping[Entry, Traffic]
) -> Observed:
    """Return a step of `layers` equal blocks.

    Its moments are those at which memory may be at its maximum: of blocks, the first two and the last two.

    Args:
        short: Step of `SHORT` blocks.
        long: Step of `SHORT + 1` blocks.
        layers: Number of blocks.
        units: Shapes of all units.
        decision: Traffic of the collectives of the decision, one per entry.

    Raises:
        RuntimeError: The blocks are not equal.
    """
    repeated = _Repeated(short, long, layers)
    sent = {collective_of(entry): traffic.sent_bytes for entry, traffic in decision.items()}
    actions = [
        replace(action, sent_bytes=sent[action.collective]) if action.what == DECIDE else action
        for action in repeated.actions()
    ]
    actions += updates(units, actions[-1].microbatch)
    return Observed(repeated.moments(), actions, {**repeated.traffic(), **decision})


@dataclass(frozen=True)
class _Repeated:
    short: Observed
    long: Observed
    layers: int

    def moments(self) -> list[StorageMoment]:
        twins = _by_place(self.long)
        return [
            moment
            for where, moments in _by_place(self.short).items()
            for shift in _shifts(where.unit)
            for moment in self._grown(moments, twins[_moved(where, shift)], shift)
        ]

    def _grown(
        self, short: Sequence[StorageMoment], long: Sequence[StorageMoment], shift: int
    ) -> Iterator[StorageMoment]:
        if len(short) != len(long):  # the optimizer step has operators per parameter; only its maximum matters
            short, long = ([max(each, key=lambda m: m.total)] for each in (short, long))
        for a, b in zip(short, long, strict=True):
            yield StorageMoment(_moved(a.where, shift * self._more), self._affine(a.bytes, b.bytes))

    def _affine(self, short: Bytes, long: Bytes) -> Bytes:
        return tuple(a + (b - a) * self._more for a, b in zip(short, long, strict=True))

    @property
    def _more(self) -> int:
        return self.layers - SHORT

    def traffic(self) -> dict[Entry, Traffic]:
        return {
            entry: Traffic(*self._affine((a.calls, a.sent_bytes), (b.calls, b.sent_bytes)))
            for entry, b in self.long.traffic.items()
            for a in [self.short.traffic.get(entry, Traffic())]
        }

    def actions(self) -> list[ObservedAction]:
        short, long = (
            [[*each] for _, each in groupby((a for a in step.actions if a.what != "update"), key=_phase)]
            for step in (self.short, self.long)
        )
        return [action for a, b in zip(short, long, strict=True) for action in self._spliced(a, b)]

    def _spliced(self, short: list[ObservedAction], long: list[ObservedAction]) -> Iterator[ObservedAction]:
        """Yield `short` with the piece that `long` has in addition, once for each further block."""
        descending = _phase(short[0])[1] == "backward"
        before, behind = (1, 0) if descending else (0, 1)  # offset of block numbers in `long`
        size = len(long) - len(short)
        for cut in range(len(short) + 1):
            if _alike(short[:cut], long[:cut], before) and _alike(short[cut:], long[cut + size :], behind):
                break
        else:
            raise RuntimeError(f"the blocks of the {_phase(short[0])[1]} are not equal, so it cannot be repeated")
        yield from self._grown_actions(short[:cut], long[:cut], before)
        for turn in range(self._more):
            yield from _renamed(long[cut : cut + size], self._more - 1 - turn if descending else turn)
        yield from self._grown_actions(short[cut:], long[cut + size :], behind)

    def _grown_actions(
        self, short: Sequence[ObservedAction], long: Sequence[ObservedAction], shift: int
    ) -> Iterator[ObservedAction]:
        for a, b in zip(short, long, strict=True):
            (sent_bytes,) = self._affine((a.sent_bytes,), (b.sent_bytes,))
            yield replace(a, unit=_shifted(a.unit, shift * self._more), sent_bytes=sent_bytes)


def _alike(short: Sequence[ObservedAction], long: Sequence[ObservedAction], shift: int) -> bool:
    """Return whether shifted actions are equal, bytes sent aside, since decisions are longer with more blocks."""
    return [replace(a, sent_bytes=0) for a in _renamed(short, shift)] == [replace(b, sent_bytes=0) for b in long]


def _phase(action: ObservedAction) -> tuple[int, str]:
    return action.microbatch, action.phase


def _by_place(observed: Observed) -> dict[Where, list[StorageMoment]]:
    buffer_layout: dict[Where, list[StorageMoment]] = {}
    for moment in observed.moments:
        buffer_layout.setdefault(moment.where, []).append(moment)
    return buffer_layout


def _shifts(unit: str) -> list[int]:
    """Return the offsets of a twin's block number: 0 counted from the start, 1 from the end; in the middle, both."""
    found = BLOCK.search(unit)
    if found is None:
        return [0]
    return [shift for shift in (0, 1) if (int(found[1]) < SHORT - 1 if shift == 0 else int(found[1]) > 0)]


def _moved(where: Where, shift: int) -> Where:
    return where._replace(unit=_shifted(where.unit, shift))


def _renamed(actions: Sequence[ObservedAction], shift: int) -> list[ObservedAction]:
    return [replace(action, unit=_shifted(action.unit, shift)) for action in actions]


def _shifted(unit: str, shift: int) -> str:
    def number(found: re.Match[str]) -> str:
        return f"layers.{int(found[1]) + shift}"

    return BLOCK.sub(number, unit)
