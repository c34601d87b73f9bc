"""Checkpoints have the names of the model as built, also where `torch.compile` or `checkpoint_wrapper` wrapped it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from written_checkpoints import MANIFEST, read, reseal, reseal_index

import dzero

WRAPPERS: dict[str, Any] = {
    "none": lambda block: block,
    "compile": lambda block: torch.compile(block, backend="eager"),
    "checkpoint": checkpoint_wrapper,
    "both": lambda block: torch.compile(checkpoint_wrapper(block), backend="eager"),
}


BOTH = "_orig_mod._checkpoint_wrapped_module."


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.scale
        return out


class Net(nn.Module):
    def __init__(self, wrapper: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(WRAPPERS[wrapper](Block()) for _ in range(2)))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


class Run:
    def __init__(self, wrapper: str, folder: Path, moments: str) -> None:
        torch.manual_seed(0)
        self.sharded = dzero.shard(
            Net(wrapper), dzero.ZeroConfig(stage=2), precision=dzero.PrecisionConfig(param="fp32", moments=moments)
        )
        params = self.sharded.named_params()
        first = [param for name, param in params.items() if "linear" in name]
        rest = [param for name, param in params.items() if "linear" not in name]
        self.optim = dzero.AdamW(self.sharded, [{"params": first, "lr": 0.01}, {"params": rest}], lr=0.02)
        config = dzero.CheckpointConfig(folder=str(folder))
        self.checkpoints = dzero.Checkpointer(config, self.sharded, self.optim)

    def step(self, rank: int, number: int) -> None:
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * number + rank))
        self.sharded.model(data).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()

    def values(self) -> list[Tensor]:
        buffers = [buffer.clone() for buffer in self.sharded.model.buffers()]
        return [param.full_tensor() for param in self.sharded.named_params().values()] + buffers


def as_wrapped(name: str) -> str:
    """The name that a parameter or buffer has in a block that both wrappers hold."""
    return name.replace("blocks.0.", f"blocks.0.{BOTH}").replace("blocks.1.", f"blocks.1.{BOTH}")


def with_names_of_wrappers(state: dict[str, Any]) -> None:
    """Change the state in a manifest as versions saved it that did not leave wrappers out of names."""
    optim = state["optim"]
    optim["states"] = {as_wrapped(name): values for name, values in optim["states"].items()}
    for group in optim["groups"]:
        group["params"] = [as_wrapped(name) for name in group["params"]]


def renamed(index: dict[str, Any]) -> None:
    """The same of a rank's index."""
    for part in index["parts"].values():
        part["of"] = part["of"] and as_wrapped(part["of"])
    index["parts"] = {as_wrapped(name): part for name, part in index["parts"].items()}


def saved_and_resumed(rank: int, ranks: int, folder: Path, before: str, after: str, moments: str, old: bool) -> bool:
    """Whether a run of other wrappers goes on as the run that saved did. `old`: names of wrappers are saved."""
    run = Run(before, folder, moments)
    with run.checkpoints as checkpoints:
        run.step(rank, 0)
        run.optim.param_groups[0]["lr"] = 0.005
        for buffer in run.sharded.model.buffers():
            buffer.add_(1.0 + rank)
        checkpoints.save(1, {})
        checkpoints.finish()
        run.step(rank, 1)
    if old and rank == 0:
        for each in range(ranks):
            reseal_index(folder / "step_00000001", each, renamed)
        reseal(folder / "step_00000001" / MANIFEST, lambda body: with_names_of_wrappers(body["state"]))
    dist.barrier()
    expected, rates = run.values(), [group["lr"] for group in run.optim.param_groups]
    run = Run(after, folder, moments)
    with run.checkpoints as checkpoints:
        checkpoints.resume("auto")
        run.step(rank, 1)
    assert [group["lr"] for group in run.optim.param_groups] == rates == [0.005, 0.02]
    return all(map(torch.equal, expected, run.values()))


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("before", "after"), [("compile", "none"), ("none", "both"), ("checkpoint", "compile"), ("none", "checkpoint")]
)
def test_a_run_resumes_with_other_wrappers(pool: Pool, tmp_path: Path, before: str, after: str, moments: str) -> None:
    assert pool.run(saved_and_resumed, 2, tmp_path / "checkpoints", before, after, moments, False) == [True] * 2


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("after", ["none", "both"])
def test_checkpoints_with_names_of_wrappers_resume_too(pool: Pool, tmp_path: Path, after: str) -> None:
    assert pool.run(saved_and_resumed, 2, tmp_path / "checkpoints", "both", after, "fp32", True) == [True] * 2


def written(rank: int, ranks: int, folder: Path) -> list[str]:
    """The names in an export of a checkpoint whose names were those of wrapped modules; those of `dzero.weights`."""
    run = Run("both", folder, "fp32")
    run.step(rank, 0)
    with run.checkpoints as checkpoints:
        checkpoints.save(1, {})
        checkpoints.finish()
    stored = read(dzero.DcpReader(folder))
    assert {name.partition(".")[2] for name in stored if "." in name} >= {*Net("none").state_dict()}
    assert not [name for name in stored if "_orig_mod" in name or "_checkpoint" in name]
    return [name for name, _ in dzero.weights(run.sharded)]


def test_weights_have_the_names_as_built(pool: Pool, tmp_path: Path) -> None:
    for names in pool.run(written, 2, tmp_path / "checkpoints"):
        assert {*names} == {*Net("none").state_dict()}
