"""What cannot work on a sharded model is told in one line before any number is wrong; the rest works."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from many_cells import STAGES, of_all, of_cells
from models_of_torch import HOST, LOOPS, OPTIONS, Net, Training, batches_of, build, sharded_of, whole
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel
from training_loops import params_of, snapshot, unequal

from dzero import AdamW, OffloadConfig, PrecisionConfig, Sharded, ZeroConfig, make_mesh, shard, take_mesh

ALL_ON_HOST = {"param": "host", **HOST}
AT_STAGE_3: list[tuple[int, dict[str, str]]] = [(3, {}), (3, HOST)]
ON_DEVICE: list[tuple[int, dict[str, str]]] = [(stage, {}) for stage in range(4)]
TIERS: list[tuple[int, dict[str, str]]] = [(0, {}), (1, {}), (2, HOST), (3, {}), (3, ALL_ON_HOST)]


def said_by(call: Callable[[], object]) -> str:
    """What an error says; nothing where there is none."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def stepped(sharded: Sharded, optim: Any, *rows: Tensor) -> None:
    sharded.model(*(rows or [torch.ones(2, 4)])).sum().backward()
    optim.step()


class Chosen(nn.Module):
    """Experts of one size, of which rank r runs two: number 2r and the next."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = 2 * dist.get_rank()
        return x + self.experts[first](x) + self.experts[first + 1](x)


def model_of(stage: int) -> Sharded:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Chosen(), nn.Linear(8, 8))
    mesh = make_mesh("cpu", replicate=dist.get_world_size() if stage == 0 else 1)
    zero = ZeroConfig(stage=stage, unused="agree", units=lambda module: isinstance(module, Chosen))
    return shard(model, zero, mesh=mesh)


def step_of(sharded: Sharded, optim: AdamW) -> str:
    """What a step that must change nothing is told; the states are those before."""
    before = snapshot(sharded, optim)
    sharded.model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    told = said_by(optim.step)
    assert unequal(snapshot(sharded, optim), before) == []
    return told


def other_experts(rank: int, ranks: int, stage: int) -> str:
    sharded = model_of(stage)
    return step_of(sharded, AdamW(sharded))


def test_ranks_that_run_other_modules_of_a_unit_are_told_which(pool: Pool) -> None:
    for told in of_all(pool, 2, other_experts, STAGES):
        assert "or other modules of them" in told
        assert "zero.unused=union" in told
        assert re.search(r"rank 0: gradients of all parameters but 1\.experts\.2\.weight, 1\.experts\.2\.bias", told)
        assert re.search(r"rank 1: gradients of all parameters but 1\.experts\.0\.weight", told)


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


def kept(rank: int, ranks: int, stage: int, kind: type, compiled: bool) -> str:
    model = shard(Passes(kind), stage, precision="fp32").model
    for unit in model.units if compiled else ():
        unit.compile(backend="eager")
    return said_by(lambda: model(torch.ones(2, 8)).square().sum().backward())


def test_a_unit_that_writes_into_its_arguments_and_keeps_them_is_refused(pool: Pool) -> None:
    cells = [(1, dict, False), (3, list, False), (2, dict, True), (2, list, True)]
    for (_, kind, _), (told,) in zip(cells, of_cells(pool, 1, kept, cells), strict=True):
        assert told.startswith(f"unit units.1 writes into a {kind.__name__} among its arguments")


def hooked(rank: int, ranks: int, kind: str, first: bool) -> str:
    """What the optimizer is told of a hook that was there before it, or its step of one that came later."""
    sharded = model_of(2)
    hook = getattr(sharded.named_params()["0.weight"], kind)
    if first:
        hook(lambda _: None)
        return said_by(lambda: AdamW(sharded))
    optim = AdamW(sharded)
    hook(lambda _: None)
    return step_of(sharded, optim)


def test_a_hook_that_would_see_gradients_before_they_are_whole_is_refused(pool: Pool) -> None:
    cells = product(("register_hook", "register_post_accumulate_grad_hook"), (True, False))
    for (told,) in of_cells(pool, 1, hooked, cells):
        assert "0.weight has a hook of its own" in told
        assert "between backward() and step()" in told


def refused_at_once(rank: int, ranks: int) -> None:
    """A model is cut once, parameters are in one group, and states of torch are of the same rule and order."""
    sharded, inner = model_of(3), build("Net")
    fully_shard(inner.blocks[1])
    with pytest.raises(ValueError, match=r"^the model is already cut by fully_shard\(\) or shard\(\)"):
        shard(sharded.model, ZeroConfig(stage=3))
    with pytest.raises(ValueError, match=r"^module blocks\.1 is already cut"):
        shard(inner, ZeroConfig(stage=3))
    with pytest.raises(AssertionError, match="deepcopy"):
        AveragedModel(sharded.model)
    AdamW(sharded, [sharded.named_params()["0.weight"]])

    sharded = sharded_of("PartlyFrozen", 2)
    named = sharded.named_params()
    optim = AdamW(sharded, [named["head.weight"]])
    with pytest.raises(RuntimeError, match=r"head\.weight: its gradients already go to another optimizer"):
        AdamW(sharded, [named["head.weight"], named["head.bias"]])
    with pytest.raises(ValueError, match=r"embed\.weight was frozen when the model was sharded"):
        optim.add_param_group({"params": [named["embed.weight"]]})
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optim.add_param_group({"params": [named["head.weight"]]})
    assert len(optim.param_groups) == 1

    plain, optim = build("Net"), AdamW(sharded_of("Net", 3))
    for options, params in (({"amsgrad": True}, [*plain.parameters()]), ({}, [*plain.parameters()][::-1])):
        theirs = torch.optim.AdamW(params, **options)
        plain(torch.ones(2, 4)).sum().backward()
        theirs.step()
        with pytest.raises(ValueError, match=r"the state dict of torch\.optim has"):
            optim.load_state_dict(theirs.state_dict())
    assert all(float(states["step"]) == 0 for states in optim.state.values())

    plain.blocks[0].down.weight.data = plain.blocks[0].up.weight.data
    with pytest.raises(ValueError, match=r"^blocks\.0\.down\.weight and blocks\.0\.up\.weight lie in the same memory"):
        shard(plain, ZeroConfig(stage=3))


def test_models_groups_and_states_that_do_not_fit_are_refused(pool: Pool) -> None:
    pool.run(refused_at_once, 1)


def assigned(rank: int, ranks: int, stage: int) -> list[str]:
    sharded = sharded_of("Net", stage)
    optim = AdamW(sharded)
    state = {name: value * 2 for name, value in sharded.model.state_dict().items()}
    with pytest.warns(UserWarning, match="copies the values"):
        sharded.model.load_state_dict(state, assign=True)
    wrong = unequal(dict(sharded.model.state_dict()), state)
    before = params_of(sharded)
    stepped(sharded, optim)
    after = params_of(sharded)
    return wrong + [name for name in before if torch.equal(before[name], after[name])]


def test_assigned_values_are_copied(pool: Pool) -> None:
    assert of_cells(pool, 2, assigned, [(0,), (3,)]) == [[[], []]] * 2


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


ROWS = torch.ones(2, 4)


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
}
"""What is done to a sharded model that would be wrong or ignored, what is said of it, and where: stage and tiers."""


@pytest.mark.parametrize("name", MISUSES)
def test_what_would_be_wrong_or_ignored_is_refused(pool: Pool, name: str) -> None:
    """In the default suite at the last stage of its list, which has most to do."""
    _, says, cells = MISUSES[name]
    check_refused(pool, name, cells[-1:], says)


@pytest.mark.full("tests/habits/test_uses.py::test_what_would_be_wrong_or_ignored_is_refused")
@pytest.mark.parametrize("name", MISUSES)
def test_what_would_be_wrong_or_ignored_is_refused_at_all_stages(pool: Pool, name: str) -> None:
    _, says, cells = MISUSES[name]
    check_refused(pool, name, cells, says)


def check_refused(pool: Pool, name: str, cells: list[tuple[int, dict[str, str]]], says: str) -> None:
    for told in of_all(pool, 2, misused, [(name, *cell) for cell in cells]):
        assert re.match(says, told, re.DOTALL), told


def right(rank: int, ranks: int, stage: int) -> list[str]:
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


def test_what_is_next_to_that_works(pool: Pool) -> None:
    assert of_all(pool, 2, right, [(1,), (2,), (3,)]) == [[]] * 6


def penalised(rank: int, ranks: int, stage: int) -> Tensor | str:
    """The head's gradient by a penalty on gradients, or what is told of it."""
    sharded = sharded_of("Net", stage)
    x, grads = torch.ones(2, 4, requires_grad=True), list[Tensor]()
    out = sharded.model(x).square().sum()
    if told := said_by(lambda: grads.extend(torch.autograd.grad(out, x, create_graph=True))):
        return told
    grads[0].square().sum().backward()
    return whole(sharded.named_params()["head.weight"].grad)


def test_a_gradient_penalty_works_where_nothing_is_gathered_and_is_refused_elsewhere(pool: Pool) -> None:
    plain, x = build("Net"), torch.ones(2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(plain(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    for of_one in of_cells(pool, 1, penalised, STAGES[1:]):
        torch.testing.assert_close(of_one[0], plain.head.weight.grad)
    of_two, *others = of_cells(pool, 2, penalised, STAGES)
    torch.testing.assert_close(of_two[0], plain.head.weight.grad)
    assert all(told.startswith("unit root: backward with create_graph=True") for told in chain(*others))


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
    sharded = shard(model, ZeroConfig(stage=stage), precision="fp32", offload=OffloadConfig(**offload))
    optim, told = AdamW(sharded), []
    for when in ("before a step", "after it"):
        before = snapshot(sharded, optim)
        told += [said_by(partial(convert, model)) for convert in CONVERSIONS.values()]
        for convert in KEPT.values():
            convert(model)
        assert unequal(snapshot(sharded, optim), before) == [], when
        assert model.blocks.table.dtype == torch.float32
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
    assert model.norm.running_mean.dtype == torch.float16
    return told


def test_a_sharded_model_keeps_its_dtype(pool: Pool) -> None:
    """With states off the device, the optimizer would end in a KeyError; else training would go on without masters."""
    for said in of_all(pool, 2, converted, [(0, {}), (2, HOST), (3, ALL_ON_HOST)]):
        assert all("whose parameters are torch.float32 and belong to its optimizer as well" in each for each in said)
        assert said[0].startswith("Net: to(torch.bfloat16) of a sharded model")
        assert "precision.param=fp32, bf16 or fp16" in said[0]


def shown_after(rank: int, ranks: int, stage: int) -> list[str]:
    """After which uses of a model its parameters are not shards."""
    sharded = sharded_of("Net", stage, microbatches=2)
    model, x = sharded.model, torch.ones(2, 4)
    wrong: list[str] = []

    def look(moment: str) -> None:
        if not all(isinstance(param, DTensor) for param in model.parameters()):
            wrong.append(moment)

    model(x)
    look("a forward")
    model.blocks[0](torch.ones(2, 8))
    look("a unit's forward")
    with sharded.microbatch(is_last=False):
        loss = model(x).sum()
        look("a forward of a microbatch")
        loss.backward()
        look("its backward")
    hook = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with suppress(ZeroDivisionError):
        model(x)
    look("a forward that raised")
    hook.remove()
    return wrong


def test_a_model_shows_its_shards_outside_of_forward_and_backward(pool: Pool) -> None:
    assert of_cells(pool, 2, shown_after, STAGES) == [[[], []]] * 4


class Widening(Net):
    """fp32 between its blocks."""

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.embed(x).float()
        for block in self.blocks:
            x = block(x).float() + x
        return self.head(x.bfloat16())


def widened(rank: int, ranks: int, stage: int) -> tuple[Tensor, list[torch.dtype]]:
    torch.manual_seed(0)
    sharded = shard(Widening(), ZeroConfig(stage=stage), mesh=make_mesh("cpu", replicate=ranks if stage == 0 else 1))
    optim, seen = AdamW(sharded), list[torch.dtype]()
    sharded.model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    stepped(sharded, optim, torch.full((2, 4), float(rank)))
    return whole(sharded.named_params()["embed.weight"].detach()), seen


def test_units_take_the_dtype_that_they_work_in(pool: Pool) -> None:
    found = of_all(pool, 2, widened, STAGES)
    assert all(seen == [torch.bfloat16] and torch.equal(weight, found[0][0]) for weight, seen in found)


def on_a_mesh_of_its_own(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    found = []
    flat = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "dp_replicate"))
    with pytest.raises(ValueError, match=r"name each of them once, as one of \('replicate', 'shard'\)"):
        take_mesh(square, {"shard": "dp_shard"})
    with pytest.raises(ValueError, match=r"or say which they are: dzero\.take_mesh\(mesh, \{'shard': 'dp'\}\)"):
        shard(build("Net"), ZeroConfig(stage=2), mesh=flat)
    for stage, mesh, axes in (
        (0, flat, {"replicate": "dp"}),
        (3, flat, {"shard": "dp"}),
        (2, square, {"replicate": "dp_replicate", "shard": "dp_shard"}),
    ):
        sharded = shard(build("Net"), stage, precision="fp32", mesh=take_mesh(mesh, axes))
        optim = AdamW(sharded)
        stepped(sharded, optim, torch.full((2, 4), float(rank)))
        found.append(params_of(sharded))
    return found


def test_a_mesh_of_another_library_is_taken_with_its_axes_named(pool: Pool) -> None:
    zero, three, hybrid = pool.run(on_a_mesh_of_its_own, 2)[0]
    assert unequal(three, zero) == []
    assert all(torch.allclose(hybrid[name], value, atol=1e-6) for name, value in zero.items())


def assigned_parts(rank: int, ranks: int) -> list[str]:
    """Names of parameters that end otherwise where copies share states out, after `.grad` was assigned twice."""
    ends = []
    for over in (["shard"], ["replicate", "shard"]):
        sharded = shard(
            build("Net"),
            ZeroConfig(stage=2, optimizer_shard_axes=over),
            precision=PrecisionConfig(param="fp32"),
            mesh=make_mesh("cpu", replicate=2),
        )
        optim = AdamW(sharded)
        for of_parameter in (False, True):
            sharded.model(torch.full((2, 4), float(rank))).sum().backward()
            for param in sharded.model.parameters():
                param.grad = param.detach() * 0.1 if of_parameter else param.grad * 0.5
            optim.step()
        optim.synchronize()
        ends.append(params_of(sharded))
    return unequal(*ends)


@pytest.mark.full("tests/habits/test_models_and_loops.py::test_a_loop_gives_what_torch_gives")
def test_gradients_are_assigned_where_copies_share_states_out(pool: Pool) -> None:
    assert pool.run(assigned_parts, 4) == [[]] * 4


def continued(rank: int, ranks: int, stage: int, moments: str) -> float:
    """The largest difference from torch, after it handed a model and its optimizer's state dict on."""
    plain = build("Net")
    theirs = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    training = Training(plain, theirs)
    for step in range(3):
        LOOPS["plain"](training, batches_of(step, ranks, 1, together=True))
    sharded = shard(
        copy.deepcopy(plain),
        ZeroConfig(stage=stage),
        precision=PrecisionConfig(param="fp32", moments=moments),
        mesh=make_mesh("cpu", replicate=ranks if stage == 0 else 1),
    )
    ours = AdamW(sharded)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["betas"] == OPTIONS["betas"]
    for step in range(3, 5):
        LOOPS["plain"](training, batches_of(step, ranks, 1, together=True))
        LOOPS["plain"](Training(sharded.model, ours, sharded), batches_of(step, ranks, 1, own=rank))
    expected = dict(plain.named_parameters())
    return max(float((whole(p) - expected[name]).detach().abs().max()) for name, p in sharded.named_params().items())


def test_states_of_torchs_adamw_are_taken_in(pool: Pool) -> None:
    """Two steps of 1e-3 with moments that are rounded to 8 bits of significand, or to codes 1/64 apart, are closer."""
    check_taken_in(pool, {(3, "fp32"): 1e-6})


@pytest.mark.full("tests/habits/test_uses.py::test_states_of_torchs_adamw_are_taken_in")
def test_states_of_torchs_adamw_are_taken_in_at_all_stages(pool: Pool) -> None:
    limits = {"fp32": 1e-6, "bf16": 1e-4, "int8": 1e-3}
    check_taken_in(pool, {(stage, kind): limit for stage in (0, 1, 2, 3) for kind, limit in limits.items()})


def check_taken_in(pool: Pool, limits: dict[tuple[int, str], float]) -> None:
    for limit, of_ranks in zip(limits.values(), of_cells(pool, 2, continued, [*limits]), strict=True):
        assert max(of_ranks) <= limit


def begun_anew(rank: int, ranks: int) -> list[tuple[float, float]]:
    """By parameter: its count of steps and its largest moment, after states of one without updates were loaded."""
    plain, sharded = build("Scalars"), sharded_of("Scalars", 3)
    theirs, ours = torch.optim.AdamW(plain.parameters()), AdamW(sharded)
    for optim, model in ((theirs, plain), (ours, sharded.model)):
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
    saved = theirs.state_dict()
    names = [name for name, _ in plain.named_parameters()]
    for name in ("logit_scale", "embed.weight"):
        del saved["state"][names.index(name)]
    ours.load_state_dict(saved)
    found = []
    for name in ("logit_scale", "embed.weight", "head.weight"):
        states = ours.state[sharded.named_params()[name]]
        found.append((float(states["step"]), float(whole(states["exp_avg"]).abs().max())))
    return found


def test_parameters_without_states_in_torchs_begin_anew(pool: Pool) -> None:
    for scale, embed, head in pool.run(begun_anew, 2):
        assert scale == embed == (0.0, 0.0)
        assert head[0] == 1.0
        assert head[1] > 0.0


def edited_apart(rank: int, ranks: int, stage: int, replicate: int, how: str) -> str:
    """What `step` says where gradients of the copies of a shard were edited differently, or alike."""
    mesh = make_mesh("cpu", replicate=replicate)
    sharded = shard(build("Net"), ZeroConfig(stage=stage), precision=PrecisionConfig(param="fp32"), mesh=mesh)
    model, optim = sharded.model, AdamW(sharded)
    model(torch.ones(2, 4)).sum().backward()
    weight: Any = model.head.weight
    if how == "loss":
        (weight.to_local().square().sum() * (1 + rank)).backward()
    elif how == "noise":
        weight.grad.to_local().add_(0.1 * rank)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return said_by(optim.step)


def test_copies_of_a_shard_that_were_edited_apart_are_refused(pool: Pool) -> None:
    """Otherwise the copies would drift apart, unseen, since all ranks agree on one norm."""
    check_apart(pool, 2, (0,))


@pytest.mark.full("tests/habits/test_uses.py::test_copies_of_a_shard_that_were_edited_apart_are_refused")
def test_copies_of_hybrid_shards_that_were_edited_apart_are_refused(pool: Pool) -> None:
    check_apart(pool, 4, (1, 3))


def check_apart(pool: Pool, ranks: int, stages: tuple[int, ...]) -> None:
    cells = [(stage, 2, how) for stage, how in product(stages, ("loss", "noise", "alike"))]
    for (stage, _, how), of_ranks in zip(cells, of_cells(pool, ranks, edited_apart, cells), strict=True):
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
    sharded.model(torch.ones(2, 4)).sum().backward()
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
    """A target network or a teacher, which no optimizer of ours watches."""
    model, follower = build("Net"), build("Net")
    expected = follow(model, follower, torch.optim.AdamW(model.parameters(), **OPTIONS))
    cells = [(0, False), (3, True)]
    for losses in of_all(pool, 2, followed, cells):
        assert losses == pytest.approx(expected, rel=1e-5)
    assert len({round(loss, 3) for loss in expected}) == 3


def reached_last(rank: int, ranks: int, stage: int, orders: list[tuple[int, ...]]) -> Tensor:
    """The gradient of a block that only the last microbatch reaches, in bf16."""
    mesh = make_mesh("cpu", replicate=ranks if stage == 0 else 1)
    sharded = shard(build("Net"), ZeroConfig(stage=stage), mesh=mesh, microbatches=len(orders))
    model = sharded.model
    for index, model.order in enumerate(orders):
        with sharded.microbatch(is_last=index == len(orders) - 1):
            model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean().backward()
    return whole(model.blocks[1].up.weight.grad)


def test_the_last_microbatch_may_be_the_first_to_reach_a_unit(pool: Pool) -> None:
    both, one = [(0, 2), (0, 1, 2)], [(0, 1, 2)]
    cells = [(stage, orders) for stage in (0, 1, 2) for orders in (both, one)]
    found = of_all(pool, 2, reached_last, cells)
    assert all(grad.abs().max() > 0 for grad in found)
    for after_another, alone in zip(found[0::4] + found[1::4], found[2::4] + found[3::4], strict=True):
        assert torch.equal(after_another, alone)


def loaded_alone(rank: int, ranks: int, host: bool) -> list[Tensor]:
    """Parameters in bf16 after the optimizer's states alone were loaded, and a step."""
    sharded = shard(
        build("Net"),
        ZeroConfig(stage=2),
        offload=OffloadConfig(**HOST) if host else None,
    )
    optim = AdamW(sharded, lr=0.03)

    def train(steps: int) -> None:
        for step in range(steps):
            sharded.model(torch.full((2, 4), 0.5 + step, dtype=torch.bfloat16)).float().square().mean().backward()
            optim.step()
            optim.zero_grad()

    train(2)
    saved = copy.deepcopy(optim.state_dict())
    train(3)
    optim.load_state_dict(saved)
    train(2)
    optim.synchronize()
    return [whole(param.detach()) for param in sharded.model.parameters()]


def test_states_loaded_without_the_model_give_the_same_bits_on_every_tier(pool: Pool) -> None:
    """As in torch the parameters stay; masters that are not theirs follow them."""
    device, host = of_cells(pool, 2, loaded_alone, [(False,), (True,)])
    assert all(torch.equal(one, other) for one, other in zip(chain(*device), chain(*host), strict=True))


class Words(nn.Module):
    """A model whose embedding has sparse gradients. `how`: what else there is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        made = nn.EmbeddingBag if how == "bag" else nn.Embedding
        self.embed = made(4, 8, sparse=True, mode="mean") if how == "bag" else made(4, 8, sparse=True)
        self.head = nn.Linear(8, 4, bias=False)
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
    try:
        sharded = shard(model, stage, precision="fp32")
    except ValueError as error:
        return str(error)
    sharded.model(words).square().sum().backward()
    head = sharded.named_params().get("head.weight", sharded.model.embed.weight)
    return float((whole(head.grad) - plain.head.weight.grad).abs().max())


def test_an_embedding_with_sparse_gradients_is_refused_but_where_its_gradient_is_dense_or_none(pool: Pool) -> None:
    """FSDP2 has no reduction of sparse gradients at any stage."""
    for told in of_all(pool, 2, sparse, product((0, 3), ("alone", "bag"))):
        assert str(told).startswith("embed is made with sparse=True")
        assert "take sparse=False" in str(told)
    for gap in of_all(pool, 2, sparse, product((0, 3), ("tied", "frozen", "set to dense"))):
        assert gap < 1e-6
