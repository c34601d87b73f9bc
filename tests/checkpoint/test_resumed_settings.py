"""A resumed run has the settings of parameter groups, and the buffers, of one that was never stopped.

The rows of docs/reference/resume.md are what the test walks: every schedule of torch, whatever else writes into groups,
and buffers; each resumes at the same stage, at another one, and on other ranks.
"""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn
from torch.optim import lr_scheduler as schedules
from training_loops import params_of, unequal
from written_checkpoints import MANIFEST, reseal

import dzero
from dzero import CheckpointConfig, CheckpointError

STEPS, STOP, ROWS = 6, 3, 12
PAGE = Path(__file__).parents[2] / "docs/reference/resume.md"


def chained(optim: torch.optim.Optimizer) -> Any:
    of = [schedules.ConstantLR(optim, 0.5, total_iters=4), schedules.ExponentialLR(optim, 0.9)]
    return schedules.ChainedScheduler(of)


def in_sequence(optim: torch.optim.Optimizer) -> Any:
    of = [schedules.LinearLR(optim, 0.1, total_iters=2), schedules.CosineAnnealingLR(optim, 4)]
    return schedules.SequentialLR(optim, of, milestones=[2])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": partial(schedules.LambdaLR, lr_lambda=lambda step: 0.9**step),
    "MultiplicativeLR": partial(schedules.MultiplicativeLR, lr_lambda=lambda step: 0.9),
    "StepLR": partial(schedules.StepLR, step_size=2, gamma=0.1),
    "MultiStepLR": partial(schedules.MultiStepLR, milestones=[1, 5], gamma=0.1),
    "ConstantLR": partial(schedules.ConstantLR, factor=0.5, total_iters=4),
    "LinearLR": partial(schedules.LinearLR, start_factor=0.1, total_iters=5),
    "ExponentialLR": partial(schedules.ExponentialLR, gamma=0.9),
    "SequentialLR": in_sequence,
    "CosineAnnealingLR": partial(schedules.CosineAnnealingLR, T_max=6),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": partial(schedules.ReduceLROnPlateau, patience=0, factor=0.5),
    "CyclicLR": partial(schedules.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2, cycle_momentum=True),
    "CosineAnnealingWarmRestarts": partial(schedules.CosineAnnealingWarmRestarts, T_0=2),
    "OneCycleLR": partial(schedules.OneCycleLR, max_lr=0.1, total_steps=STEPS + 1),
    "PolynomialLR": partial(schedules.PolynomialLR, total_iters=8, power=2.0),
    "SWALR": partial(torch.optim.swa_utils.SWALR, swa_lr=0.01, anneal_epochs=4),
}


class ByHand:
    """What callbacks write into groups before the save: settings of the rule, and values of their own."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._optim, self._steps = optim, 0

    def step(self) -> None:
        self._steps += 1
        for group in self._optim.param_groups if self._steps <= STOP else ():
            group["weight_decay"] = 0.01 * self._steps
            group["betas" if "betas" in group else "momentum"] = (0.8, 0.9) if "betas" in group else 0.3
            group["of_a_callback"] = [1, 2.5]
            group["label"] = "warm"

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]


class WithTensor(schedules.StepLR):
    """StepLR over a rate that is a tensor, which keeps its identity."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        for group in optim.param_groups:
            group["lr"] = torch.tensor(0.1)
        super().__init__(optim, step_size=2, gamma=0.1)


WRITERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    **SCHEDULES,
    "settings written by hand": ByHand,
    "a rate that is a tensor": WithTensor,
}
RULES: dict[str, Callable[[dzero.Sharded], Any]] = {
    "AdamW": lambda sharded: dzero.AdamW(sharded, lr=0.1),
    "SGD": lambda sharded: dzero.TorchOptimizer(sharded, torch.optim.SGD, lr=0.1, momentum=0.9),
}


class Net(nn.Module):
    """A model whose forward writes what it saw of the rank's data into buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("bf16", torch.zeros(3, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(layer(x)).relu()
        self.bf16 += x.detach().mean().bfloat16()
        return x


class Run:
    """A run over batches that ranks divide, with an optimizer of `rule` and what `writer` makes."""

    def __init__(self, folder: Path, writer: str, rule: str, stage: int, offload: str) -> None:
        self.sharded = dzero.shard(Net(), stage=stage, offload=offload, precision="fp32")
        self.optim = RULES[rule](self.sharded)
        self.writer = WRITERS[writer](self.optim)
        self.checkpoints = dzero.Checkpointer(CheckpointConfig(folder=str(folder), keep=9), self.sharded, self.optim)

    def steps(self, rank: int, ranks: int, first: int, last: int) -> None:
        for step in range(first, last):
            data = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))
            share = data[rank * ROWS // ranks : (rank + 1) * ROWS // ranks]
            with self.sharded.microbatch(is_last=True):
                self.sharded.model(share).square().mean().backward()
            self.optim.step()
            self.optim.zero_grad()
            more = [1.0] if isinstance(self.writer, schedules.ReduceLROnPlateau) else []
            self.writer.step(*more)

    def told(self) -> dict[str, Any]:
        self.optim.synchronize()
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.optim.param_groups]
        model = self.sharded.model.eval()
        with torch.no_grad():
            answer = model(torch.ones(2, 5)).clone()
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        return {"groups": groups, "params": params_of(self.sharded), "buffers": buffers, "answer": answer}


def uninterrupted(rank: int, ranks: int, folder: Path, writers: Writers) -> list[dict[str, Any]]:
    found = []
    for number, (writer, rule) in enumerate(writers):
        run = Run(folder / str(number), writer, rule, 3, "none")
        run.steps(rank, ranks, 0, STOP)
        torch.save(run.writer.state_dict(), folder / f"{number}.{rank}.pt")
        run.checkpoints.save(STOP, {})
        run.checkpoints.close()
        run.steps(rank, ranks, STOP, STEPS)
        found.append(run.told())
    return found


def resumed(rank: int, ranks: int, folder: Path, writers: Writers, stage: int, offload: str) -> list[dict[str, Any]]:
    found = []
    for number, (writer, rule) in enumerate(writers):
        run = Run(folder / str(number), writer, rule, stage, offload)
        resumed = run.checkpoints.resume("auto")
        run.writer.load_state_dict(torch.load(folder / f"{number}.0.pt", weights_only=False))
        run.checkpoints.close()
        run.steps(rank, ranks, STOP, STEPS)
        found.append(run.told() | {"notes": [note for note in resumed.notes if "differed" in note]})
    return found


Writers = list[tuple[str, str]]
NeverStopped = tuple[Writers, Path, list[list[dict[str, Any]]]]
OF_FEW = (
    "tests/checkpoint/test_resumed_settings.py::"
    "test_a_resumed_run_has_the_settings_buffers_and_bits_of_one_never_stopped"
)
ONCE = [(name, "SGD" if name == "CyclicLR" else "AdamW") for name in WRITERS]
ALL = ONCE + [(name, "SGD") for name in ("OneCycleLR", "StepLR", "settings written by hand")]
FEW = [each for each in ONCE if each[0] in ("OneCycleLR", "ReduceLROnPlateau", "CyclicLR", "settings written by hand")]
"""Of those that write several settings, go by losses, write momenta, and write what is no setting."""
SETS = [pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.full(OF_FEW))]


def test_the_page_names_what_is_tried() -> None:
    every = {name for name in schedules.__all__ if inspect.isclass(getattr(schedules, name))}
    assert (every - {"LRScheduler"}) | {"SWALR"} == SCHEDULES.keys()
    rows = re.findall(r"^\| `?([A-Za-z ]+?)`? \|", PAGE.read_text(), flags=re.MULTILINE)
    assert set(rows) - {"what", "door"} >= {name for name, _ in ALL}


@pytest.fixture(scope="module", params=SETS)
def never_stopped(request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> NeverStopped:
    """The writers and rules of runs, their checkpoints, and what each rank told of each run at its end."""
    folder = tmp_path_factory.mktemp("saved")
    return request.param, folder, pool.run(uninterrupted, 2, folder, request.param)


@pytest.mark.parametrize(("stage", "offload"), [(1, "host"), pytest.param(3, "none", marks=pytest.mark.full(OF_FEW))])
def test_a_resumed_run_has_the_settings_buffers_and_bits_of_one_never_stopped(
    pool: Pool, never_stopped: NeverStopped, stage: int, offload: str
) -> None:
    writers, folder, wanted = never_stopped
    assert not torch.equal(wanted[0][0]["buffers"]["norm.running_mean"], wanted[1][0]["buffers"]["norm.running_mean"])
    for want, got in zip(wanted, pool.run(resumed, 2, folder, writers, stage, offload), strict=True):
        for writer, one, other in zip(writers, want, got, strict=True):
            assert other["groups"] == one["groups"], writer
            assert torch.equal(other["answer"], one["answer"]), writer
            assert unequal(other["params"], one["params"]) == unequal(other["buffers"], one["buffers"]) == [], writer


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.full(OF_FEW))])
def test_on_other_ranks_settings_are_the_same_and_buffers_those_of_rank_0(
    pool: Pool, never_stopped: NeverStopped, tmp_path: Path, ranks: int
) -> None:
    """Two ranks are others if those that saved shared samples, which is what the manifests are made to say."""
    writers, folder, wanted = never_stopped
    shutil.copytree(folder, saved := tmp_path / "saved")
    for manifest in saved.glob(f"*/step*/{MANIFEST}") if ranks == 2 else ():
        reseal(manifest, lambda body: body["state"]["optim"].update(axes={"data": 1, "tp": 2}))
    for rank, got in enumerate(pool.run(resumed, ranks, saved, writers, 2, "none")):
        for writer, one, other in zip(writers, wanted[0], got, strict=True):
            assert other["groups"] == one["groups"], writer
            assert len(other["notes"]) == (rank == 0)


def overriding(rank: int, ranks: int, folder: Path) -> tuple[dict[str, Any], list[str], str]:
    run = Run(folder, "StepLR", "AdamW", 3, "none")
    run.steps(rank, ranks, 0, STOP)
    run.optim.param_groups[0]["weight_decay"] = 0.5
    run.checkpoints.save(STOP, {})
    run.checkpoints.close()
    again = Run(folder, "StepLR", "AdamW", 3, "none")
    again.optim.param_groups[0].update(lr=0.7, initial_lr=0.7, weight_decay=0.3)
    with pytest.raises((ValueError, CheckpointError)) as refused:
        again.checkpoints.resume("auto", override=["lrr"])
    notes = again.checkpoints.resume("auto", override=["lr"]).notes
    group = again.optim.param_groups[0]
    return {key: group[key] for key in ("lr", "initial_lr", "weight_decay")}, notes, str(refused.value)


def test_settings_are_changed_by_name_and_told(pool: Pool, tmp_path: Path) -> None:
    settings, notes, refused = pool.run(overriding, 2, tmp_path)[0]
    assert settings == {"lr": 0.7, "initial_lr": 0.7, "weight_decay": 0.5}
    assert any("lr of the parameter groups is this run's" in note for note in notes)
    assert "no setting 'lrr'" in refused


def regrouping(rank: int, ranks: int, folder: Path) -> tuple[list[float], str]:
    """Rates of groups that were turned round, and what is said where they are joined."""

    def made(*rates: float) -> tuple[Any, Any]:
        sharded = dzero.shard(Net(), stage=2)
        params = list(sharded.named_params().values())
        groups = [{"params": part, "lr": rate} for part, rate in zip((params[:2], params[2:]), rates, strict=False)]
        optim = dzero.AdamW(sharded, groups or None, lr=0.9)
        return optim, dzero.Checkpointer(CheckpointConfig(folder=str(folder)), sharded, optim)

    _, checkpoints = made(0.1, 0.2)
    checkpoints.save(1, {})
    checkpoints.close()
    optim, checkpoints = made(0.5, 0.5)
    optim.param_groups.reverse()
    checkpoints.resume("auto")
    checkpoints.close()
    with pytest.raises((ValueError, CheckpointError)) as refused:
        made()[1].resume("auto")
    return [group["lr"] for group in optim.param_groups], str(refused.value)


def test_groups_find_their_settings_by_the_names_of_their_parameters(pool: Pool, tmp_path: Path) -> None:
    rates, refused = pool.run(regrouping, 2, tmp_path)[0]
    assert rates == [0.2, 0.1]
    assert "were saved with different ['lr']" in refused
