"""Any box of a tensor that is made of stored ones is that of torch, and reads its own elements and no others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from counted_tensor import Counted
from torch import Tensor

from dzero.models.tensor_views import Joined, Narrowed, Readable, Selected, Stacked, Transposed

SHAPE = (3, 4, 5)


def leaves(count: int, shape: tuple[int, ...] = SHAPE) -> list[Counted]:
    return [Counted(torch.randn(shape)) for _ in range(count)]


def fused(parts: Sequence[Readable]) -> Readable:
    """Gate and up of two experts each, as transformers keeps them."""
    gate, up = Stacked(tuple(parts[:2]), 0), Stacked(tuple(parts[2:]), 0)
    return Joined((gate, up), 1)


CASES: dict[str, tuple[int, Callable[[Sequence[Readable]], Readable], Callable[[list[Tensor]], Tensor]]] = {
    "stacked first": (3, lambda parts: Stacked(tuple(parts), 0), torch.stack),
    "stacked last": (3, lambda parts: Stacked(tuple(parts), 3), lambda whole: torch.stack(whole, -1)),
    "joined": (3, lambda parts: Joined(tuple(parts), 1), lambda whole: torch.cat(whole, 1)),
    "narrowed": (1, lambda parts: Narrowed((parts[0],), 1, 1, 2), lambda whole: whole[0][:, 1:3]),
    "selected": (1, lambda parts: Selected((parts[0],), 1, 2), lambda whole: whole[0][:, 2]),
    "transposed": (1, lambda parts: Transposed((parts[0],), 0, 2), lambda whole: whole[0].transpose(0, 2)),
    "experts": (4, fused, lambda whole: torch.cat([torch.stack(whole[:2]), torch.stack(whole[2:])], 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_any_box_is_that_of_torch_and_nothing_else_is_read(case: str) -> None:
    count, view_of, torchs = CASES[case]
    parts = leaves(count)
    view, want = view_of(parts), torchs([part() for part in parts])
    assert view.shape == tuple(want.shape)
    assert torch.equal(view(), want)
    assert len(view.stored) == count
    draw = random.Random(0)
    for _ in range(100):
        offset = [draw.randint(0, whole) for whole in view.shape]
        size = [draw.randint(0, whole - first) for first, whole in zip(offset, view.shape, strict=True)]
        before = sum(part.elems for part in parts)
        found = view.read(offset, size)
        box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        assert found.shape == want[box].shape
        assert torch.equal(found, want[box])
        assert sum(part.elems for part in parts) - before == found.numel()


def test_parts_that_do_not_fit_together_are_refused() -> None:
    two = (*leaves(1), *leaves(1, (3, 4, 6)))
    with pytest.raises(ValueError, match=r"counted has shape \[3, 4, 6\], counted \[3, 4, 5\]: one parameter"):
        Stacked(two, 0)
    with pytest.raises(ValueError, match="do not fit together"):
        Joined(two, 1)
    assert Joined(two, 2).shape == (3, 4, 11)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="with 4 dims"):
            Stacked(tuple(leaves(2)), wrong)
    with pytest.raises(ValueError, match="dim 3 of a tensor with 3 dims"):
        Transposed((leaves(1)[0],), 0, 3)
