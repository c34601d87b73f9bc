"""What people reported of other libraries, tried here as they did: each case agrees with plain torch in one process.

    report                                             what went wrong there
    pytorch/pytorch#140900                             `initial_lr` of a schedule is lost with distributed checkpoints
    pytorch/pytorch#180346                             no norm over parameters of two meshes

Others are asked elsewhere: a unit that some ranks or none reach (pytorch/pytorch#83129, hiyouga/LlamaFactory#1931), and
decay of what no rank reached (pytorch/pytorch#28294), in tests/zero/test_unused.py; a parameter of one element
(pytorch/pytorch#144045) by the net `uneven` of tests/test_parity.py; the mean of a weight whose rows ranks cannot share
evenly (pytorch/pytorch#162692) in test_writes.py; averages of weights after a forward (pytorch/pytorch#144289) in
test_models_and_loops.py; rates, decays and groups after a resume (pytorch/pytorch#129079, hpcaitech/ColossalAI#5151,
NVIDIA-NeMo/Automodel#3882, facebookresearch/fairscale#601) in tests/checkpoint/test_resumed_settings.py; modules that
are trained whole beside an adapter (huggingface/accelerate#3732) in tests/trainer/test_lora.py. The reports are those
of GitHub's trackers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models_of_torch import TOLERANCE, whole
from pool import Pool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import LambdaLR

import dzero


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))


def data(step: int, rank: int, ranks: int) -> Tensor:
    """This rank's part of the step's six rows."""
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
    return rows[rank * 6 // ranks : (rank + 1) * 6 // ranks]


def in_two_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = [*model.parameters()]
    return [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "lr": 0.02}]


def told(model: nn.Module, optim: Any, schedule: LambdaLR, rank: int, ranks: int, steps: range) -> list[Any]:
    """Parameters and settings of groups after some steps, in which a loop writes the weight decay."""
    for step in steps:
        model(data(step, rank, ranks)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        schedule.step()
        for group in optim.param_groups:
            group["weight_decay"] = 0.1 * (step + 1) * (group["lr"] < 0.02)
    keys = ("lr", "initial_lr", "weight_decay")
    groups = [{key: group[key] for key in keys} for group in optim.param_groups]
    return [[whole(param.detach()).clone() for param in model.parameters()], groups]


def schedule_of(optim: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optim, lambda step: 0.5**step)


def resumed(rank: int, ranks: int, folder: Path, stage: int) -> list[Any]:
    """Three steps, and three of a run with other settings that resumes from torch's own distributed checkpoint."""
    for first, lr in ((0, 0.01), (3, 7.0)):
        sharded = dzero.shard(net(), stage=stage, precision="fp32")
        optim = dzero.AdamW(sharded, in_two_groups(sharded.model), lr=lr, eps=1e-3, weight_decay=0.05)
        schedule = schedule_of(optim)
        if first:
            state = state_of(sharded.model, optim, schedule)
            dcp.load(state, checkpoint_id=str(folder))
            set_state_dict(sharded.model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
            schedule.load_state_dict(state["schedule"])
        found = told(sharded.model, optim, schedule, rank, ranks, range(first, first + 3))
        if not first:
            dcp.save(state_of(sharded.model, optim, schedule), checkpoint_id=str(folder))
    return found


def state_of(model: nn.Module, optim: Any, schedule: LambdaLR) -> dict[str, Any]:
    model_state, optim_state = get_state_dict(model, optim)
    return {"model": model_state, "optim": optim_state, "schedule": schedule.state_dict()}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_distributed_checkpoint_of_torch_has_rates_decays_and_groups(pool: Pool, tmp_path: Path, stage: int) -> None:
    model = net()
    optim = torch.optim.AdamW(in_two_groups(model), lr=0.01, eps=1e-3, weight_decay=0.05)
    params, groups = told(model, optim, schedule_of(optim), 0, 1, range(6))
    for found, found_groups in pool.run(resumed, 2, tmp_path / "saved", stage):
        assert found_groups == groups
        for value, expected in zip(found, params, strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=TOLERANCE)


def two_meshes(rank: int, ranks: int) -> list[float]:
    """One norm of a model that all ranks divide, and of one of which each rank has a replica."""
    models = [dzero.shard(net(), stage, precision="fp32") for stage in (3, 0)]
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
