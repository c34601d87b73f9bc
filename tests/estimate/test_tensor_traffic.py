"""What matrices that are cut exchange: the formula is what a simulated rank's operators call, to the byte."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from simulator.scenario import Scenario
from simulator.simulate import simulate

from dzero import ZeroConfig
from dzero.comm.dtensor_traffic import PHASE
from dzero.comm.ledger import Entry, Traffic
from dzero.mesh_config import MeshConfig
from dzero.models.config import ModelConfig
from dzero.parallel.config import BlockConfig
from dzero.parallel.tensor.traffic import TensorSizes, expected_tensor
from dzero.zero.cost_model import expected_copies

LAYERS, WIDTH, TOKENS, TP = 4, 64, 64, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """shared: experts of a mixture that all tokens go through; None: no mixture."""

    stage: int = 2
    microbatches: int = 2
    recompute: str = "none"
    shared: int | None = None
    balance: str = "none"
    tied: bool = False
    parts: int = 1
    part: int = 0

    @property
    def model(self) -> ModelConfig:
        sizes = {"hidden_size": WIDTH, "layers": LAYERS, "heads": 4, "kv_heads": 4, "ffn_size": 128, "vocab_size": 256}
        if self.shared is None:
            return ModelConfig(**sizes, tied=self.tied)
        return ModelConfig(kind="moe", **sizes, experts=4, top_k=2, shared_experts=self.shared, balance=self.balance)


CASES = [
    Case(stage=3),
    Case(stage=1, tied=True),
    Case(stage=3, microbatches=1, recompute="full"),
    Case(recompute="selective"),
    Case(shared=0),
    Case(shared=0, recompute="full"),
    Case(shared=1, microbatches=1),
    Case(shared=1, recompute="full"),
    Case(shared=0, balance="loss"),
    Case(shared=1, balance="loss", recompute="full"),
    Case(stage=1, microbatches=4, parts=2),
    Case(microbatches=4, parts=2, part=1, recompute="full"),
]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_formula_is_what_a_simulated_step_calls(case: Case) -> None:
    mesh = MeshConfig(dp=2, tp=TP, pp=case.parts, ep=1 if case.shared is None else 4)
    found = simulate(
        Scenario(
            model=case.model,
            ranks=2 * TP * case.parts,
            sequences=1,
            tokens=TOKENS,
            accumulate=case.microbatches,
            zero=ZeroConfig(stage=case.stage),
            mesh=mesh,
            block=BlockConfig(activation_checkpoint=case.recompute),
        ),
        part=case.part,
    )
    sizes = TensorSizes(
        tokens=TOKENS,
        width=WIDTH,
        blocks=LAYERS // case.parts,
        cuts_ffn=case.shared != 0,
        experts=4 if case.balance == "loss" else 0,
        has_first=case.part == 0,
        has_last=case.part == case.parts - 1,
        dtype=torch.bfloat16,
    )
    due = expected_tensor(sizes, ranks=TP, microbatches=case.microbatches, recomputed=case.recompute != "none")
    for entry, traffic in expected_copies(found.layout, found.shapes).items():
        due[entry] = due.get(entry, Traffic()) + traffic
    moved: dict[Entry, Traffic] = {entry: each for entry, each in found.traffic.items() if entry.phase == PHASE}
    assert moved == due


def test_sums_of_as_many_numbers_are_counted_apart() -> None:
    """As many tokens as two for each expert: 3 sums of the loss, and one for each of 2 blocks."""
    sizes = TensorSizes(
        tokens=16, width=8, blocks=2, cuts_ffn=False, experts=8, has_first=True, has_last=True, dtype=torch.bfloat16
    )
    moved = expected_tensor(sizes, ranks=2, microbatches=1, recomputed=False)
    assert moved[Entry(PHASE, "all_reduce", "tp", "float32")] == Traffic(5, 5 * 16 * 4)
