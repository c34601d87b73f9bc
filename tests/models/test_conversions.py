"""Conversions between layouts make the tensors that torch makes, and their reverse makes the first ones again."""

from __future__ import annotations

import pytest
import torch
from counted_tensor import Counted

from dzero.models.conversions import Conversion, Step, convert_all, numbered_alike
from dzero.models.tensor_views import Readable

FUSED = Conversion(("layers.#.qkv",), ("layers.#.q", "layers.#.k", "layers.#.v"), (Step("chunk", 0),))
APART = Conversion(FUSED.targets, FUSED.sources, (Step("concatenate", 0),))
MERGED = Conversion(("layers.#.up",), ("layers.#.experts.*.up",), (Step("transpose", 1, 2), Step("split", 0)))


def tensors(**shapes: tuple[int, ...]) -> dict[str, Readable]:
    return {name.replace("_", "."): Counted(torch.randn(shape)) for name, shape in shapes.items()}


def test_ranges_become_tensors_of_their_own_in_every_layer_and_come_together_again() -> None:
    given = tensors(layers_0_qkv=(6, 2), norm=(3,), layers_1_qkv=(6, 2))
    apart = convert_all([FUSED], given)
    assert [*apart] == ["layers.0.q", "layers.0.k", "layers.0.v", "norm", "layers.1.q", "layers.1.k", "layers.1.v"]
    assert torch.equal(apart["layers.1.k"](), given["layers.1.qkv"]()[2:4])
    together = convert_all([APART], dict(reversed(apart.items())))  # in whatever order they are stored
    assert {name: tuple(each.shape) for name, each in together.items()} == {
        name: tuple(each.shape) for name, each in given.items()
    }
    assert all(torch.equal(together[name](), given[name]()) for name in given)


def test_ranges_may_have_sizes_of_their_own() -> None:
    uneven = Conversion(FUSED.sources, FUSED.targets, (Step("chunk", 0, sizes=(4, 1, 2)),))
    given = tensors(layers_0_qkv=(7, 2))
    apart = convert_all([uneven], given)
    assert torch.equal(apart["layers.0.v"](), given["layers.0.qkv"]()[5:])
    with pytest.raises(ValueError, match=r"\[8, 2\] does not consist of ranges of \[4, 1, 2\] along dim 0"):
        convert_all([uneven], tensors(layers_0_qkv=(8, 2)))


def test_steps_apply_in_order() -> None:
    given = tensors(layers_3_up=(2, 4, 5))
    split = convert_all([MERGED], given)
    assert [*split] == ["layers.3.experts.0.up", "layers.3.experts.1.up"]
    assert torch.equal(split["layers.3.experts.1.up"](), given["layers.3.up"]()[1].T)


def test_what_does_not_apply_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers.0.q is stored together with \['layers.0.v'\], which are not there"):
        convert_all([APART], tensors(layers_0_q=(2, 2), layers_0_k=(2, 2)))
    with pytest.raises(ValueError, match=r"\[7, 2\] does not consist of 3 equal ranges along dim 0"):
        convert_all([FUSED], tensors(layers_0_qkv=(7, 2)))
    with pytest.raises(ValueError, match=r"layers.0.qkv and another tensor both make layers.0.k"):
        convert_all([FUSED], tensors(layers_0_k=(2, 2), layers_0_qkv=(6, 2)))
    with pytest.raises(ValueError, match="70000 parts; at most 65536 are made"):
        convert_all([Conversion(("a",), ("a.*",), (Step("split", 0),))], tensors(a=(70000, 0)))


def test_names_get_signs_for_numbers_that_they_share() -> None:
    assert numbered_alike(Conversion(("a.3.b",), ("a.3.*.c",))) == Conversion(("a.#.b",), ("a.#.*.c",))
    assert numbered_alike(Conversion(("a.3.b",), ("a.4.c",))) is None
