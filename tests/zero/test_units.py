"""Which modules become units: blocks by default, classes by name, and weights that are shared join them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import small_decoders
import torch
from torch import Tensor, nn

from dzero.models.config import LlamaShape
from dzero.models.hf import HFDecoder
from dzero.models.llama import Llama
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig
from dzero.zero import units
from dzero.zero.units import OWN_UNIT_ELEMS, UnitChoice, find_units, roots_of, shapes_of, slots_by_unit, units_of_roots

LARGE, SMALL = OWN_UNIT_ELEMS // 64, OWN_UNIT_ELEMS // 64 - 1
"""Words of a vocabulary whose embedding, of width 64, just is a unit of its own, or just is not."""
BLOCKS = ["layers.0", "layers.1"]


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


def llama(vocab: int = LARGE, **sizes: Any) -> Llama:
    return Llama(LlamaShape(vocab_size=vocab, hidden_size=64, layers=2, heads=4, kv_heads=2, ffn_size=64, **sizes))


def transformers_model(kind: str, **sizes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    widths = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(kind, vocab_size=LARGE, **widths, num_hidden_layers=2, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


def names(model: nn.Module, classes: list[str] | None = None) -> list[str]:
    return [name for name, _ in find_units(model, UnitChoice(tuple(classes or ())))]


def test_units_are_the_elements_of_the_outermost_lists() -> None:
    assert names(small_decoders.build("even")) == ["layers.0", "layers.1", "layers.2"]


def test_a_sequential_is_cut_into_its_elements_with_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    assert names(model) == ["0", "2"]


def test_lists_inside_elements_do_not_make_units_of_their_own() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner[0](x)
            return out

    model = nn.ModuleDict({"stack": nn.ModuleList([Block(), nn.Sequential(nn.Linear(2, 2))])})
    assert names(model) == ["stack.0", "stack.1"]


def nested_containers() -> nn.Module:
    """Elements that hold called modules: a list, a dict with a list, and an nn.Module() with a parameter."""
    bag = nn.Module()
    bag.attention, bag.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    dicts = nn.ModuleDict({"x": nn.Linear(2, 2), "y": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])})
    lists = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])
    elements = [lists, dicts, bag, nn.ParameterList([torch.ones(2)]), nn.Linear(2, 2)]
    return nn.ModuleDict({"layers": nn.ModuleList(elements)})


def test_elements_without_a_forward_are_replaced_by_the_modules_in_them() -> None:
    inner = ["layers.0.0", "layers.0.1", "layers.1.x", "layers.1.y.0", "layers.2.attention", "layers.4"]
    assert names(nested_containers()) == inner


def test_a_forward_that_was_set_on_an_element_is_one() -> None:
    model = nested_containers()
    model.get_submodule("layers.2").forward = lambda x: x
    assert names(model)[-2:] == ["layers.2", "layers.4"]


def test_a_module_that_two_lists_share_is_one_unit() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleList(nn.ModuleList([shared, nn.Linear(2, 2)]) for _ in range(2))
    assert names(model) == ["0.0", "0.1", "1.1"]


def test_a_chosen_class_without_a_forward_is_refused_and_a_predicate_passes_over_it() -> None:
    model = nested_containers()
    told = r"zero\.units=\[ModuleList\]: layers has no forward.* of \['Linear', 'Sequential'\], or leave"
    with pytest.raises(ValueError, match=told):
        names(model, ["ModuleList"])
    with pytest.raises(ValueError, match=r"zero\.units=\[ModuleDict\]: layers\.1 has no forward.* of \['Linear'\]"):
        names(model, ["ModuleDict", "Linear"])
    assert [name for name, _ in find_units(model, UnitChoice(is_unit=lambda _: True))] == names(model)


def test_units_can_be_named_by_class_of_which_the_outer_ones_count() -> None:
    model = small_decoders.build("even")
    assert names(model, ["Block"]) == ["layers.0", "layers.1", "layers.2"]
    assert names(model, ["Block", "Linear"]) == ["layers.0", "layers.1", "layers.2", "head"]


def test_a_class_without_units_is_an_error_that_lists_the_models_classes() -> None:
    with pytest.raises(ValueError, match=r"zero\.units=\['Blok'\]: no such modules.*'Block', 'Embedding'"):
        find_units(small_decoders.build("even"), UnitChoice(("Block", "Blok")))
    with pytest.raises(ValueError, match=r"zero\.units=\['Embedding2'\]"):
        find_units(small_decoders.build("even"), UnitChoice(("Embedding2",)))
    with pytest.raises(ValueError, match=r"zero\.units=\['GELU'\]: no such modules outside the other units"):
        find_units(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.GELU())), UnitChoice(("Sequential", "GELU")))


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


@pytest.mark.parametrize("is_first", [True, False])
def test_blocks_that_have_a_module_of_the_root_are_left_to_it(is_first: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            bank = nn.Linear(4, 4)
            if is_first:
                self.bank = bank
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
            for index in (0, 2):
                self.layers[index].append(bank)
            self.bank = bank

    assert names(Model()) == ["layers.1"]


def test_a_large_embedding_and_a_large_head_are_units_around_the_blocks() -> None:
    assert names(llama()) == ["embedding", *BLOCKS, "head"]
    assert names(llama(SMALL)) == BLOCKS, "a collective more would cost as much as it hides"


def test_ends_that_share_a_weight_are_left_to_the_root_together() -> None:
    assert names(llama(tied=True)) == BLOCKS


def test_units_that_are_chosen_are_all_units() -> None:
    assert names(llama(), ["Block"]) == BLOCKS
    linear, block = (lambda each: isinstance(each, nn.Linear)), (lambda each: each.__class__.__name__ == "Block")
    assert [name for name, _ in find_units(llama(), UnitChoice(is_unit=linear))][-1] == "head"
    assert [name for name, _ in find_units(llama(), UnitChoice(is_unit=block))] == BLOCKS


def test_a_head_in_tiles_is_its_tiles() -> None:
    model = llama()
    apply_blocks(model, BlockConfig(loss_tiles=2, compile=False), "cpu")
    assert names(model) == ["head.tiles.0", "head.tiles.1", "embedding", *BLOCKS]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_ends_of_transformers_models_are_found_by_what_these_say_of_themselves(kind: str) -> None:
    model, blocks = transformers_model(kind, tie_word_embeddings=False), ["model.layers.0", "model.layers.1"]
    assert names(model) == ["model.embed_tokens", *blocks, "lm_head"]
    assert names(HFDecoder(model))[::3] == ["model.model.embed_tokens", "model.lm_head"]
    assert names(transformers_model(kind, tie_word_embeddings=True)) == blocks
    assert names(model.model) == ["embed_tokens", *BLOCKS], "has no head"


def test_gpt2_ties_its_ends_and_its_positions_are_no_end() -> None:
    model = transformers_model("gpt2")
    assert names(model) == ["transformer.h.0", "transformer.h.1"]
    assert names(HFDecoder(model)) == ["model.transformer.h.0", "model.transformer.h.1"]


def forward_of_someone_else(self: Any, input_ids: Tensor) -> Tensor:
    """As a fused loss: the head's weight is read outside of the head."""
    hidden = self.model(input_ids)[0]
    return nn.functional.linear(hidden, self.lm_head.weight)


def patched(model: Any) -> nn.Module:
    cls = type(model)
    model.__class__ = type(cls.__name__, (cls,), {"forward": forward_of_someone_else})
    return model  # type: ignore[no-any-return]


def patched_alone(model: Any) -> nn.Module:
    model.forward = forward_of_someone_else.__get__(model)
    return model  # type: ignore[no-any-return]


def patched_inside(model: Any) -> nn.Module:
    return HFDecoder(patched(model))


class Around(nn.Module):
    """A user's own module: what it does with the model's weights is not known."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()  # type: ignore[operator]


@pytest.mark.parametrize("change", [patched, patched_alone, patched_inside, Around])
def test_a_model_whose_forward_is_not_that_of_who_vouches_keeps_its_ends_in_the_root(
    change: Callable[[nn.Module], nn.Module],
) -> None:
    found = names(change(transformers_model("llama", tie_word_embeddings=False)))
    assert [name.rpartition(".")[0].endswith("layers") for name in found] == [True, True]


class Own(nn.Module):
    """A user's model that declares its ends."""

    def __init__(self, *, bias: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.look_up = nn.Embedding(LARGE, 64)
        self.stack = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.out = nn.Linear(64, LARGE, bias=bias)
        self.other = nn.Linear(64, LARGE, bias=False)
        if shared:
            self.other.weight = self.out.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.look_up

    def get_output_embeddings(self) -> nn.Module:
        return self.out

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.look_up(tokens)
        for layer in self.stack:
            x = layer(x)
        out: Tensor = self.out(x)
        return out


def test_a_users_model_keeps_its_ends_in_the_root_where_its_forward_may_read_their_weights() -> None:
    assert names(Own()) == ["stack.0", "stack.1"]


def test_an_end_has_one_parameter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "VOUCHING", {Own.__module__})
    assert names(Own()) == ["look_up", "stack.0", "stack.1", "out"]
    assert names(Own(bias=True)) == ["look_up", "stack.0", "stack.1"], "its output would be a view"
    assert names(Own(shared=True)) == ["look_up", "stack.0", "stack.1"]


@pytest.mark.parametrize("tied", [False, True])
def test_the_root_and_the_head_close_forward(tied: bool) -> None:
    model = llama(tied=tied)
    roots, units = roots_of(model, None), units_of_roots(model, None)
    closing = [shape.name for shape in shapes_of(slots_by_unit(model, units), units, roots) if shape.closes_forward]
    assert closing == (["root"] if tied else ["head", "root"])
