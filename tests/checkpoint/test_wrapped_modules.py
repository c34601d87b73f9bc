"""Checkpoints have the names of the model as built, also where `torch.compile` or `checkpoint_wrapper` wrapped it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_decoders
import torch
import torch.distributed as dist
from pool import Pool
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training_loops import params_of, train
from written_checkpoints import MANIFEST, read, reseal, reseal_index

import dzero

WRAPPERS: dict[str, Any] = {
    "none": lambda block: block,
    "compile": lambda block: torch.compile(block, backend="eager"),
    "checkpoint": checkpoint_wrapper,
    "both": lambda block: torch.compile(checkpoint_wrapper(block), backend="eager"),
}


def built(wrapper: str) -> small_decoders.Decoder:
    """A decoder of one wrapped block, which has a buffer."""
    model = small_decoders.build("even", layers=1)
    model.layers[0].register_buffer("seen", torch.ones(3))
    model.layers[0] = WRAPPERS[wrapper](model.layers[0])
    return model


def made(wrapper: str, folder: Path, moments: str) -> tuple[dzero.Sharded, dzero.AdamW, dzero.Checkpointer]:
    """With two groups of parameters, of which one is of the block."""
    precision = dzero.PrecisionConfig(param="fp32", moments=moments)
    sharded = dzero.shard(built(wrapper), stage=2, precision=precision)
    params = sharded.named_params()
    first = [param for name, param in params.items() if name.endswith("up.weight")]
    rest = [param for name, param in params.items() if not name.endswith("up.weight")]
    optim = dzero.AdamW(sharded, [{"params": first, "lr": 0.01}, {"params": rest}], lr=0.02)
    return sharded, optim, dzero.Checkpointer(dzero.CheckpointConfig(folder=str(folder)), sharded, optim)


def as_wrapped(name: str) -> str:
    """The name that a parameter or buffer has in a block that both wrappers hold."""
    return name.replace("layers.0.", "layers.0._orig_mod._checkpoint_wrapped_module.")


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


def saved_and_resumed(rank: int, ranks: int, folder: Path, ways: tuple[str, str], moments: str, old: bool) -> list[str]:
    """What differs where a run of other wrappers goes on from that of the one which saved. `old`: with their names."""
    before, after = ways
    sharded, optim, checkpoints = made(before, folder, moments)
    train(sharded, optim, steps=1)
    optim.param_groups[0]["lr"] = 0.005
    for buffer in sharded.model.buffers():
        buffer.add_(1.0 + rank)
    checkpoints.save(1, {})
    checkpoints.close()
    stored, own = read(dzero.DcpReader(folder)), {*built("none").state_dict()}
    assert {name for name, _ in dzero.weights(sharded)} == own
    assert {name.partition(".")[2] for name in stored} >= own
    assert not [name for name in stored if "_orig_mod" in name or "_checkpoint" in name]
    dist.barrier()
    if old and rank == 0:
        for each in range(ranks):
            reseal_index(folder / "step_00000001", each, renamed)
        reseal(folder / "step_00000001" / MANIFEST, lambda body: with_names_of_wrappers(body["state"]))
    dist.barrier()
    other, other_optim, checkpoints = made(after, folder, moments)
    checkpoints.resume("auto")
    checkpoints.close()
    for each, each_optim in ((sharded, optim), (other, other_optim)):
        train(each, each_optim, steps=1, seed=1)
        assert [group["lr"] for group in each_optim.param_groups] == [0.005, 0.02]
    assert next(iter(other.model.buffers())).tolist() == [2.0 + rank] * 3
    ends = zip(params_of(sharded).items(), params_of(other).values(), strict=True)
    return [name for (name, value), found in ends if not torch.equal(value, found)]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(
    ("before", "after", "moments"),
    [
        ("compile", "none", "fp32"),
        ("checkpoint", "compile", "int8"),
        ("none", "both", "fp32"),
        ("none", "checkpoint", "int8"),
    ],
)
def test_a_run_resumes_with_other_wrappers(pool: Pool, tmp_path: Path, before: str, after: str, moments: str) -> None:
    assert pool.run(saved_and_resumed, 2, tmp_path / "shelf", (before, after), moments, False) == [[], []]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("after", ["none", "both"])
def test_checkpoints_with_names_of_wrappers_resume_too(pool: Pool, tmp_path: Path, after: str) -> None:
    assert pool.run(saved_and_resumed, 2, tmp_path / "shelf", ("both", after), "fp32", True) == [[], []]
