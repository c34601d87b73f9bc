"""The interface of `torch.optim.Optimizer` does what it does in torch: groups, hooks, state dicts, unscaling."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import small_decoders
import torch
import torch.distributed as dist
from models_of_torch import HOST, LOOPS, OPTIONS, Training, batches_of, build, sharded_of, whole
from on_ranks import on_ranks
from pool import Pool
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from training_loops import backward, params_of, sharded_net, train, unequal

from dzero import AdamW, Muon, OffloadConfig, Sharded, TorchOptimizer, shard

SGD = {"lr": 0.1, "momentum": 0.9}
Edit = Callable[[torch.optim.Optimizer, nn.Module, int], None]


def move(optim: torch.optim.Optimizer, model: nn.Module, step: int) -> None:
    """A parameter goes from one group to another."""
    if step == 2:
        optim.param_groups[1]["params"].append(optim.param_groups[0]["params"].pop(0))


def remove_group(optim: torch.optim.Optimizer, model: nn.Module, step: int) -> None:
    if step == 2:
        optim.param_groups.pop(0)


def take_out(optim: torch.optim.Optimizer, model: nn.Module, step: int) -> None:
    """A parameter is taken out of its group, another is added, and then the first one comes back with its states."""
    first, second, *_ = model.parameters()
    if step == 1:
        optim.param_groups[0]["params"].pop(0)
    if step == 2:
        optim.add_param_group({"params": [second]})
    if step == 3:
        optim.add_param_group({"params": [first]})
        optim.param_groups[-1]["params"].pop(0)
        optim.param_groups.pop()
        optim.add_param_group({"params": [first]})  # at once


EDITS: dict[str, Edit] = {each.__name__: each for each in (take_out, move, remove_group)}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """All parameters but the second one, of which the later ones do not move."""
    first, _, *rest = model.parameters()
    return [{"params": [first, *rest[:4]]}, {"params": rest[4:], "lr": 0.0}]


def regroup(model: nn.Module, optim: Any, edit: str, own: int | None) -> dict[str, Any]:
    """Train on all ranks' rows, or on those of one; norms, parameters, and the states of the first one."""
    norms = []
    for step in range(5):
        model.zero_grad()
        (batch,) = batches_of(step, 2, 1, own=own, together=own is None)
        Training(model, optim).loss(batch).backward()
        EDITS[edit](optim, model, step)
        if own is None:
            norms.append(nn.utils.clip_grad_norm_([p for g in optim.param_groups for p in g["params"]], CLIP))
        optim.step()
        if own is not None:
            norms.append(torch.tensor(optim.last_decision.norm))
    first, *_ = model.parameters()
    states = {key: whole(value).clone() for key, value in optim.state[first].items() if key in STATES}
    params = {name: whole(param.detach()).clone() for name, param in model.named_parameters()}
    return {**params, **states, "norms": torch.stack(norms).float()}


CLIP, STATES = 0.1, ("exp_avg", "exp_avg_sq", "momentum_buffer")


def of_rule(rule: str, groups: list[Any], sharded: Sharded | None = None) -> Any:
    """AdamW or SGD of torch, or over a sharded model, which clips as well."""
    if sharded is None:
        return torch.optim.AdamW(groups, **OPTIONS) if rule == "adamw" else torch.optim.SGD(groups, **SGD)
    if rule == "adamw":
        return AdamW(sharded, groups, max_norm=CLIP, **OPTIONS)
    return TorchOptimizer(sharded, torch.optim.SGD, groups, max_norm=CLIP, **SGD)


def regrouped(rank: int, ranks: int, edit: str, rule: str, offload: dict[str, str]) -> dict[str, Any]:
    sharded = sharded_of("Net", 2, offload=offload)
    return regroup(sharded.model, of_rule(rule, groups_of(sharded.model), sharded), edit, rank)


@pytest.mark.product(keep=4)
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("offload", [{}, HOST], ids=["device", "host"])
def test_lists_of_parameter_groups_may_be_edited(pool: Pool, edit: str, rule: str, offload: dict[str, str]) -> None:
    """Norms are those of the parameters that are in groups; states wait for a parameter that comes back."""
    model = build("Net")
    expected = regroup(model, of_rule(rule, groups_of(model)), edit, None)
    for found in pool.run(regrouped, 2, edit, rule, offload):
        for name, value in expected.items():  # gradients are sums of fp32 in another order; rates are at most 0.1
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


@on_ranks(2)
def test_edits_of_groups_that_cannot_be_followed_are_refused(rank: int, ranks: int) -> None:
    """A parameter in a list by hand, settings of another AdamW, and another rule."""

    def refused(says: str, make: Callable[[Sharded], Any], edit: Callable[[Sharded, Any], object]) -> None:
        sharded = sharded_net("even", stage=2)
        optim = make(sharded)
        train(sharded, optim, steps=1)
        edit(sharded, optim)
        for _ in range(2):  # and again
            with pytest.raises(ValueError, match=says):
                train(sharded, optim, steps=1)

    def rest(sharded: Sharded) -> list[nn.Parameter]:
        return [*sharded.named_params().values()][1:]

    def append(sharded: Sharded, optim: Any) -> None:
        optim.param_groups[0]["params"].append(next(iter(sharded.named_params().values())))

    added = r"optim\.add_param_group"
    torchs = r"take dzero\.TorchOptimizer\(sharded, torch\.optim\.AdamW, maximize=True\)"
    refused(added, lambda sharded: AdamW(sharded, rest(sharded)), append)
    refused(added, lambda sharded: TorchOptimizer(sharded, torch.optim.SGD, rest(sharded), lr=0.1), append)
    refused(torchs, AdamW, lambda _, optim: optim.param_groups[0].update(maximize=True))
    refused("states of rule='muon'", Muon, lambda _, optim: optim.param_groups[0].update(rule="adamw"))
    sharded = sharded_net("even", stage=2)
    with pytest.raises(ValueError, match="a parameter group has amsgrad=True"):
        AdamW(sharded, [{"params": [*sharded.named_params().values()], "amsgrad": True}])


def loaded(rank: int, ranks: int) -> tuple[bool, list[str], bool]:
    """A state dict of groups without a parameter leaves its states; hooks that were called; and a full one."""
    sharded = sharded_net("even", stage=2, param="fp32")
    first, *_ = sharded.model.parameters()
    optim, seen = TorchOptimizer(sharded, torch.optim.SGD, **SGD), list[str]()
    train(sharded, optim, steps=1)
    saved, before = optim.state_dict(), whole(optim.state[first]["momentum_buffer"]).clone()
    optim.param_groups[0]["params"].pop(0)
    saved["param_groups"][0]["params"].pop(0)
    optim.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append("before"))
    optim.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append("first"), prepend=True)
    removed = optim.register_load_state_dict_post_hook(lambda _: seen.append("removed"))
    optim.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    removed.remove()
    optim.load_state_dict(saved)
    stays = torch.equal(whole(optim.state[first]["momentum_buffer"]), before)

    sharded = sharded_net("even", stage=2, master="remainder")
    adamw = AdamW(sharded)
    train(sharded, adamw, steps=1)
    full = get_optimizer_state_dict(sharded.model, adamw, options=StateDictOptions(full_state_dict=True))
    param = next(iter(sharded.named_params()))
    return stays, seen, bool(full["state"][param]["remainder"].any())


def test_states_are_loaded_with_hooks_beside_what_was_taken_out_and_full_ones_have_remainders(pool: Pool) -> None:
    assert pool.run(loaded, 2) == [(True, ["first", "before", "after"], True)] * 2


LEFT_OUT = ("blocks.1.up.weight", "embed.weight")


def handed_on(rank: int, ranks: int, rule: str, stage: int, moments: str, offload: dict[str, str]) -> float:
    """The largest difference from torch in the two steps after it handed a model and a state dict on."""
    plain = build("Net")
    theirs = of_rule(rule, [*plain.parameters()])
    training = Training(plain, theirs)
    for step in range(3):
        LOOPS["plain"](training, batches_of(step, ranks, 1, together=True))
    sharded = sharded_of("Net", stage, offload=offload, precision={"param": "fp32", "moments": moments})
    whole_state = StateDictOptions(full_state_dict=True)
    set_model_state_dict(sharded.model, plain.state_dict(), options=whole_state)
    ours = AdamW(sharded) if rule == "adamw" else TorchOptimizer(sharded, torch.optim.SGD, **SGD)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert all(ours.param_groups[0][key] == value for key, value in theirs.defaults.items() if key in ("betas", "lr"))
    for step in range(3, 5):
        LOOPS["plain"](training, batches_of(step, ranks, 1, together=True))
        LOOPS["plain"](Training(sharded.model, ours, sharded), batches_of(step, ranks, 1, own=rank))
    ours.synchronize()
    expected, found = dict(plain.named_parameters()), params_of(sharded)
    return max(float((found[name] - value).detach().abs().max()) for name, value in expected.items())


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(
    ("rule", "stage", "moments", "offload", "limit"),
    [
        ("adamw", 3, "fp32", {}, 1e-6),
        *(("adamw", stage, "fp32", {}, 1e-6) for stage in (0, 1, 2)),
        *(("adamw", stage, "bf16", {}, 1e-4) for stage in range(4)),
        ("sgd", 3, "fp32", HOST, 1e-6),
        *(("adamw", stage, "int8", {}, 1e-3) for stage in range(4)),
        ("sgd", 1, "fp32", {}, 1e-6),
    ],
)
def test_states_of_an_optimizer_of_torch_are_taken_in(
    pool: Pool, rule: str, stage: int, moments: str, offload: dict[str, str], limit: float
) -> None:
    """Two steps of 1e-3 with moments that are rounded to 8 bits of significand, or to codes 1/64 apart, are closer."""
    assert max(pool.run(handed_on, 2, rule, stage, moments, offload)) <= limit


def begun_anew(rank: int, ranks: int) -> list[tuple[float, float]]:
    """By parameter: its count of steps and its largest moment, after states of one without updates were loaded."""
    plain, sharded = build("Net"), sharded_of("Net", 3)
    theirs, ours = torch.optim.AdamW(plain.parameters()), AdamW(sharded)
    for optim, model in ((theirs, plain), (ours, sharded.model)):
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
    saved, names = theirs.state_dict(), [name for name, _ in plain.named_parameters()]
    for name in LEFT_OUT:
        del saved["state"][names.index(name)]
    ours.load_state_dict(saved)
    states = [ours.state[sharded.named_params()[name]] for name in (*LEFT_OUT, "head.weight")]
    return [(float(each["step"]), float(whole(each["exp_avg"]).abs().max())) for each in states]


def test_parameters_without_states_in_torchs_begin_anew(pool: Pool) -> None:
    for up, embed, (steps, moment) in pool.run(begun_anew, 2):
        assert up == embed == (0.0, 0.0)
        assert steps == 1.0
        assert moment > 0.0


@on_ranks(2)
def test_states_loaded_without_the_model_give_the_same_bits_on_every_tier(rank: int, ranks: int) -> list[str]:
    """As in torch the parameters stay; masters that are not theirs follow them.

    What differs between tiers after the optimizer's states alone were loaded, and two steps.
    """
    ends = []
    for offload in (None, OffloadConfig(**HOST)):
        sharded = sharded_net("even", stage=2, offload=offload)
        optim = AdamW(sharded, lr=0.03)
        train(sharded, optim, steps=2)
        saved = copy.deepcopy(optim.state_dict())
        train(sharded, optim, steps=3, seed=1)
        optim.load_state_dict(saved)
        train(sharded, optim, steps=2, seed=2)
        optim.synchronize()
        ends.append(params_of(sharded))
    return unequal(*ends)


def from_rank_0(rank: int, ranks: int) -> str:
    """What is said of a "full" state dict of torch, of a class that keeps whole parameters with their owners."""
    sharded, again = (sharded_net("even", stage=2) for _ in range(2))
    optim, other = (TorchOptimizer(each, torch.optim.Adafactor, lr=1e-2) for each in (sharded, again))
    train(sharded, optim, steps=3)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = get_optimizer_state_dict(sharded.model, optim, options=full)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    try:
        set_optimizer_state_dict(again.model, other, saved, options=options)
    except ValueError as error:
        return str(error)
    return ""


def test_a_full_state_dict_without_the_states_of_other_owners_is_refused(pool: Pool) -> None:
    _, told = pool.run(from_rank_0, 2)
    assert "has no states of the parameters that this rank owns" in told
    assert "dzero.Checkpointer" in told


def unscaled(rank: int, ranks: int, offload: dict[str, str]) -> dict[str, Any]:
    """Clip fp16 gradients by torch, which is refused while they are scaled."""
    told = {}
    for grad in ("auto", "fp32"):
        tiers = OffloadConfig(**offload) if offload else None
        sharded = sharded_net("even", stage=2, param="fp16", grad=grad, offload=tiers)
        optim = TorchOptimizer(sharded, torch.optim.SGD, lr=0.1)
        params = [*sharded.model.parameters()]
        (of_step,) = small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1)
        with pytest.raises(RuntimeError, match=r"backward of the last microbatch|precision\.grad=fp32"):
            optim.unscale_()
        backward(sharded, optim, of_step[rank])
        for clip in (
            lambda: nn.utils.clip_grad_norm_(params, 0.1),  # noqa: B023
            lambda: nn.utils.clip_grad_value_(params, 0.1),  # noqa: B023
            lambda: nn.utils.clip_grad_norm_(params, 0.1, foreach=False),  # noqa: B023
        ):
            with pytest.raises(RuntimeError, match=r"multiplied by the loss scale 65536: call optim\.unscale_\(\)"):
                clip()
        if grad == "auto":
            with pytest.raises(RuntimeError, match=r"take precision\.grad=fp32"):
                optim.unscale_()
            continue
        optim.unscale_()
        optim.unscale_()  # once is enough
        with pytest.raises(RuntimeError, match="a backward after unscale_"):
            backward(sharded, optim, of_step[rank])
        sharded.model.zero_grad()
        backward(sharded, optim, of_step[rank])  # scaled again
        assert optim.grad_scale == 65536
        optim.unscale_()
        told["norm"] = float(whole(nn.utils.clip_grad_norm_(params, 0.1)))
        optim.step()
        decision = optim.last_decision
        told |= {"left": decision.norm, "factor": decision.factor, "next": optim.grad_scale}
    return told


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("offload", [HOST, {}], ids=["host", "device"])
def test_fp16_gradients_are_clipped_by_torch_once_they_are_unscaled(pool: Pool, offload: dict[str, str]) -> None:
    told, other = pool.run(unscaled, 2, offload)
    assert told == other
    model = small_decoders.build("even")
    (of_step,) = small_decoders.batches("even", steps=1, ranks=2, microbatches=1)
    torch.stack([small_decoders.loss_fn(model, of_step[rank][0]) for rank in range(2)]).mean().backward()
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert told["norm"] == pytest.approx(norm, rel=1e-2)
    assert told["left"] == pytest.approx(0.1, rel=1e-3)
    assert (told["factor"], told["next"]) == (1.0, 65536.0)


def told_of_the_first_ranks_file(rank: int, ranks: int, offload: str, rule: str) -> list[str]:
    """Load model and optimizer from this rank's file of `torch.save`, then from the first one's; what those raise."""
    sharded = shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), stage=3, offload=offload)
    optim = of_rule(rule, [*sharded.model.parameters()], sharded)
    sharded.model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optim.step()
    file = io.BytesIO()
    torch.save([sharded.model.state_dict(), optim.state_dict()], file)
    files = [b""] * ranks
    dist.all_gather_object(files, file.getvalue())
    told = []
    for content in (files[rank], files[0]):
        saved = torch.load(io.BytesIO(content), weights_only=False)
        for into, states in zip((sharded.model, optim), saved, strict=True):
            try:
                into.load_state_dict(states)
            except ValueError as error:
                told.append(str(error))
    return told


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(
    ("offload", "rule"), [("none", "adamw"), ("none", "sgd"), ("host_all", "sgd"), ("host_all", "adamw")]
)
def test_shards_of_another_rank_are_refused(pool: Pool, offload: str, rule: str) -> None:
    first, second = pool.run(told_of_the_first_ranks_file, 2, offload, rule)
    assert first == []
    assert len(second) == 2
    assert all("of the rank at [0] along the sharded axes, where this rank is at [1]" in each for each in second)
