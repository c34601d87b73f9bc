"""Which modules become units: blocks by default, classes by name, parts of large ones, and what shares a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import decoders
import pytest
import small_decoders
import torch
from fake_ranks import fake_ranks
from torch import Tensor, nn

from dzero import ModelInit, Sharded, ZeroConfig, shard

LARGE, SMALL = (1 << 23) // 64, (1 << 23) // 64 - 1
"""Words of a vocabulary whose embedding, of width 64, just is a unit of its own, or just is not."""
BLOCKS, LAYERS = ["layers.0", "layers.1"], ["model.layers.0", "model.layers.1"]
META = torch.device("meta")


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    with fake_ranks(2), META:
        yield


def sharded_on_meta(model: nn.Module, **zero: Any) -> Sharded:
    return shard(model, ZeroConfig(**zero), precision="fp32", init=ModelInit(device=META))


def names(model: nn.Module, units: Any = None, **zero: Any) -> list[str]:
    """The units but for the root, which has all else."""
    *found, root = [shape.name for shape in sharded_on_meta(model, units=units, **zero).shapes]
    assert root == "root"
    return found


def of_transformers(kind: str = "llama", vocab_size: int = LARGE, **sizes: Any) -> Any:
    pytest.importorskip("transformers")
    return decoders.of_transformers(kind, vocab_size=vocab_size, **sizes).model


class Listed(nn.Module):
    """A block with a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner[0](x)
        return out


class Model(nn.Module):
    """Layers beside parameters of the root's own."""

    def __init__(self, *layers: nn.Module, **others: nn.Module) -> None:
        super().__init__()
        for name, module in others.items():
            self.add_module(name, module)
        self.layers, self.scale = nn.ModuleList(layers), nn.Parameter(torch.ones(2))


def test_units_are_the_elements_of_the_outermost_lists_and_those_of_a_sequential_that_have_parameters() -> None:
    assert names(small_decoders.build("even")) == ["layers.0", "layers.1", "layers.2"]
    assert names(Model(Listed(), nn.Sequential(nn.Linear(2, 2)))) == BLOCKS, "and not those of lists in elements"
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    assert names(model) == ["0", "2"]


def containers() -> Model:
    """Elements that hold called modules: a list, a dict with a list, and an nn.Module() with a parameter."""
    bag = nn.Module()
    bag.attention, bag.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    dicts = nn.ModuleDict({"x": nn.Linear(2, 2), "y": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])})
    lists = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])
    return Model(lists, dicts, bag, nn.ParameterList([torch.ones(2)]), nn.Linear(2, 2))


def test_elements_without_a_forward_are_replaced_by_the_modules_in_them() -> None:
    inner = ["layers.0.0", "layers.0.1", "layers.1.x", "layers.1.y.0", "layers.2.attention", "layers.4"]
    assert names(containers()) == inner
    assert names(containers(), lambda _: True) == inner, "a predicate passes over what has none"
    model = containers()
    model.get_submodule("layers.2").forward = lambda x: x
    assert names(model)[-2:] == ["layers.2", "layers.4"], "one that was set on an element is one"


def test_a_module_that_occurs_twice_is_one_unit() -> None:
    shared = nn.Linear(2, 2)
    assert names(Model(shared, nn.Linear(2, 2), shared)) == BLOCKS
    shared = nn.Linear(2, 2)
    two = nn.ModuleList(nn.ModuleList([shared, nn.Linear(2, 2)]) for _ in range(2))
    assert names(Model(*two)) == ["layers.0.0", "layers.0.1", "layers.1.1"]


@pytest.mark.parametrize(
    ("classes", "told"),
    [
        (
            ["ModuleList"],
            r"zero\.units=\[ModuleList\]: layers has no forward.* of \['Linear', 'Sequential'\], or leave",
        ),
        (["ModuleDict", "Linear"], r"zero\.units=\[ModuleDict\]: layers\.1 has no forward.* of \['Linear'\]"),
        (["Linear", "Blok"], r"zero\.units=\['Blok'\]: no such modules.*'Linear', 'Module', 'ModuleDict'"),
        (["Sequential", "ReLU", "GELU"], r"zero\.units=\['GELU'\]: no such modules outside the other units"),
    ],
)
def test_classes_that_are_no_units_are_refused_with_those_that_could_be(classes: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        names(containers(), classes)


def test_units_can_be_named_by_class_of_which_the_outer_ones_count() -> None:
    blocks = ["layers.0", "layers.1", "layers.2"]
    assert names(small_decoders.build("even"), ["Block"]) == blocks
    assert names(small_decoders.build("even"), ["Block", "Linear"]) == [*blocks, "head"]
    assert names(decoders.on_meta(LARGE, hidden_size=64), ["Block"]) == BLOCKS, "and no ends"


def test_modules_that_share_a_weight_become_one_unit() -> None:
    blocks = [nn.Linear(4, 4) for _ in range(4)]
    blocks[3].weight = blocks[1].weight
    assert names(Model(*blocks)) == ["layers.0", "layers.2", "layers.1+layers.3"]
    a, b, c = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
    b[0].weight, c[0].weight = a[0].weight, b[1].weight
    assert names(Model(a, b, c)) == ["layers.0+layers.1+layers.2"]


@pytest.mark.parametrize("is_first", [True, False])
def test_blocks_that_share_with_the_root_are_left_to_it(is_first: bool) -> None:
    embed, layers = nn.Embedding(4, 4), [nn.Linear(4, 4) for _ in range(3)]
    layers[1].weight = embed.weight
    assert names(Model(*layers, embed=embed)) == ["layers.0", "layers.2"]
    bank, blocks = nn.Linear(4, 4), [nn.Sequential(nn.Linear(4, 4)) for _ in range(3)]
    blocks[0].append(bank)
    blocks[2].append(bank)
    model = Model(*blocks, bank=bank) if is_first else Model(*blocks)
    model.bank = bank
    assert names(model) == ["layers.1"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_embedding_and_a_large_head_of_ones_own_are_units_around_the_blocks(tied: bool) -> None:
    shapes = sharded_on_meta(decoders.on_meta(LARGE, hidden_size=64, tied=tied)).shapes
    ends = ([], []) if tied else (["embedding"], ["head"])
    assert [shape.name for shape in shapes] == [*ends[0], *BLOCKS, *ends[1], "root"]
    assert [shape.name for shape in shapes if shape.closes_forward] == [*ends[1], "root"]
    assert names(decoders.on_meta(SMALL, hidden_size=64)) == BLOCKS, "a collective more would cost what it hides"


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_ends_of_transformers_models_are_found_by_what_these_say_of_themselves(kind: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "tie_word_embeddings": False}
    wrapped = decoders.of_transformers(kind, vocab_size=LARGE, **sizes)
    assert names(wrapped)[::3] == ["model.model.embed_tokens", "model.lm_head"]
    assert names(of_transformers(kind, **sizes)) == ["model.embed_tokens", *LAYERS, "lm_head"]
    assert names(of_transformers(kind, **sizes).model) == ["embed_tokens", *BLOCKS], "has no head"
    assert names(of_transformers(kind, **sizes | {"tie_word_embeddings": True})) == LAYERS


def test_positions_and_a_head_with_a_bias_are_no_ends() -> None:
    assert names(of_transformers("gpt2", n_embd=64)) == ["transformer.h.0", "transformer.h.1"]
    phi = of_transformers("phi", hidden_size=64, tie_word_embeddings=False)
    assert names(phi) == ["model.embed_tokens", *LAYERS], "its output would be a view"


def test_a_head_in_tiles_is_its_tiles() -> None:
    model = decoders.in_blocks(decoders.on_meta(LARGE, hidden_size=64), loss_tiles=2, compile=False)
    assert names(model) == ["head.tiles.0", "head.tiles.1", "embedding", *BLOCKS]


def forward_of_someone_else(self: Any, input_ids: Tensor) -> Tensor:
    """As a fused loss: the head's weight is read outside of the head."""
    hidden = self.model(input_ids)[0]
    return nn.functional.linear(hidden, self.lm_head.weight)


def patched(model: Any) -> nn.Module:
    cls = type(model)
    model.__class__ = type(cls.__name__, (cls,), {"forward": forward_of_someone_else})
    return model  # type: ignore[no-any-return]


class Around(nn.Module):
    """A user's own module: what it does with the model's weights is not known."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()  # type: ignore[operator]


def patched_inside(model: Any) -> nn.Module:
    return type(decoders.of_transformers("llama"))(patched(model))


@pytest.mark.parametrize("change", [patched, patched_inside, Around])
def test_a_model_whose_forward_is_not_that_of_who_vouches_keeps_its_ends_in_the_root(
    change: Callable[[nn.Module], nn.Module],
) -> None:
    found = names(change(of_transformers(hidden_size=64, tie_word_embeddings=False)))
    assert [name.rpartition(".")[0].endswith("layers") for name in found] == [True, True]


def parts(model: nn.Module, most_elems: int) -> list[str]:
    """The units of the first block where none is to be larger than that, of fp32."""
    with pytest.warns(UserWarning, match="zero.unit_bytes") if most_elems < 5000 else pytest.MonkeyPatch.context():
        found = names(model, unit_bytes=4 * most_elems)
    return [name.removeprefix("layers.0.") for name in found if name.startswith("layers.0")]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (8448, ["layers.0"]),
        (8447, ["qkv", "layers.0"]),
        (5000, ["qkv", "up", "layers.0"]),
        (1500, ["qkv", "up", "down", "layers.0"]),
        (1, ["norm1", "qkv", "out", "up", "down", "layers.0"]),
    ],
)
def test_the_largest_modules_become_parts_until_the_rest_is_small_enough(most: int, expected: list[str]) -> None:
    """Of norms of 64 elements, qkv of 3072, out of 1056, up of 2112 and down of 2080. Without the last module the block
    would have no parameters, so that it keeps one."""
    assert parts(small_decoders.build("even"), most) == expected


def test_a_block_that_is_used_at_two_places_has_parts() -> None:
    model = small_decoders.build("even")
    model.layers[2] = model.layers[0]
    assert parts(model, 5000) == ["qkv", "up", "layers.0"]


class Mixed(nn.Module):
    """A block of what is divided, and of what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
        self.attention = nn.MultiheadAttention(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.list = nn.ParameterList([torch.ones(99)])
        self.choosing = Choosing()
        self.path = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.tied, self.own = nn.Linear(8, 8), nn.Linear(8, 8)
        self.path[1].weight = self.tied.weight
        self.uses, self.too = (nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.too[0] = self.uses[0]

    def forward(self, x: Tensor) -> Tensor:
        own: Tensor = self.own(x)
        return own


class Choosing(nn.Module):
    """Data decide which of its elements runs."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        best: Tensor = self.experts[int(self.router(x).mean(0).argmax())](x)
        return best


def test_parts_of_parts_are_found_and_what_may_not_be_called_is_not_divided() -> None:
    assert parts(Model(Mixed()), 1) == ["choosing", "path.0", "own", "uses.0", "layers.0"]
    assert parts(Model(nn.MultiheadAttention(8, 2)), 1) == ["layers.0"]
