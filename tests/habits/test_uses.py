"""What cannot work on a sharded model is told in one line before any number is wrong; the rest works."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from many_cells import STAGES, of_all, of_cells
from models_of_torch import HOST, OPTIONS, Net, build, said_by, sharded_of, whole
from on_ranks import on_ranks
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel
from training_loops import params_of, snapshot, unequal

from dzero import AdamW, OffloadConfig, Sharded, ZeroConfig, shard, take_mesh

ROWS = torch.ones(2, 4)
ALL_ON_HOST = {"param": "host", **HOST}
AT_STAGE_3: list[tuple[int, dict[str, str]]] = [(3, {}), (3, HOST)]
ON_DEVICE: list[tuple[int, dict[str, str]]] = [(stage, {}) for stage in range(4)]
TIERS: list[tuple[int, dict[str, str]]] = [(0, {}), (1, {}), (2, HOST), (3, {}), (3, ALL_ON_HOST)]


def stepped(sharded: Sharded, optim: Any, rows: Tensor) -> None:
    sharded.model(rows).sum().backward()
    optim.step()


class Chosen(nn.Module):
    """Experts of one size, of which rank r runs two: number 2r and the next."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = 2 * dist.get_rank()
        return x + self.experts[first](x) + self.experts[first + 1](x)


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_ranks_that_run_other_modules_of_a_unit_are_told_which(rank: int, ranks: int, stage: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Chosen(), nn.Linear(8, 8))
    zero = ZeroConfig(stage=stage, unused="agree", units=lambda module: isinstance(module, Chosen))
    sharded = shard(model, zero)
    optim = AdamW(sharded)
    before = snapshot(sharded, optim)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    told = said_by(optim.step)
    says = [
        "or other modules of them",
        "zero.unused=union",
        "rank 0: gradients of all parameters but 1.experts.2.weight, 1.experts.2.bias",
        "rank 1: gradients of all parameters but 1.experts.0.weight",
    ]
    unsaid = [f"not said in {told}: {each}" for each in says if each not in told]
    return unsaid + unequal(snapshot(sharded, optim), before)


class Keeps(nn.Module):
    """A unit that takes its input from a dict or list, writes its output into that, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: Any) -> None:
        key = "x" if isinstance(given, dict) else 0
        given[key] = self.linear(given[key])


class Passes(nn.Module):
    """Units that hand on what is in one container."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.units = kind, nn.ModuleList(Keeps() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        given: Any = {"x": x} if self.kind is dict else [x]
        for unit in self.units:
            unit(given)
        return given["x" if self.kind is dict else 0]


@pytest.mark.parametrize(
    ("stage", "kind", "compiled"), [(1, dict, False), (3, list, False), (2, dict, True), (2, list, True)]
)
@on_ranks(1)
def test_a_unit_that_writes_into_its_arguments_and_keeps_them_is_refused(
    rank: int, ranks: int, stage: int, kind: type, compiled: bool
) -> None:
    model = shard(Passes(kind), stage, precision="fp32").model
    for unit in model.units if compiled else ():
        unit.compile(backend="eager")
    with pytest.raises(RuntimeError, match=rf"^unit units\.1 writes into a {kind.__name__} among its arguments"):
        model(torch.ones(2, 8)).square().sum().backward()


@on_ranks(1)
def test_models_groups_and_states_that_do_not_fit_are_refused(rank: int, ranks: int) -> None:
    """A model is cut once, parameters are in one group, and states of torch are of the same rule and order."""
    inner = build("Net")
    fully_shard(inner.blocks[1])
    sharded = sharded_of("Net", 2)
    head = sharded.named_params()["head.weight"]
    optim = AdamW(sharded, [head])
    refusals: list[tuple[str, Callable[[], object]]] = [
        (r"the model is already cut by fully_shard\(\) or shard\(\)", lambda: shard(sharded.model, 3)),
        (r"module blocks\.1 is already cut", lambda: shard(inner, 3)),
        ("some parameters appear in more than one", lambda: optim.add_param_group({"params": [head]})),
    ]
    for says, call in refusals:
        assert re.match(says, said_by(call))
    assert len(optim.param_groups) == 1
    with pytest.raises(AssertionError, match="deepcopy"):
        AveragedModel(sharded.model)

    plain, optim = build("Net"), AdamW(sharded_of("Net", 3))
    for options, params in (({"amsgrad": True}, [*plain.parameters()]), ({}, [*plain.parameters()][::-1])):
        theirs = torch.optim.AdamW(params, **options)
        plain(ROWS).sum().backward()
        theirs.step()
        with pytest.raises(ValueError, match=r"the state dict of torch\.optim has"):
            optim.load_state_dict(theirs.state_dict())
    assert all(float(states["step"]) == 0 for states in optim.state.values())

    plain.blocks[0].down.weight.data = plain.blocks[0].up.weight.data
    with pytest.raises(ValueError, match=r"^blocks\.0\.down\.weight and blocks\.0\.up\.weight lie in the same memory"):
        shard(plain, 3)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_assigned_values_are_copied(rank: int, ranks: int, stage: int) -> list[str]:
    sharded = sharded_of("Net", stage)
    optim = AdamW(sharded)
    state = {name: value * 2 for name, value in sharded.model.state_dict().items()}
    with pytest.warns(UserWarning, match="copies the values"):
        sharded.model.load_state_dict(state, assign=True)
    wrong = unequal(dict(sharded.model.state_dict()), state)
    before = params_of(sharded)
    stepped(sharded, optim, ROWS)
    after = params_of(sharded)
    return wrong + [name for name in before if torch.equal(before[name], after[name])]


@dataclass
class Made:
    """A model, and what trains it."""

    sharded: Sharded
    model: Any
    optim: Any

    def backward(self) -> None:
        self.model(ROWS).sum().backward()

    def step(self) -> None:
        self.backward()
        self.optim.step()

    def keeps_its_states(self, call: Callable[[], object]) -> None:
        """What is given up changes no state, whatever the call raises."""
        before = snapshot(self.sharded, self.optim)
        try:
            call()
        finally:
            self.optim.zero_grad()
            assert unequal(snapshot(self.sharded, self.optim), before) == []


def misused(rank: int, ranks: int, name: str, stage: int, tiers: dict[str, str]) -> str:
    sharded = sharded_of("Net", stage, microbatches=3 if name == "no last microbatch" else 1, offload=tiers)
    return said_by(partial(MISUSES[name][0], Made(sharded, sharded.model, AdamW(sharded))))


def miscount(made: Made, outside: int) -> None:
    """Two microbatches that are not the last, and so many backwards outside of them."""
    for _ in range(2):
        with made.sharded.microbatch(is_last=False):
            made.backward()
    for _ in range(outside):
        made.backward()
    made.keeps_its_states(made.optim.step)


def hooked(made: Made, kind: str) -> None:
    getattr(made.model.head.weight, kind)(lambda _: None)
    made.backward()
    made.keeps_its_states(made.optim.step)


def hooked_before(made: Made, kind: str) -> None:
    """Before its optimizer is there."""
    getattr(made.model.head.weight, kind)(lambda _: None)
    made.optim = None
    AdamW(made.sharded)


def penalised(made: Made) -> None:
    """A penalty on gradients."""
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(made.model(x).square().sum(), x, create_graph=True)


def step_under_a_graph(made: Made) -> None:
    loss = made.model(ROWS).sum()
    made.step()
    made.keeps_its_states(loss.backward)


def edit_under_a_graph(made: Made) -> None:
    loss = made.model(ROWS).sum()
    with torch.no_grad():
        made.sharded.named_params()["blocks.1.up.weight"].mul_(0.5)
    made.keeps_its_states(loss.backward)


def set_later(made: Made) -> None:
    made.step()
    made.model.head.weight = nn.Parameter(made.model.head.weight.detach() * 0.5)
    made.model(ROWS)


def parametrized(made: Made) -> None:
    register_parametrization(made.model.head, "weight", nn.Tanh())
    said_by(made.backward)
    made.backward()  # also if the first error was caught


def parametrized_later(made: Made) -> None:
    made.backward()
    weight_norm(made.model.head)
    made.step()


def data_set(made: Made) -> None:
    made.step()
    made.model.head.weight.data = made.model.head.weight.data * 0.5
    made.model(ROWS)


def filled_from_a_vector(made: Made) -> None:
    values = torch.cat([param.full_tensor().flatten() for param in made.model.parameters()])
    torch.nn.utils.vector_to_parameters(values, made.model.parameters())
    made.model.state_dict()


def data_of_a_gradient(made: Made) -> None:
    made.backward()
    made.model.head.weight.grad.data = made.model.head.weight.grad.detach() * 2
    made.optim.step()


def a_gradient_kept(made: Made) -> None:
    made.backward()
    kept = made.model.head.weight.grad
    made.optim.step()
    assert float(whole(kept.sum())) != 0.0


def an_array(made: Made) -> None:
    made.backward()
    grad = made.model.head.weight.grad
    grad.to_local().numpy()[:] = 0.0
    assert float(whole(grad.abs().sum())) == 0.0


def a_module_replaced(made: Made) -> None:
    made.model.head, made.optim = nn.Linear(8, 2), None
    AdamW(made.sharded)


def a_module_added(made: Made) -> None:
    made.backward()
    made.model.added = nn.Linear(2, 2)
    said_by(made.optim.step)
    made.optim.step()


def replaced(name: str) -> str:
    return rf"{re.escape(name)} was replaced by another tensor"


SHOWN = r"optim\.state shows the states that updates use"
CHANGED = r"its parameters were changed after the forward"
MISUSES: dict[str, tuple[Callable[[Made], object], str, list[tuple[int, dict[str, str]]]]] = {
    "a module alone": (
        lambda made: made.model.head(torch.ones(2, 8)),
        r"head is called outside of the model's forward.*make it a unit of its own",
        ON_DEVICE,
    ),
    "no last microbatch": (
        lambda made: miscount(made, 0),
        r"step\(\) after 2 microbatches of which none was the last.*under microbatch\(is_last=True\), or outside",
        ON_DEVICE,
    ),
    "more microbatches than told": (
        lambda made: miscount(made, 1),
        r"3 microbatches in this step, but the model was laid out for one: pass microbatches=3",
        ON_DEVICE,
    ),
    "a step under a graph": (step_under_a_graph, f"unit root: {CHANGED}", ON_DEVICE),
    "an edit under a graph": (edit_under_a_graph, rf"unit blocks\.1: {CHANGED}", ON_DEVICE),
    "a weight set": (set_later, replaced("head.weight"), ON_DEVICE),
    "a call with others": (
        lambda made: (made.step(), torch.func.functional_call(made.model, {"embed.weight": torch.ones(8, 4)}, (ROWS,))),
        replaced("embed.weight"),
        ON_DEVICE,
    ),
    "a weight tied": (
        lambda made: (setattr(made.model.blocks[1].up, "weight", made.model.blocks[0].up.weight), made.backward()),
        replaced("blocks.1.up.weight"),
        ON_DEVICE,
    ),
    "a parametrization": (parametrized, replaced("head.weight"), ON_DEVICE),
    "a later parametrization": (parametrized_later, replaced("head.weight"), AT_STAGE_3),
    "data set": (data_set, r".*\.data was set to another tensor", TIERS),
    "data filled from a vector": (filled_from_a_vector, r".*\.data was set to another tensor", TIERS),
    "states cleared": (lambda made: made.optim.state.clear(), SHOWN, AT_STAGE_3),
    "states replaced": (lambda made: setattr(made.optim, "state", {}), SHOWN, AT_STAGE_3),
    "a state replaced": (
        lambda made: made.optim.state[made.model.head.weight].update(exp_avg=torch.zeros(2, 8)),
        SHOWN,
        AT_STAGE_3,
    ),
    "data of a gradient": (data_of_a_gradient, r"head\.weight\.grad\.data was set to another tensor", AT_STAGE_3),
    "rows of a gradient": (
        lambda made: (made.backward(), made.model.head.weight.grad[1:].zero_()),
        r".*would be lost",
        AT_STAGE_3,
    ),
    "a gradient kept": (a_gradient_kept, r".*its gradient was used up by step\(\)", [(3, HOST)]),
    "an array": (an_array, r".*read-only", [(3, HOST)]),
    "a module replaced": (
        a_module_replaced,
        r"head\.weight is not one of the parameters that were sharded",
        AT_STAGE_3,
    ),
    "a module added": (a_module_added, r"added\.weight is not one of the parameters that were sharded", AT_STAGE_3),
    "an out of another size": (
        lambda made: torch.eye(2, 8, out=made.model.head.weight.detach().to_local()),
        r".*makes a tensor of shape \(2, 8\)",
        AT_STAGE_3,
    ),
    "a gradient penalty": (penalised, "unit root: backward with create_graph=True", ON_DEVICE[1:]),
    **{
        f"{kind}, {call.__name__}": (
            partial(call, kind=kind),
            r"head\.weight has a hook of its own.*between backward\(\) and step\(\)",
            ON_DEVICE[2:3],
        )
        for kind, call in product(("register_hook", "register_post_accumulate_grad_hook"), (hooked, hooked_before))
    },
}
"""What is done to a sharded model that would be wrong or ignored, what is said of it, and where: stage and tiers."""


REFUSED = "tests/habits/test_uses.py::test_what_would_be_wrong_or_ignored_is_refused"


def places() -> Iterator[Any]:
    """Each misuse at the last stage of its list, which has most to do, and in the full suite at the others."""
    for name, (_, _, cells) in MISUSES.items():
        yield pytest.param(name, cells[-1:], id=name)
        if len(cells) > 1:
            yield pytest.param(name, cells[:-1], id=f"{name}, other stages", marks=pytest.mark.full(REFUSED))


@pytest.mark.parametrize(("name", "cells"), places())
def test_what_would_be_wrong_or_ignored_is_refused(
    pool: Pool, name: str, cells: list[tuple[int, dict[str, str]]]
) -> None:
    for told in of_all(pool, 2, misused, [(name, *cell) for cell in cells]):
        assert re.match(MISUSES[name][1], told, re.DOTALL), told


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_what_is_next_to_that_works(rank: int, ranks: int, stage: int) -> list[str]:
    """On the device a gradient may be kept, and its array written; a gathered head computes, and shards show after."""
    sharded = sharded_of("Net", stage)
    made, hidden = Made(sharded, sharded.model, AdamW(sharded)), list[Tensor]()
    a_gradient_kept(made)
    an_array(made)
    hook = made.model.head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    out = made.model(ROWS)
    hook.remove()
    wrong = [] if stage in (0, 3) or torch.equal(made.model.head(hidden[0]), out) else ["the head"]
    return wrong + [name for name, param in made.model.named_parameters() if not isinstance(param, DTensor)]


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "to": lambda model: model.to(torch.bfloat16),
    "to a tensor": lambda model: model.to(torch.ones(1, dtype=torch.float16)),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "type": lambda model: model.type(torch.float64),
    "a unit": lambda model: model.blocks[0].half(),
    "a layer": lambda model: model.head.to(torch.bfloat16),
    "a layer of a unit": lambda model: model.blocks[1].up.double(),
}
KEPT: dict[str, Callable[[Any], Any]] = {
    "float": lambda model: model.float(),
    "to": lambda model: model.to("cpu", torch.float32),
    "cpu": lambda model: model.cpu(),
    "a layer": lambda model: model.head.to(torch.float32),
    "a module without parameters": lambda model: model.norm.half(),
}


def converted(rank: int, ranks: int, stage: int, offload: dict[str, str]) -> list[str]:
    """What is said of conversions to another dtype; those to the same dtype and device change nothing."""
    torch.manual_seed(0)
    model: Any = build("Net")
    model.norm = nn.BatchNorm1d(2, affine=False)  # has buffers only, and comes last
    model.blocks.register_buffer("table", torch.ones(2))
    sharded = shard(model, stage, precision="fp32", offload=OffloadConfig(**offload))
    optim, told = AdamW(sharded), list[str]()
    for when in ("before a step", "after it"):
        before = snapshot(sharded, optim)
        told += [said_by(partial(convert, model)) for convert in CONVERSIONS.values()]
        for convert in KEPT.values():
            convert(model)
        assert unequal(snapshot(sharded, optim), before) == [], when
        assert model.blocks.table.dtype == torch.float32
        stepped(sharded, optim, ROWS)
    assert model.norm.running_mean.dtype == torch.float16
    return told


def test_a_sharded_model_keeps_its_dtype(pool: Pool) -> None:
    """With states off the device, the optimizer would end in a KeyError; else training would go on without masters."""
    for said in of_all(pool, 2, converted, [(0, {}), (2, HOST), (3, ALL_ON_HOST)]):
        assert all("whose parameters are torch.float32 and belong to its optimizer as well" in each for each in said)
        assert said[0].startswith("Net: to(torch.bfloat16) of a sharded model")
        assert "precision.param=fp32, bf16 or fp16" in said[0]


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_model_shows_its_shards_outside_of_forward_and_backward(rank: int, ranks: int, stage: int) -> list[str]:
    """After which uses of a model its parameters are not shards."""
    sharded = sharded_of("Net", stage, microbatches=2)
    model, wrong = sharded.model, list[str]()

    def look(moment: str) -> None:
        if not all(isinstance(param, DTensor) for param in model.parameters()):
            wrong.append(moment)

    model(ROWS)
    look("a forward")
    model.blocks[0](torch.ones(2, 8))
    look("a unit's forward")
    with sharded.microbatch(is_last=False):
        loss = model(ROWS).sum()
        look("a forward of a microbatch")
        loss.backward()
        look("its backward")
    hook = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with suppress(ZeroDivisionError):
        model(ROWS)
    look("a forward that raised")
    hook.remove()
    return wrong


class Widening(Net):
    """fp32 between its blocks."""

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.embed(x).float()
        for block in self.blocks:
            x = block(x).float() + x
        return self.head(x.bfloat16())


def widened(rank: int, ranks: int, stage: int) -> tuple[Tensor, list[torch.dtype]]:
    torch.manual_seed(0)
    sharded = shard(Widening(), stage)
    optim, seen = AdamW(sharded), list[torch.dtype]()
    sharded.model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    stepped(sharded, optim, torch.full((2, 4), float(rank)))
    return whole(sharded.named_params()["embed.weight"].detach()), seen


def test_units_take_the_dtype_that_they_work_in(pool: Pool) -> None:
    found = of_all(pool, 2, widened, STAGES)
    assert all(seen == [torch.bfloat16] and torch.equal(weight, found[0][0]) for weight, seen in found)


def on_a_mesh_of_its_own(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    flat = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "dp_replicate"))
    with pytest.raises(ValueError, match=r"name each of them once, as one of \('replicate', 'shard'\)"):
        take_mesh(square, {"shard": "dp_shard"})
    with pytest.raises(ValueError, match=r"or say which they are: dzero\.take_mesh\(mesh, \{'shard': 'dp'\}\)"):
        shard(build("Net"), 2, mesh=flat)
    found = []
    for stage, mesh, axes in (
        (0, flat, {"replicate": "dp"}),
        (3, flat, {"shard": "dp"}),
        (2, square, {"replicate": "dp_replicate", "shard": "dp_shard"}),
    ):
        sharded = shard(build("Net"), stage, precision="fp32", mesh=take_mesh(mesh, axes))
        stepped(sharded, AdamW(sharded), torch.full((2, 4), float(rank)))
        found.append(params_of(sharded))
    return found


def test_a_mesh_of_another_library_is_taken_with_its_axes_named(pool: Pool) -> None:
    zero, three, hybrid = pool.run(on_a_mesh_of_its_own, 2)[0]
    assert unequal(three, zero) == []
    assert all(torch.allclose(hybrid[name], value, atol=1e-6) for name, value in zero.items())


def edited_apart(rank: int, ranks: int, stage: int, how: str) -> str:
    """What `step` says where gradients of the copies of a shard were edited differently, or alike."""
    sharded = sharded_of("Net", stage, replicate=2)
    model, optim = sharded.model, AdamW(sharded)
    model(ROWS).sum().backward()
    weight: Any = model.head.weight
    if how == "loss":
        (weight.to_local().square().sum() * (1 + rank)).backward()
    elif how == "noise":
        weight.grad.to_local().add_(0.1 * rank)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return said_by(optim.step)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (4, 1), (4, 3)])
def test_copies_of_a_shard_that_were_edited_apart_are_refused(pool: Pool, ranks: int, stage: int) -> None:
    """Otherwise the copies would drift apart, unseen, since all ranks agree on one norm."""
    cells = [(stage, how) for how in ("loss", "noise", "alike")]
    for (_, how), of_ranks in zip(cells, of_cells(pool, ranks, edited_apart, cells), strict=True):
        for told in of_ranks:
            refused = told.startswith("ranks that have replicas of a shard ended with different gradients")
            assert refused is (how != "alike"), told
            assert how == "alike" or stage > 0 or "of head.weight" in told


def largest(grad: Any) -> float:
    return float(whole(grad).max())


NUMBERS: dict[str, Any] = {
    "norm": lambda grad: grad.data.norm(2).item(),
    "largest": lambda grad: float(grad.abs().max()),
    "finite": lambda grad: bool(grad.isfinite().all()),
    "small": lambda grad: bool((grad < 0.5 * largest(grad)).all()),
    "large": lambda grad: bool((grad > 0.99 * largest(grad)).any()),
}


def numbers_of(rank: int, ranks: int, stage: int, host: bool) -> list[tuple[Any, Any]]:
    """Each number of a gradient as torch users ask for it, and that of the whole."""
    sharded = sharded_of("Net", stage, offload=HOST if host else None)
    AdamW(sharded)
    sharded.model(ROWS).sum().backward()
    grad: Any = sharded.model.get_parameter("head.weight").grad
    found = []
    for number in NUMBERS.values():
        said: Any = []
        error = said_by(lambda: said.append(number(grad)))  # noqa: B023
        found.append((error or said[0], number(whole(grad))))
    return found


def test_a_number_of_one_ranks_part_of_a_gradient_is_refused(pool: Pool) -> None:
    """Logs would show what differs between ranks; what loops branch on is the whole's."""
    for ranks, cells in ((2, [(0, False), (2, True), (3, False)]), (1, [(3, True)])):
        for (stage, _), of_ranks in zip(cells, of_cells(pool, ranks, numbers_of, cells), strict=True):
            for said, true in chain(*of_ranks):
                if stage > 0 and ranks > 1 and not isinstance(true, bool):
                    assert "call .full_tensor() of it on all ranks before" in said
                else:
                    assert said == pytest.approx(true)


def followed(rank: int, ranks: int, stage: int, host: bool) -> list[float]:
    """The loss of a model without an optimizer, whose parameters follow those of one that is trained."""
    trained, follower = (sharded_of("Net", stage, offload=HOST if host else None) for _ in range(2))
    return follow(trained.model, follower.model, AdamW(trained, **OPTIONS))


def follow(model: nn.Module, follower: nn.Module, optim: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            target = follower(x)
        losses.append(float(target.square().sum()))
        (model(x) - target.detach() - 1.0).square().mean().backward()
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            for param, trained in zip(follower.parameters(), model.parameters(), strict=True):
                param.lerp_(trained, 0.9)
    return losses


def test_a_model_without_optimizer_computes_with_what_was_written_into_it(pool: Pool) -> None:
    """A target network, a teacher or a moving average, which no optimizer of ours watches."""
    model, follower = build("Net"), build("Net")
    expected = follow(model, follower, torch.optim.AdamW(model.parameters(), **OPTIONS))
    for losses in of_all(pool, 2, followed, [(0, False), (3, True)]):
        assert losses == pytest.approx(expected, rel=1e-5)
    assert len({round(loss, 3) for loss in expected}) == 3


def reached_last(rank: int, ranks: int, stage: int, orders: list[tuple[int, ...]]) -> Tensor:
    """The gradient of a block that only the last microbatch reaches, in bf16."""
    sharded = sharded_of("Net", stage, len(orders), precision={"param": "bf16"})
    for index, sharded.model.order in enumerate(orders):
        with sharded.microbatch(is_last=index == len(orders) - 1):
            sharded.model(ROWS.bfloat16()).float().square().mean().backward()
    return whole(sharded.model.blocks[1].up.weight.grad)


def test_the_last_microbatch_may_be_the_first_to_reach_a_unit(pool: Pool) -> None:
    after_another, alone = (
        of_all(pool, 2, reached_last, [(stage, orders) for stage in (0, 1, 2)])
        for orders in ([(0, 2), (0, 1, 2)], [(0, 1, 2)])
    )
    assert all(grad.abs().max() > 0 for grad in alone)
    assert all(torch.equal(one, other) for one, other in zip(after_another, alone, strict=True))


class Partly(nn.Linear):
    """A layer with a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.other = nn.Parameter(torch.ones(4))


def gradient_of_three(rank: int, ranks: int, stage: int) -> list[float]:
    """Of the last bias in bf16, after three microbatches that each add 1."""
    sharded = shard(nn.Sequential(Partly(), Partly()), stage, microbatches=3)
    for index in range(3):
        with sharded.microbatch(is_last=index == 2):
            sharded.model(torch.ones(1, 4)).float().sum().backward()
    return whole(sharded.model.get_parameter("1.bias").grad).tolist()


def test_every_microbatch_counts_where_a_parameter_of_the_unit_is_never_used(pool: Pool) -> None:
    assert of_all(pool, 2, gradient_of_three, STAGES) == [[3.0] * 4] * 8


class Words(nn.Module):
    """A model whose embedding has sparse gradients. `how`: what else there is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        made = nn.EmbeddingBag if how == "bag" else nn.Embedding
        self.embed, self.head = made(4, 8, sparse=True), nn.Linear(8, 4, bias=False)
        if how == "tied":
            self.head.weight = self.embed.weight
        if how == "frozen":
            self.embed.requires_grad_(False)
        self.embed.sparse = how != "set to dense"

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embed(words))


def sparse(rank: int, ranks: int, stage: int, how: str) -> float | str:
    """How far the head's gradient is from plain torch's, or what `shard` says."""
    torch.manual_seed(0)
    model, words = Words(how), torch.tensor([[1, 2], [2, 3]])
    plain = copy.deepcopy(model)
    plain(words).square().sum().backward()
    if told := said_by(lambda: shard(model, stage, precision="fp32")):
        return told
    model(words).square().sum().backward()
    return float((whole(model.head.weight.grad) - plain.head.weight.grad).abs().max())


def test_an_embedding_with_sparse_gradients_is_refused_but_where_its_gradient_is_dense_or_none(pool: Pool) -> None:
    """FSDP2 has no reduction of sparse gradients at any stage."""
    for told in of_all(pool, 2, sparse, product((0, 3), ("alone", "bag"))):
        assert str(told).startswith("embed is made with sparse=True")
        assert "take sparse=False" in str(told)
    for gap in of_all(pool, 2, sparse, product((0, 3), ("tied", "frozen", "set to dense"))):
        assert gap < 1e-6
