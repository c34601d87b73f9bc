"""The interface of `torch.optim.Optimizer` does what it does in torch: groups, hooks, state dicts, unscaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import small_decoders
import torch
from loops_of_torch import HOST, whole
from pool import Pool
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from training_loops import backward, sharded_net, train

from dzero import AdamW, Muon, OffloadConfig, Sharded, TorchOptimizer
from dzero.optim.base import MasterOptimizer

SGD = {"lr": 0.1, "momentum": 0.9}


def move(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"].append(groups[0]["params"].pop(0))


def remove(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].pop(0)


def remove_group(groups: list[dict[str, Any]]) -> None:
    groups.pop(0)


EDITS: dict[str, Callable[[list[dict[str, Any]]], None]] = {
    each.__name__: each for each in (move, remove, remove_group)
}


def halves(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    half = len(params) // 2
    return [{"params": params[:half]}, {"params": params[half:], "lr": 0.0}]


def regrouped(rank: int, ranks: int, edit: str, offload: dict[str, str]) -> dict[str, torch.Tensor]:
    tiers = OffloadConfig(**offload) if offload else None
    sharded = sharded_net("even", stage=2, param="fp32", offload=tiers)
    optim = TorchOptimizer(sharded, torch.optim.SGD, halves([*sharded.model.parameters()]), **SGD)
    for step, of_step in enumerate(small_decoders.batches("even", steps=4, ranks=ranks, microbatches=1)):
        backward(sharded, optim, of_step[rank])
        optim.step()
        if step == 1:
            EDITS[edit](optim.param_groups)
    optim.synchronize()
    return {name: whole(param.detach()).clone() for name, param in sharded.named_params().items()}


@pytest.mark.parametrize("offload", [{}, HOST], ids=["device", "host"])
@pytest.mark.parametrize("edit", EDITS)
def test_lists_of_parameter_groups_may_be_edited(pool: Pool, edit: str, offload: dict[str, str]) -> None:
    model = small_decoders.build("even")
    optim = torch.optim.SGD(halves([*model.parameters()]), **SGD)
    for step, of_step in enumerate(small_decoders.batches("even", steps=4, ranks=2, microbatches=1)):
        optim.zero_grad()
        model.zero_grad()
        losses = [small_decoders.loss_fn(model, of_step[rank][0]) for rank in range(2)]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optim.step()
        if step == 1:
            EDITS[edit](optim.param_groups)
    found = pool.run(regrouped, 2, edit, offload)[0]
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=0, atol=1e-6, msg=name)


def taken_out(rank: int, ranks: int, rule: str, offload: dict[str, str]) -> dict[str, Any]:
    """A parameter is taken out of its group, others are added, and then it comes back."""
    tiers = OffloadConfig(**offload) if offload else None
    sharded = sharded_net("even", stage=2, param="fp32", offload=tiers)
    first, second, *rest = sharded.model.parameters()
    params = [first, *rest]
    optim: MasterOptimizer
    if rule == "adamw":
        optim = AdamW(sharded, params, lr=1e-3, max_norm=1e-3)
    else:
        optim = TorchOptimizer(sharded, torch.optim.SGD, params, max_norm=1e-3, **SGD)
    norms = []
    for step, of_step in enumerate(small_decoders.batches("even", steps=5, ranks=ranks, microbatches=1)):
        backward(sharded, optim, of_step[rank])
        if step == 1:
            optim.param_groups[0]["params"].pop(0)
        if step == 2:
            optim.add_param_group({"params": [second]})
        if step == 3:
            optim.add_param_group({"params": [first]})
            optim.param_groups[-1]["params"].pop(0)
            optim.param_groups.pop()
            optim.add_param_group({"params": [first]})  # at once
        grads = [param.grad for group in optim.param_groups for param in group["params"] if param.grad is not None]
        norm = float(whole(nn.utils.get_total_norm(grads)))
        optim.step()
        assert optim.last_decision is not None
        norms.append(optim.last_decision.norm / norm)
    states = {key: whole(value).clone() for key, value in optim.state[first].items() if value.ndim}
    return {"norms": norms, "first": whole(first.detach()).clone(), **states}


@pytest.mark.parametrize("offload", [{}, HOST], ids=["device", "host"])
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_a_parameter_that_was_taken_out_comes_back_with_its_states(
    pool: Pool, rule: str, offload: dict[str, str]
) -> None:
    model = small_decoders.build("even")
    first, second, *rest = model.parameters()
    kind, options = (torch.optim.AdamW, {"lr": 1e-3}) if rule == "adamw" else (torch.optim.SGD, SGD)
    optim = kind([first, *rest], **options)
    for step, of_step in enumerate(small_decoders.batches("even", steps=5, ranks=2, microbatches=1)):
        model.zero_grad()
        torch.stack([small_decoders.loss_fn(model, of_step[rank][0]) for rank in range(2)]).mean().backward()  # type: ignore[no-untyped-call]
        if step == 1:
            optim.param_groups[0]["params"].pop(0)
        if step in (2, 3):
            optim.add_param_group({"params": [second if step == 2 else first]})
        nn.utils.clip_grad_norm_([param for group in optim.param_groups for param in group["params"]], 1e-3)
        optim.step()
    for found in pool.run(taken_out, 2, rule, offload):
        assert found["norms"] == pytest.approx([1] * 5, rel=1e-5)
        torch.testing.assert_close(found["first"], first.detach(), rtol=0, atol=1e-6)
        for key in ("exp_avg", "exp_avg_sq") if rule == "adamw" else ("momentum_buffer",):
            torch.testing.assert_close(found[key], optim.state[first][key], rtol=1e-4, atol=1e-10, msg=key)


def refused(rank: int, ranks: int) -> list[str]:
    """What is said of a parameter in a list by hand, of settings of another AdamW, and of another rule."""

    def told(sharded: Sharded, optim: MasterOptimizer, edit: Callable[[], object]) -> str:
        train(sharded, optim, steps=1)
        edit()
        for _ in range(2):  # and again
            with pytest.raises(ValueError, match=r".") as error:
                train(sharded, optim, steps=1)
        return str(error.value)

    messages = []
    for rule in (AdamW, lambda sharded, params: TorchOptimizer(sharded, torch.optim.SGD, params, lr=0.1)):
        sharded = sharded_net("even", stage=2)
        first, *rest = sharded.named_params().values()
        optim = rule(sharded, rest)
        messages.append(told(sharded, optim, lambda: optim.param_groups[0]["params"].append(first)))  # noqa: B023
    sharded = sharded_net("even", stage=2)
    optim = AdamW(sharded)
    messages.append(told(sharded, optim, lambda: optim.param_groups[0].update(maximize=True)))
    sharded = sharded_net("even", stage=2)
    with pytest.raises(ValueError, match="amsgrad=True") as error:
        AdamW(sharded, [{"params": [*sharded.named_params().values()], "amsgrad": True}])
    messages.append(str(error.value))
    muon = Muon(sharded_net("even", stage=2))
    messages.append(told(muon._sharded, muon, lambda: muon.param_groups[0].update(rule="adamw")))
    return messages


def test_edits_of_groups_that_cannot_be_followed_are_refused(pool: Pool) -> None:
    appended, of_class, maximize, amsgrad, muon = pool.run(refused, 2)[0]
    assert "optim.add_param_group" in appended
    assert "optim.add_param_group" in of_class
    assert "take dzero.TorchOptimizer(sharded, torch.optim.AdamW, maximize=True)" in maximize
    assert "a parameter group has amsgrad=True" in amsgrad
    assert "states of rule='muon'" in muon


def loaded_without(rank: int, ranks: int) -> bool:
    """A parameter is taken out of its group, and a state dict of such groups is loaded; its own states stay."""
    sharded = sharded_net("even", stage=2, param="fp32")
    first, *_ = sharded.model.parameters()
    optim = TorchOptimizer(sharded, torch.optim.SGD, **SGD)
    train(sharded, optim, steps=1)
    saved, before = optim.state_dict(), whole(optim.state[first]["momentum_buffer"]).clone()
    optim.param_groups[0]["params"].pop(0)
    saved["param_groups"][0]["params"].pop(0)
    optim.load_state_dict(saved)
    return torch.equal(whole(optim.state[first]["momentum_buffer"]), before)


def test_states_are_loaded_beside_a_parameter_that_was_taken_out(pool: Pool) -> None:
    assert pool.run(loaded_without, 2) == [True, True]


def hooked(rank: int, ranks: int) -> list[str]:
    sharded = sharded_net("even", stage=2)
    optim, seen = AdamW(sharded), list[str]()
    optim.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append("before"))
    optim.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append("first"), prepend=True)
    removed = optim.register_load_state_dict_post_hook(lambda _: seen.append("removed"))
    optim.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    removed.remove()
    optim.load_state_dict(optim.state_dict())
    return seen


def test_hooks_of_load_state_dict_are_called(pool: Pool) -> None:
    assert pool.run(hooked, 1) == [["first", "before", "after"]]


def of_torch(rank: int, ranks: int, saved: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Go on from a state dict of torch, in one process, of another class than AdamW."""
    sharded = sharded_net("even", stage=3, param="fp32", offload=OffloadConfig(**HOST))
    optim = TorchOptimizer(sharded, torch.optim.SGD, **SGD)
    with torch.no_grad():
        for name, param in sharded.named_params().items():
            param.copy_(torch.distributed.tensor.distribute_tensor(weights[name], param.device_mesh, param.placements))
    optim.load_state_dict(saved)
    train(sharded, optim, steps=1, seed=1)
    optim.synchronize()
    assert optim.param_groups[0]["updates"] == 2
    return {name: whole(param.detach()).clone() for name, param in sharded.named_params().items()}


def test_a_state_dict_of_torch_is_taken_in_by_its_class(pool: Pool) -> None:
    model = small_decoders.build("even")
    optim = torch.optim.SGD(model.parameters(), **SGD)
    saved, weights = dict[str, Any](), dict[str, torch.Tensor]()
    for seed in range(2):
        (of_step,) = small_decoders.batches("even", steps=1, ranks=2, microbatches=1, seed=seed)
        losses = [small_decoders.loss_fn(model, of_step[rank][0]) for rank in range(2)]
        optim.zero_grad()
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optim.step()
        if seed == 0:
            saved = {**optim.state_dict(), "state": {k: {**v} for k, v in optim.state_dict()["state"].items()}}
            saved["state"] = {k: {key: each.clone() for key, each in v.items()} for k, v in saved["state"].items()}
            weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    found = pool.run(of_torch, 2, saved, weights)[0]
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=0, atol=1e-6, msg=name)


def from_rank_0(rank: int, ranks: int) -> str:
    """A "full" state dict of torch, of a class that keeps whole parameters with their owners."""
    sharded = sharded_net("even", stage=2)
    optim = TorchOptimizer(sharded, torch.optim.Adafactor, lr=1e-2)
    train(sharded, optim, steps=3)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = get_optimizer_state_dict(sharded.model, optim, options=full)
    again = sharded_net("even", stage=2)
    other, told = TorchOptimizer(again, torch.optim.Adafactor, lr=1e-2), ""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    try:
        set_optimizer_state_dict(again.model, other, saved, options=options)
    except ValueError as error:
        told = str(error)
    return told


def test_a_full_state_dict_without_the_states_of_other_owners_is_refused(pool: Pool) -> None:
    _, told = pool.run(from_rank_0, 2)
    assert "has no states of the parameters that this rank owns" in told
    assert "dzero.Checkpointer" in told


def remainders(rank: int, ranks: int) -> bool:
    sharded = sharded_net("even", stage=2, master="remainder")
    optim = AdamW(sharded)
    train(sharded, optim, steps=1)
    full = get_optimizer_state_dict(sharded.model, optim, options=StateDictOptions(full_state_dict=True))
    param = next(iter(sharded.named_params()))
    return bool(full["state"][param]["remainder"].any())  # type: ignore[index, call-overload]


def test_a_full_state_dict_has_remainders(pool: Pool) -> None:
    assert pool.run(remainders, 2) == [True, True]


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
        assert decision is not None
        told |= {"left": decision.norm, "factor": decision.factor, "next": optim.grad_scale}
    return told


@pytest.mark.parametrize("offload", [{}, HOST], ids=["device", "host"])
def test_fp16_gradients_are_clipped_by_torch_once_they_are_unscaled(pool: Pool, offload: dict[str, str]) -> None:
    told, other = pool.run(unscaled, 2, offload)
    assert told == other
    model = small_decoders.build("even")
    (of_step,) = small_decoders.batches("even", steps=1, ranks=2, microbatches=1)
    torch.stack([small_decoders.loss_fn(model, of_step[rank][0]) for rank in range(2)]).mean().backward()  # type: ignore[no-untyped-call]
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert told["norm"] == pytest.approx(norm, rel=1e-2)
    assert told["left"] == pytest.approx(0.1, rel=1e-3)
    assert (told["factor"], told["next"]) == (1.0, 65536.0)
