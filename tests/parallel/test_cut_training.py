"""A model that is cut along tp, cp, pp and ep, alone and together, at every stage: the training of one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import cut_runs
import decoders
import pytest
import torch
from cut_runs import SEQUENCES, TOKENS, WIDTH, Run
from pool import Pool

from dzero.testing import Entry, Traffic

FP32 = 1e-5
"""Relative: of losses and norms of every step, and of the length of each parameter at the end. Sums are cut elsewhere;
but where only layers are, every bit is the same."""
NOT_LEARNT = ("c_attn.bias", "k_proj.bias")
"""What adds to keys alone moves no softmax: its gradient is what rounding leaves."""

PIPED = {"pp": 2, "layers": 4, "microbatches": 4}
MIXED = {"experts": 4}
DEFAULT = [
    Run(stage=3, tp=2, microbatches=2, offload="host", gpt2=True),
    Run(stage=2, tp=2, hf="qwen3"),
    Run(stage=1, cp=2, attention="ring", microbatches=2, recompute="full"),
    Run(stage=0, cp=2, attention="ulysses", heads=8),
    Run(stage=3, cp=2, attention="ulysses", heads=8),
    Run(stage=2, cp=2, loss_tiles=2),
    Run(stage=3, **PIPED, schedule="zero_bubble", parts=2, offload="host", tied=True),
    Run(stage=3, dp=2, ep=2, microbatches=2, offload="host", **MIXED),
    Run(stage=2, tp=2, ep=2, forced=True, top_k=1, **MIXED),
    Run(stage=1, dp=2, ep=2, pp=2, microbatches=2, **MIXED),
]
FULL = [
    Run(stage=3, dp=2, tp=2, microbatches=2, offload="host", gpt2=True),
    Run(stage=1, tp=2, cp=2, attention="ring", microbatches=2, recompute="full"),
    Run(stage=3, dp=2, **PIPED, schedule="zero_bubble", parts=2, offload="host", tied=True),
    Run(stage=2, **PIPED, schedule="interleaved", parts=2, offload="disk"),
    Run(stage=3, dp=4, ep=2, microbatches=2, offload="host", **MIXED),
    Run(stage=2, dp=2, tp=2, ep=4, forced=True, top_k=1, **MIXED),
    *(Run(stage=stage, dp=2, tp=2) for stage in (0, 2)),
    Run(stage=1, dp=2, tp=2, microbatches=2, offload="host", recompute="selective"),
    Run(stage=3, dp=2, tp=2, recompute="full", tied=True),
    Run(stage=1, tp=4, gpt2=True),
    *(Run(stage=stage, tp=2, hf=kind) for kind, stage in (("llama", 3), ("qwen2", 1), ("mistral", 0))),
    *(Run(stage=stage, dp=2, cp=2, microbatches=2, attention="ulysses") for stage in (1, 3)),
    *(Run(stage=s, cp=4, attention=kind) for s, kind in ((3, "all_gather"), (2, "ulysses"), (3, "ring"))),
    Run(stage=2, dp=2, cp=2, attention="ring", recompute="selective", replicate=2),
    Run(stage=2, cp=2, tp=2, attention="ulysses", microbatches=2, recompute="full"),
    *(Run(stage=stage, dp=2, **PIPED) for stage in range(4)),
    Run(stage=0, pp=2, layers=4, schedule="gpipe", offload="host"),
    Run(stage=1, pp=4, layers=4, microbatches=4, tied=True),
    Run(stage=3, dp=2, **PIPED, schedule="interleaved", parts=2, recompute="full"),
    Run(stage=2, dp=2, tp=2, **PIPED, tied=True),
    Run(stage=3, tp=2, **PIPED, recompute="selective", offload="host"),
    Run(stage=3, cp=2, pp=2, microbatches=2, **MIXED),
    Run(stage=0, dp=4, ep=2, **MIXED),
    Run(stage=1, dp=2, ep=2, microbatches=2, tied=True, recompute="full", **MIXED),
    *(Run(stage=stage, dp=2, ep=2, balance="loss", **MIXED) for stage in (1, 3)),
    Run(stage=3, dp=4, ep=2, experts=6, balance="none"),
    Run(stage=1, dp=2, ep=2, offload="disk", **MIXED),
    Run(stage=3, dp=4, ep=2, replicate=2, **MIXED),
    Run(stage=2, cp=2, ep=2, tp=2, attention="ulysses", **MIXED),
    Run(stage=1, cp=2, ep=2, pp=2, microbatches=2, attention="ring", offload="host", **MIXED),
]
SEEN: dict[str, list[dict[str, Any]]] = {}


def told_by(pool: Pool, run: Run) -> list[dict[str, Any]]:
    """What the ranks of a run know; it is made once, and leaves no groups behind when its model is dropped."""
    if str(run) not in SEEN:
        before = len(pool.kept)
        SEEN[str(run)] = pool.run(cut_runs.trained, run.ranks, run, timeout_s=300)
        assert pool.kept[before:] == [] or run.balance == "loss"  # a router's loss keeps the graph of its last forward
    return SEEN[str(run)]


def check(pool: Pool, run: Run) -> None:
    told, (want, wanted_biases) = told_by(pool, run), cut_runs.oracle(cut_runs.known_to_oracle(run))
    for step, expected in enumerate(want.losses):
        losses = [loss for of_rank in told if (loss := of_rank["losses"][step]) is not None]
        assert len(losses) == run.dp * run.cp * run.tp, "the ranks that have the last layers"
        assert len({*losses}) == run.dp * run.cp, "ranks of tp see the same tokens"
        assert sum(losses) / len(losses) == pytest.approx(expected, rel=FP32)
        assert {of_rank["norms"][step] for of_rank in told} == {told[0]["norms"][step]}
        assert told[0]["norms"][step] == pytest.approx(want.norms[step], rel=FP32)
    assert {name for of_rank in told for name in of_rank["params"]} == want.params.keys()
    only_layers = run.dp == run.cp == run.tp == 1 and not run.tied
    for name, value in want.params.items():
        copies = [of_rank["params"][name] for of_rank in told if name in of_rank["params"]]
        assert all(torch.equal(*pair) for pair in pairwise(copies)), f"{name}: copies differ"
        apart = (copies[0].view_as(value) - value).norm() / value.norm()
        if not name.endswith(NOT_LEARNT):
            assert torch.equal(copies[0], value) if only_layers else apart < FP32, f"{name}: {apart:.1e}"
    for rank, of_rank in enumerate(told):
        assert (of_rank["biases"] != {}) == (run.experts > 0 and run.balance == "auxiliary-loss-free")
        for name, bias in of_rank["biases"].items():
            assert bias.any()
            assert torch.equal(bias, wanted_biases[name]), name
        check_traffic(run, rank, of_rank)


def check_traffic(run: Run, rank: int, told: dict[str, Any]) -> None:
    """States move as the library's table says; what models exchange, as is written out here."""
    sent: dict[Entry, Traffic] = told["sent"]
    phases = {entry.phase for entry in told["due"]}
    of_states = {entry: each for entry, each in sent.items() if entry.phase in phases and not between_layers(entry)}
    assert of_states == told["due"]
    by_axis = {axis: {e.kind: t for e, t in sent.items() if e.phase == phase} for phase, axis in PHASES.items()}
    assert by_axis["cp"] == ({} if run.cp == 1 else moved_along_cp(run))
    if run.pp > 1:
        assert by_axis["pp"]["send"] == moved_along_pp(run, rank // (run.dp * run.cp * run.tp))
    if run.ep > 1:
        rows = sent[Entry("experts", "all_to_all", "ep", "float32")]
        calls = run.layers // run.pp * run.microbatches
        times = 3 if run.recompute != "none" else 2  # there and back each: forward, again, and backward
        assert rows == Traffic(2 * times * calls, told["rows"] * times // (times - 1) * WIDTH * 4)


def between_layers(entry: Entry) -> bool:
    """What forward and backward exchange, or gradients of a parameter that both ends of a pipeline share."""
    return entry.axis == "pp" or (entry.phase, entry.kind) == ("experts", "all_to_all")


PHASES = {"context": "cp", "pipeline": "pp"}


def moved_along_cp(run: Run) -> dict[str, Traffic]:
    """Of every layer and microbatch, and once more in backward where its forward is made again; in fp32."""
    calls, others = run.layers // run.pp * run.microbatches, run.cp - 1
    queries = SEQUENCES * TOKENS // run.cp * WIDTH // run.tp * 4
    keys = queries * 4 // run.heads  # 4 heads of keys
    forwards = calls * (1 if run.recompute == "none" else 2)
    if run.attention == "all_gather":
        return {
            "all_gather": Traffic(forwards, forwards * others * 2 * keys),
            "reduce_scatter": Traffic(calls, calls * others * 2 * keys),
        }
    if run.attention == "ulysses":
        moved_bytes = (forwards + calls) * others * 2 * (queries + keys) // run.cp
        return {"all_to_all": Traffic(2 * (forwards + calls), moved_bytes)}
    hops = (forwards + calls) * others + calls * run.cp
    return {"permute": Traffic(hops, hops * 2 * keys)}


def moved_along_pp(run: Run, rank: int) -> Traffic:
    """Hidden states from all stages of a rank but the last of all, and their gradients from all but the first."""
    stages = range(rank, run.pp * run.parts, run.pp)
    sends = sum(stage < run.pp * run.parts - 1 for stage in stages) + sum(stage > 0 for stage in stages)
    calls = sends * run.microbatches
    return Traffic(calls, calls * SEQUENCES * TOKENS // run.cp // run.tp * WIDTH * 4)


FIRST = pytest.mark.full("tests/parallel/test_cut_training.py::test_a_cut_model_trains_as_in_one_process")


@pytest.mark.parametrize("run", [*DEFAULT, *(pytest.param(run, marks=FIRST) for run in FULL)], ids=str)
def test_a_cut_model_trains_as_in_one_process(pool: Pool, run: Run) -> None:
    check(pool, run)


def test_every_stage_has_the_same_bits_over_cut_sequences(pool: Pool) -> None:
    first, other = (told_by(pool, run)[0]["params"] for run in DEFAULT if run.heads == 8)
    assert [name for name, value in first.items() if not torch.equal(value, other[name])] == []


def losses_of(rank: int, ranks: int, name: str) -> list[float]:
    """Of each step of a side of benchmarks/parallel.py, as this rank tells them."""
    import parallel_sides

    experts = {"kind": "moe", "ffn_size": 16, "experts": 4, "top_k": 2, "balance": "none"}
    of_kind = experts if parallel_sides.SIDES[name].cut.ep > 1 else {"ffn_size": 64}
    model = decoders.with_values(256, hidden_size=64, layers=4, **of_kind)
    step = parallel_sides.build(name, model, samples=4)
    generator = torch.Generator().manual_seed(parallel_sides.reader_of(name, rank))
    batch = torch.randint(0, 256, (4, 33), generator=generator)
    return [float(step(batch)) for _ in range(4)]


@pytest.mark.full("tests/parallel/test_cut_training.py::test_a_cut_model_trains_as_in_one_process")
@pytest.mark.parametrize("cut", ["2_dp4.ep2", "3_cp2.pp2"])
def test_the_library_and_torchs_own_pieces_have_the_same_losses(pool: Pool, cut: str) -> None:
    own, hand = (
        [sum(of_step) / 4 for of_step in zip(*pool.run(losses_of, 4, f"{by}_{cut}", timeout_s=200), strict=True)]
        for by in ("dzero", "hand")
    )
    assert own == pytest.approx(hand, rel=2e-4)  # bf16
    assert own[-1] < own[0] - 0.05
