"""What cannot work on a sharded model is told in one line before any number is wrong; the rest works."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import snapshot, unequal
from loops_of_torch import OPTIONS, whole
from models_of_torch import LOOPS, Boxed, Net, Training, batches_of, build, sharded_of
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from dzero import AdamW, PrecisionConfig, Sharded, ZeroConfig, make_mesh, shard


class Chosen(nn.Module):
    """Experts of one size, of which rank r runs two: number 2r and the next."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = 2 * dist.get_rank()
        out: Tensor = x + self.experts[first](x) + self.experts[first + 1](x)
        return out


def model_of(stage: int) -> Sharded:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Chosen(), nn.Linear(8, 8))
    mesh = make_mesh("cpu", replicate=dist.get_world_size() if stage == 0 else 1)
    return shard(model, ZeroConfig(stage=stage), mesh=mesh, is_unit=lambda module: isinstance(module, Chosen))


def step_of(sharded: Sharded, optim: AdamW) -> str:
    """What a step that must change nothing is told; the states are those before."""
    before = snapshot(sharded, optim)
    sharded.model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises((RuntimeError, ValueError)) as told:
        optim.step()
    assert unequal(snapshot(sharded, optim), before) == []
    return str(told.value)


def other_experts(rank: int, ranks: int, stage: int) -> str:
    sharded = model_of(stage)
    return step_of(sharded, AdamW(sharded))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_run_other_modules_of_a_unit_are_told_which(pool: Pool, stage: int) -> None:
    for told in pool.run(other_experts, 2, stage):
        assert "or other modules of them" in told
        assert "zero.unused=zeros" in told
        assert re.search(r"rank 0: gradients of all parameters but 1\.experts\.2\.weight, 1\.experts\.2\.bias", told)
        assert re.search(r"rank 1: gradients of all parameters but 1\.experts\.0\.weight", told)


class Writes(nn.Module):
    """A unit that takes its input from a dict or list and writes into that, or returns a new one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(8, 8)

    def forward(self, given: Any) -> Any:
        key = "x" if isinstance(given, dict) else 0
        if self.how == "new":
            return {"x": self.linear(given[key])}
        given[key] = self.linear(given[key])
        return given if self.how == "returned" else None


class Passes(nn.Module):
    """Units that hand on what is in one container. `how`: as of `Writes`, in a dict or a list."""

    def __init__(self, how: str, kind: type) -> None:
        super().__init__()
        self.kind, self.units = kind, nn.ModuleList(Writes(how) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        given: Any = {"x": x} if self.kind is dict else [x]
        for unit in self.units:
            returned = unit(given)
            given = given if returned is None else returned
        out: Tensor = given["x" if self.kind is dict else 0]
        return out


def passed_on(rank: int, ranks: int, stage: int, how: str, kind: type) -> float | str:
    """How far gradients are from plain torch's, or what is told."""
    torch.manual_seed(0)
    model, x = Passes(how, kind), torch.ones(2, 8)
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    sharded = shard(model, ZeroConfig(stage=stage), precision=PrecisionConfig(param="fp32"), mesh=make_mesh("cpu"))
    optim = AdamW(sharded)
    try:
        sharded.model(x).square().sum().backward()
    except RuntimeError as error:
        return str(error)
    own = [whole(param.grad) for param in sharded.model.parameters() if param.grad is not None]
    assert optim.param_groups
    return max(
        (one - param.grad).abs().max().item()
        for one, param in zip(own, plain.parameters(), strict=True)
        if param.grad is not None
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_unit_that_writes_into_its_arguments_returns_them_or_is_refused(pool: Pool, stage: int) -> None:
    for how, kind in (("returned", dict), ("returned", list), ("new", dict)):
        assert pool.run(passed_on, 1, stage, how, kind) == [0.0]
    for kind in (dict, list):
        (told,) = pool.run(passed_on, 1, stage, "kept", kind)
        assert told.startswith(f"unit units.1 writes into a {kind.__name__} among its arguments")


class AllInDataclass(nn.Sequential):
    """A model that returns a dataclass."""

    def forward(self, x: Tensor) -> Boxed:
        return Boxed(super().forward(x))


def boxed(rank: int, ranks: int, stage: int) -> float:
    """How far gradients are from plain torch's, after a backward from what a dataclass holds."""
    torch.manual_seed(0)
    model, x = AllInDataclass(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(2, 8)
    plain = copy.deepcopy(model)
    plain(x).x.square().sum().backward()
    precision, mesh = PrecisionConfig(param="fp32"), make_mesh("cpu")
    sharded = shard(model, ZeroConfig(stage=stage), precision=precision, mesh=mesh, is_unit=lambda _: False)
    sharded.model(x).x.square().sum().backward()
    gaps = []
    for name, param in plain.named_parameters():
        own = sharded.named_params()[name].grad
        assert own is not None
        assert param.grad is not None
        gaps.append((whole(own) - param.grad).abs().max().item())
    return max(gaps)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_may_return_a_dataclass(pool: Pool, stage: int) -> None:
    assert pool.run(boxed, 2, stage) == [0.0, 0.0]


HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


def hooked(rank: int, ranks: int, kind: str, first: bool) -> str:
    sharded = model_of(2)
    hook = getattr(sharded.named_params()["0.weight"], kind)
    if first:
        hook(lambda _: None)
        with pytest.raises(ValueError, match=r"0\.weight has a hook of its own") as told:
            AdamW(sharded)
        return str(told.value)
    optim = AdamW(sharded)
    hook(lambda _: None)
    return step_of(sharded, optim)


@pytest.mark.parametrize("first", [True, False], ids=["before the optimizer", "after it"])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_would_see_gradients_before_they_are_whole_is_refused(pool: Pool, kind: str, first: bool) -> None:
    for told in pool.run(hooked, 1, kind, first):
        assert "0.weight has a hook of its own" in told
        assert "between backward() and step()" in told


def cut_again(rank: int, ranks: int) -> list[str]:
    sharded, inner = model_of(3), build("Net")
    fully_shard(inner.blocks[1])  # type: ignore[union-attr, operator, index]
    told = []
    for model in (sharded.model, inner):
        with pytest.raises(ValueError, match="is already cut") as refused:
            shard(model, ZeroConfig(stage=3))
        told.append(str(refused.value))
    with pytest.raises(AssertionError, match="deepcopy"):
        AveragedModel(sharded.model)
    AdamW(sharded, [sharded.named_params()["0.weight"]])
    return told


def test_a_model_is_cut_once(pool: Pool) -> None:
    for told in pool.run(cut_again, 1):
        assert told[0].startswith("the model is already cut by fully_shard() or shard()")
        assert told[1].startswith("module blocks.1 is already cut")


def one_optimizer(rank: int, ranks: int) -> None:
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


def test_groups_of_other_parameters_are_refused(pool: Pool) -> None:
    pool.run(one_optimizer, 1)


def assigned(rank: int, ranks: int, stage: int) -> list[str]:
    sharded = sharded_of("Net", stage)
    optim = AdamW(sharded)
    state = {name: value * 2 for name, value in sharded.model.state_dict().items()}
    with pytest.warns(UserWarning, match="copies the values"):
        sharded.model.load_state_dict(state, assign=True)
    wrong = unequal(dict(sharded.model.state_dict()), state)
    before = {name: whole(param.detach()).clone() for name, param in sharded.named_params().items()}
    sharded.model(torch.ones(2, 4)).sum().backward()
    optim.step()
    after = {name: whole(param.detach()) for name, param in sharded.named_params().items()}
    return wrong + [name for name in before if torch.equal(before[name], after[name])]


@pytest.mark.parametrize("stage", [0, 3])
def test_assigned_values_are_copied(pool: Pool, stage: int) -> None:
    assert pool.run(assigned, 2, stage) == [[], []]


def head_apart(rank: int, ranks: int, stage: int) -> str:
    sharded = sharded_of("Net", stage)
    hidden = torch.ones(2, 8)
    with pytest.raises(RuntimeError, match="head is called outside of the model's forward") as told:
        sharded.model.head(hidden)  # type: ignore[operator]
    return str(told.value)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_module_called_while_it_is_cut_is_told(pool: Pool, stage: int) -> None:
    assert "make it a unit of its own" in pool.run(head_apart, 2, stage)[0]


class Widening(Net):
    """fp32 between its blocks, and beside them a table in fp32."""

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.embed(x).float()
        for block in self.blocks:
            x = block(x).float() + x
        out: Tensor = self.head(x.bfloat16())
        return out


def widened(rank: int, ranks: int, stage: int) -> tuple[Tensor, bool]:
    torch.manual_seed(0)
    sharded = shard(Widening(), ZeroConfig(stage=stage), mesh=make_mesh("cpu", replicate=ranks if stage == 0 else 1))
    optim = AdamW(sharded)
    seen = []
    sharded.model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))  # type: ignore[operator, index, union-attr]
    sharded.model(torch.full((2, 4), float(rank))).sum().backward()
    optim.step()
    return whole(sharded.named_params()["embed.weight"].detach()), seen == [torch.bfloat16]


def test_units_take_the_dtype_that_they_work_in(pool: Pool) -> None:
    found = [pool.run(widened, 2, stage)[0] for stage in (0, 1, 2, 3)]
    assert all(cast and torch.equal(weight, found[0][0]) for weight, cast in found)


def on_a_mesh_of_its_own(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    found = []
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "dp_replicate"))
    with pytest.raises(ValueError, match=r"name each of them once, as one of \('replicate', 'shard'\)"):
        shard(build("Net"), ZeroConfig(stage=2), mesh=square, axes={"shard": "dp_shard"})
    with pytest.raises(ValueError, match=r"or say which they are, e\.g\. shard\(\.\.\., axes=\{'shard': 'dp'\}\)"):
        shard(build("Net"), ZeroConfig(stage=2), mesh=flat)
    for stage, mesh, axes in (
        (0, flat, {"replicate": "dp"}),
        (3, flat, {"shard": "dp"}),
        (2, square, {"replicate": "dp_replicate", "shard": "dp_shard"}),
    ):
        sharded = shard(
            build("Net"), ZeroConfig(stage=stage), precision=PrecisionConfig(param="fp32"), mesh=mesh, axes=axes
        )
        optim = AdamW(sharded)
        sharded.model(torch.full((2, 4), float(rank))).sum().backward()
        optim.step()
        found.append({name: whole(param.detach()).clone() for name, param in sharded.named_params().items()})
    return found


def test_a_mesh_of_another_library_is_taken_with_its_axes_named(pool: Pool) -> None:
    zero, three, hybrid = pool.run(on_a_mesh_of_its_own, 4)[0]
    assert unequal(three, zero) == []
    assert all(torch.allclose(hybrid[name], value, atol=1e-6) for name, value in zero.items())


def assigned_parts(rank: int, ranks: int) -> list[str]:
    """Names of parameters that end otherwise where copies share states out, after `.grad` was assigned twice."""
    ends = []
    for over in ("shard", "all"):
        sharded = shard(
            build("Net"),
            ZeroConfig(stage=2, states_over=over),
            precision=PrecisionConfig(param="fp32"),
            mesh=make_mesh("cpu", replicate=2),
        )
        optim = AdamW(sharded)
        for of_parameter in (False, True):
            sharded.model(torch.full((2, 4), float(rank))).sum().backward()
            for param in sharded.model.parameters():
                assert param.grad is not None
                param.grad = param.detach() * 0.1 if of_parameter else param.grad * 0.5
            optim.step()
        optim.synchronize()
        ends.append({name: whole(param.detach()).clone() for name, param in sharded.named_params().items()})
    return unequal(*ends)


def test_gradients_are_assigned_where_copies_share_states_out(pool: Pool) -> None:
    assert pool.run(assigned_parts, 4) == [[]] * 4


def continued(rank: int, ranks: int, stage: int, moments: str) -> float:
    """The largest difference from torch, after it handed a model and its optimizer's state dict on."""
    plain = build("Net")
    theirs = torch.optim.AdamW(plain.parameters(), **OPTIONS)  # type: ignore[arg-type]
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


@pytest.mark.parametrize(("moments", "tolerance"), [("fp32", 1e-6), ("bf16", 1e-4), ("int8", 1e-3)])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_states_of_torchs_adamw_are_taken_in(pool: Pool, stage: int, moments: str, tolerance: float) -> None:
    assert max(pool.run(continued, 2, stage, moments)) <= tolerance


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


def foreign(rank: int, ranks: int) -> None:
    plain = build("Net")
    optim = AdamW(sharded_of("Net", 3))
    for options, params in (({"amsgrad": True}, [*plain.parameters()]), ({}, [*plain.parameters()][::-1])):
        theirs = torch.optim.AdamW(params, **options)  # type: ignore[arg-type]
        plain(torch.ones(2, 4)).sum().backward()
        theirs.step()
        with pytest.raises(ValueError, match=r"the state dict of torch\.optim has"):
            optim.load_state_dict(theirs.state_dict())
    assert all(float(states["step"]) == 0 for states in optim.state.values())


def test_states_of_another_rule_or_order_are_refused(pool: Pool) -> None:
    pool.run(foreign, 1)
