"""Which modules become units: blocks by default, classes by name, and weights that are shared join them."""

from __future__ import annotations

import nets
import pytest
from torch import nn

from dzero.zero.units import find_units


def names(model: nn.Module, classes: list[str] | None = None) -> list[str]:
    return [name for name, _ in find_units(model, classes)]


def test_units_are_the_elements_of_the_outermost_lists() -> None:
    assert names(nets.build("even")) == ["layers.0", "layers.1", "layers.2"]


def test_a_sequential_is_cut_into_its_elements_with_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    assert names(model) == ["0", "2"]


def test_lists_inside_elements_do_not_make_units_of_their_own() -> None:
    model = nn.ModuleDict({"stack": nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)]) for _ in range(2))})
    assert names(model) == ["stack.0", "stack.1"]


def test_units_can_be_named_by_class_of_which_the_outer_ones_count() -> None:
    model = nets.build("even")
    assert names(model, ["Block"]) == ["layers.0", "layers.1", "layers.2"]
    assert names(model, ["Block", "Linear"]) == ["layers.0", "layers.1", "layers.2", "head"]


def test_a_class_without_units_is_an_error_that_lists_the_models_classes() -> None:
    with pytest.raises(ValueError, match=r"zero\.units=\['Blok'\]: no such modules.*'Block', 'Embedding'"):
        find_units(nets.build("even"), ["Block", "Blok"])
    with pytest.raises(ValueError, match=r"zero\.units=\['Embedding2'\]"):
        find_units(nets.build("even"), ["Embedding2"])
    with pytest.raises(ValueError, match=r"zero\.units=\['GELU'\]: no such modules outside the other units"):
        find_units(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.GELU())), ["Sequential", "GELU"])


def test_blocks_that_share_a_weight_become_one_unit() -> None:
    blocks = [nn.Linear(4, 4) for _ in range(4)]
    blocks[3].weight = blocks[1].weight
    model = nn.Sequential(*blocks)
    assert names(model) == ["0", "2", "1+3"]
    assert dict(find_units(model))["1+3"] == [blocks[1], blocks[3]]


def test_chains_of_shared_weights_become_one_unit() -> None:
    a, b, c = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
    b[0].weight, c[0].weight = a[0].weight, b[1].weight
    assert names(nn.ModuleDict({"layers": nn.ModuleList([a, b, c])})) == ["layers.0+layers.1+layers.2"]


def test_a_module_that_occurs_twice_is_one_unit() -> None:
    block = nn.Linear(4, 4)
    assert names(nn.ModuleDict({"layers": nn.ModuleList([block, nn.Linear(4, 4), block])})) == ["layers.0", "layers.1"]


def test_a_block_that_shares_a_weight_with_the_rest_is_left_to_the_root() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.layers[1].weight = self.embed.weight

    assert names(Model()) == ["layers.0", "layers.2"]
