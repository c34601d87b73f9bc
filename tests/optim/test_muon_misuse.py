"""What Muon cannot do, or would do silently wrong, is an error that names the setting or the parameter."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from small_runs import settled
from tiled_models import sharded_llama
from torch import nn
from training_loops import sharded_net

from dzero import Muon, MuonConfig, OffloadConfig, RunError, Sharded, TorchOptimizer, ZeroConfig, make_mesh, shard
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama
from dzero.models.meta_init import MetaInitializer
from dzero.optim.build import build_optimizer
from dzero.optim.config import OptimConfig
from dzero.parallel.config import BlockConfig
from dzero.parallel.tensor.parallelize import parallelize_tensor
from dzero.plan.run_layout import check_all_here

SETTINGS = {
    "optim.muon.momentum=1.0": "optim.muon.momentum=1.0: must be a number in [0, 1)",
    "optim.muon.lr=-1": "optim.muon.lr=-1.0: must be a number in [0, 1e+06], or null",
    "optim.muon.iterations=0": "optim.muon.iterations=0: must be a whole number ≥ 1",
    "optim.muon.scale=big": "optim.muon.scale='big': choose one of ['rms', 'original']",
    "optim.muon.compute=fp16": "optim.muon.compute='fp16': choose auto, fp32 or bf16",
    "+optim.options.momentum=0.9": "optim.options={momentum:0.9} has no effect with optim.rule=muon",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_do_not_fit_are_refused_by_name(tmp_path: Path, setting: str) -> None:
    with pytest.raises(RunError, match=re.escape(SETTINGS[setting])):
        check_all_here([settled(tmp_path, "optim.rule=muon", *setting.split())])


def said(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the messages are compared by the caller
        call()
    return str(error.value)


def groups(sharded: Any, **first: Any) -> list[dict[str, Any]]:
    return [{"params": [p for p in sharded.named_params().values() if p.requires_grad], **first}]


def parallel_llama(zero: ZeroConfig, **degrees: int) -> Sharded:
    with torch.device("meta"):
        model = Llama(LlamaShape(vocab_size=64, hidden_size=32, layers=2, heads=4, kv_heads=4, ffn_size=48))
    mesh, materialise = make_mesh("cpu", tp=2, **degrees), MetaInitializer(model, seed=0, device="cpu")
    fill = parallelize_tensor(model, mesh["tp"]).filling(materialise)
    return shard(model, zero, mesh=mesh, init=fill)


def adafactor(sharded: Sharded) -> TorchOptimizer:
    return TorchOptimizer(sharded, torch.optim.Adafactor, lr=0.1)


def mistakes(rank: int, ranks: int) -> dict[str, str]:
    even = sharded_net("even", stage=2)
    told = {
        "rule": said(lambda: Muon(even, groups(even, rule="muno"))),
        "dims": said(lambda: Muon(even, groups(even, rule="muon"))),
        "none": said(lambda: Muon(even, groups(even))),
        "excluded": said(lambda: Muon(even, muon=MuonConfig(exclude=["layers", "head"]))),
        "torch's": said(lambda: TorchOptimizer(even, torch.optim.LBFGS, lr=0.1)),
    }
    tiled = sharded_llama(BlockConfig(tiles=2), stage=2)
    told["tiles"] = said(lambda: Muon(tiled))
    early = sharded_net(
        "even", stage=2, offload=OffloadConfig(grad="host", master="host", moments="host", overlap="backward")
    )
    told["backward"] = said(lambda: Muon(early))
    cut = parallel_llama(ZeroConfig(stage=0), replicate=1)
    told["torch's, tp"] = said(lambda: TorchOptimizer(cut, torch.optim.LBFGS, lr=0.1))
    told["torch's, tiles"] = said(lambda: adafactor(sharded_llama(BlockConfig(tiles=2), stage=0)))
    both = sharded_net("even", stage=2), sharded_net("even", stage=2)
    one = Muon(both[0])
    named = both[1].named_params()
    matrices = [p for name, p in named.items() if name.startswith("layers.0") and p.ndim == 2]
    rest = [p for p in named.values() if all(p is not each for each in matrices)]
    other = Muon(both[1], [{"params": rest}, {"params": matrices, "rule": "muon"}])
    told["state dict"] = said(lambda: one.load_state_dict(other.state_dict()))
    return told


def uncut(rank: int, ranks: int) -> list[str]:
    """The parameters that Adafactor takes of a model that tp cuts: those that tp leaves whole."""
    sharded = parallel_llama(ZeroConfig(stage=0), replicate=1)
    norms = {name: param for name, param in sharded.named_params().items() if "norm" in name}
    TorchOptimizer(sharded, torch.optim.Adafactor, [*norms.values()], lr=0.1)
    return [*norms]


def test_a_rule_takes_parameters_that_are_whole_where_others_are_cut(pool: Pool) -> None:
    assert "norm.weight" in pool.run(uncut, 2)[0]


def test_mistakes_are_told_with_their_repair(pool: Pool) -> None:
    told = pool.run(mistakes, 2)[0]
    expected = {
        "rule": r"rule='muno': choose one of \['muon', 'adamw'\]",
        "dims": r"layers\.0\.norm1\.weight has 1 dims, Muon's parameters 2",
        "none": r"no parameter is Muon's",
        "excluded": r"no parameter is Muon's.*optim\.muon\.exclude",
        "torch's": r"zero\.stage=2.*elementwise=False if every parameter by itself",
        "tiles": r"parameter \S+tiles\.0\.\S+: block\.tiles=\d with optim\.rule=muon: .* block\.tiles=1",
        "backward": r"offload\.overlap=backward: .* offload\.overlap=forward",
        "torch's, tp": r"parameter \S+: mesh\.tp=2 with optim\.rule=LBFGS: it mixes .* mesh\.tp=1",
        "torch's, tiles": r"parameter \S+tiles\.0\.\S+: block\.tiles=\d with optim\.rule=Adafactor: .* block\.tiles=1",
        "state dict": r"the rules \['adamw', 'muon'\], this optimizer's \['muon', 'adamw'\]",
    }
    assert told.keys() == expected.keys()
    for mistake, words in expected.items():
        assert re.search(words, told[mistake]), (mistake, told[mistake])


class Mixed(nn.Module):
    """Matrices below modules of several names, and an embedding in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.MultiheadAttention(8, 2), nn.Embedding(8, 8)])
        self.conv = nn.Conv1d(8, 8, 3)
        self.lm_head = nn.Linear(8, 8)
        self.row = nn.Linear(8, 1)


def chosen(rank: int, ranks: int) -> tuple[list[list[tuple[str, float, list[str]]]], list[str]]:
    """Rule, decay and parameters of each group, as configured in several ways; and what is told of the first."""
    found, lines = [], []
    for config in (
        OptimConfig(rule="muon"),
        OptimConfig(rule="muon", lr=0.1, muon=MuonConfig(lr=0.2, exclude=["layers"])),
    ):
        optim = build_optimizer(shard(Mixed(), ZeroConfig(stage=2)), config)
        found.append([(g["rule"], g["weight_decay"], g["lr"], optim._names_of(g)) for g in optim.param_groups])
        lines += optim.describe()
    return found, lines


def test_matrices_are_muons_but_embeddings_heads_and_rows(pool: Pool) -> None:
    (default, other), lines = pool.run(chosen, 2)[0]
    assert default[0] == ("muon", 0.1, 3e-4, ["layers.0.weight", "layers.1.in_proj_weight", "layers.1.out_proj.weight"])
    names = {name for _, _, _, names in default[1:] for name in names}
    assert {"layers.2.weight", "conv.weight", "lm_head.weight", "row.weight", "layers.0.bias"} <= names
    assert [(rule, decay) for rule, decay, _, _ in default] == [("muon", 0.1), ("adamw", 0.1), ("adamw", 0.0)]
    assert other[0] == ("muon", 0.1, 0.2, ["lm_head.weight"])
    assert {lr for rule, _, lr, _ in other if rule == "adamw"} == {0.1}
    assert lines[0] == "muon: 3 matrices, 10 other parameters by adamw"
