"""What people reported of other libraries, tried here as they did: each case agrees with plain torch in one process.

    report                                             what went wrong there
    pytorch/pytorch#129079, hpcaitech/ColossalAI#5151  the rate of the first step after a resume is the initial one
    pytorch/pytorch#140900                             `initial_lr` of a schedule is lost with distributed checkpoints
    NVIDIA-NeMo/Automodel#3882                         a scheduled weight decay is the new run's for one step
    facebookresearch/fairscale#601                     groups of an optimizer are mixed up by a resume
    pytorch/pytorch#180346                             no norm over parameters of two meshes
    pytorch/pytorch#144289                             weights are no DTensors after a forward, so averages of them fail
    huggingface/accelerate#3732                        the head of a classifier is not in the adapter that is saved

Others are asked elsewhere: a unit that some ranks or none reach (pytorch/pytorch#83129, hiyouga/LlamaFactory#1931), and
decay of what no rank reached (pytorch/pytorch#28294), in tests/zero/test_unused.py; a parameter of one element
(pytorch/pytorch#144045) by the net `uneven` of tests/test_parity.py; the mean of a weight whose rows ranks cannot share
evenly (pytorch/pytorch#162692) in test_writes.py. The reports are those of GitHub's trackers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pool import Pool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dzero

Net = nn.Sequential
TOLERANCE = 1e-6


def net(*more: Callable[[], nn.Module]) -> Net:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), *(make() for make in more), nn.Linear(7, 1))


def data(step: int, rank: int, ranks: int) -> Tensor:
    """This rank's part of the step's six rows."""
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
    return rows[rank * 6 // ranks : (rank + 1) * 6 // ranks]


def whole(values: Any) -> list[Tensor]:
    return [(v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for v in values]


def in_two_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = [*model.parameters()]
    return [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "lr": 0.02}]


def decayed(optim: torch.optim.Optimizer, step: int) -> None:
    """A schedule of the weight decay, as a loop writes it."""
    for group in optim.param_groups:
        group["weight_decay"] = 0.1 * (step + 1) * (group["lr"] < 0.02)


def trained(model: nn.Module, optim: Any, schedule: LambdaLR, rank: int, ranks: int, steps: range) -> None:
    for step in steps:
        model(data(step, rank, ranks)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        schedule.step()
        decayed(optim, step)


def schedule_of(optim: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optim, lambda step: 0.5**step)


def plain() -> tuple[list[Tensor], list[dict[str, Any]]]:
    model = net()
    optim = torch.optim.AdamW(in_two_groups(model), lr=0.01, eps=1e-3, weight_decay=0.05)
    trained(model, optim, schedule_of(optim), 0, 1, range(6))
    keys = ("lr", "initial_lr", "weight_decay")
    return whole(model.parameters()), [{key: group[key] for key in keys} for group in optim.param_groups]


def resumed(rank: int, ranks: int, folder: Path, by: str, stage: int) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Three steps, and three more of a run that resumes: by a checkpoint, or by torch's own distributed checkpoints."""
    for first in (0, 3):
        sharded = dzero.shard(net(), stage=stage, precision="fp32")
        optim = dzero.AdamW(
            sharded, in_two_groups(sharded.model), lr=7.0 if first else 0.01, eps=1e-3, weight_decay=0.05
        )
        schedule = schedule_of(optim)
        with dzero.Checkpointer(dzero.CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
            if first and by == "checkpointer":
                resumed = checkpoints.resume("auto")
                schedule.load_state_dict(resumed.extra["schedule"])
            elif first:
                model_state, optim_state = get_state_dict(sharded.model, optim)
                state = {"model": model_state, "optim": optim_state, "schedule": schedule.state_dict()}
                dcp.load(state, checkpoint_id=str(folder))
                set_state_dict(sharded.model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
                schedule.load_state_dict(state["schedule"])
            trained(sharded.model, optim, schedule, rank, ranks, range(first, first + 3))
            saved = {key: value for key, value in schedule.state_dict().items() if key != "lr_lambdas"}
            if not first and by == "checkpointer":
                checkpoints.save(3, {"schedule": {**saved, "lr_lambdas": [None, None]}})
            elif not first:
                model_state, optim_state = get_state_dict(sharded.model, optim)
                dcp.save(
                    {"model": model_state, "optim": optim_state, "schedule": schedule.state_dict()},
                    checkpoint_id=str(folder),
                )
    keys = ("lr", "initial_lr", "weight_decay")
    groups = [{key: group[key] for key in keys} for group in optim.param_groups]
    return whole(sharded.model.parameters()), groups


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(("by", "stage"), [("checkpointer", 3), ("checkpointer", 1), ("dcp", 1), ("dcp", 3)])
def test_rates_and_decays_and_groups_are_those_of_a_run_without_a_stop(
    pool: Pool, tmp_path: Path, by: str, stage: int
) -> None:
    params, groups = plain()
    for found, found_groups in pool.run(resumed, 2, tmp_path / "saved", by, stage):
        assert found_groups == groups
        for value, expected in zip(found, params, strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=TOLERANCE)


def two_meshes(rank: int, ranks: int) -> list[float]:
    """One norm of a model that all ranks divide, and of one of which each rank has a replica."""
    meshes = [dzero.make_mesh("cpu"), dzero.make_mesh("cpu", replicate=ranks)]
    zeros = [dzero.ZeroConfig(stage=3), dzero.ZeroConfig(stage=0)]
    models = [dzero.shard(net(), zero, mesh=mesh, precision="fp32") for zero, mesh in zip(zeros, meshes, strict=True)]
    optims = [dzero.AdamW(sharded) for sharded in models]
    for sharded in models:
        sharded.model(data(0, rank, ranks)).square().mean().backward()
    params = [param for sharded in models for param in sharded.model.parameters()]
    norms = [float(nn.utils.clip_grad_norm_(params, 0.1)) for _ in range(2)]
    for optim in optims:
        optim.step()
    return norms


def test_one_norm_of_models_on_two_meshes(pool: Pool) -> None:
    model = net()
    model(data(0, 0, 1)).square().mean().backward()
    alone = float(nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None]))
    for norms in pool.run(two_meshes, 2):
        assert norms == pytest.approx([math.sqrt(2) * alone, 0.1], rel=1e-5)


def classifier() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=20, num_labels=3, pad_token_id=0, **sizes)
    return transformers.LlamaForSequenceClassification(config)


def classified(rank: int, ranks: int, folder: Path) -> Tensor:
    """The logits of a classifier with an adapter, trained and saved."""
    import peft

    model = peft.get_peft_model(classifier(), peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
    sharded = dzero.shard(model, stage=3, precision="fp32")
    optim = dzero.AdamW(sharded, lr=0.1)
    words = torch.arange(1, 19).view(3, 6)
    for _ in range(2):
        sharded.model(input_ids=words, labels=torch.arange(3)).loss.backward()
        optim.step()
        optim.zero_grad()
    dzero.save_pretrained(sharded, folder)
    with torch.no_grad():
        return sharded.model(input_ids=words).logits


def test_the_head_of_a_classifier_is_in_its_adapter(pool: Pool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    (found,) = pool.run(classified, 1, tmp_path / "adapter")
    loaded, words = peft.PeftModel.from_pretrained(classifier(), tmp_path / "adapter").eval(), torch.arange(1, 19)
    with torch.no_grad():
        logits = loaded(input_ids=words.view(3, 6)).logits
        before = classifier().eval()(input_ids=words.view(3, 6)).logits
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)  # fp32 sums of 16 products of values below 10
    assert (logits - before).abs().max() > 0.1


def averaged(rank: int, ranks: int) -> list[tuple[list[Tensor], list[bool]]]:
    return [averaged_at(rank, ranks, stage) for stage in range(4)]


def averaged_at(rank: int, ranks: int, stage: int) -> tuple[list[Tensor], list[bool]]:
    """An average of the weights as `torch.optim.swa_utils` keeps it, updated after forwards and copied back."""
    sharded = dzero.shard(net(), stage=stage, precision="fp32")
    optim = dzero.TorchOptimizer(sharded, torch.optim.SGD, lr=0.1)
    average = [param.detach().clone() for param in sharded.model.parameters()]
    update = get_ema_multi_avg_fn(0.5)
    for step in range(3):
        sharded.model(data(step, rank, ranks)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            sharded.model(data(step, rank, ranks))
            optim.synchronize()
            update(average, [param.detach() for param in sharded.model.parameters()], step)
    are_sharded = [isinstance(param, DTensor) for param in sharded.model.parameters()]
    return whole(average), are_sharded


def test_an_average_of_weights_after_a_forward(pool: Pool) -> None:
    model = net()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.n_averaged.fill_(1)  # of the initial weights
    for step in range(3):
        model(data(step, 0, 1)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        average.update_parameters(model)
    for by_stage in pool.run(averaged, 2):
        for found, are_sharded in by_stage:
            assert all(are_sharded)
            for value, expected in zip(found, average.module.parameters(), strict=True):
                torch.testing.assert_close(value, expected.detach(), rtol=0, atol=TOLERANCE)
