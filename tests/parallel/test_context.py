"""Context parallelism: attention over cut sequences is that over whole ones, and training that of one process."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison_steps import SHORT, of_lengths
from context_cases import (
    CHUNKS,
    SEQUENCES,
    SHAPE,
    TOKENS,
    Call,
    Run,
    attended,
    oracle,
    peak_of_attention,
    plain_attention,
    rows_of,
    trained,
)
from pool import Pool
from small_runs import settled, train, write_text
from torch import Tensor, nn

from dzero import make_mesh
from dzero.comm.ledger import Entry, Ledger, Traffic
from dzero.config import ConfigError
from dzero.mesh import context_group
from dzero.mesh_config import CP_ATTENTIONS, MeshConfig
from dzero.models.llama import Llama
from dzero.parallel.context.attention import ATTENTIONS
from dzero.parallel.context.parallelize import AttentionSizes, ContextParallel, expected_context
from dzero.parallel.context.zigzag import Zigzag, cut, joined
from dzero.parallel.divisibility import check_heads
from dzero.plan.run_layout import workers_of

FP32, FP64 = 1e-5, 1e-12
"""Relative to the largest value, and of training to the length of each parameter: sums are cut elsewhere."""

IN_FP64 = ("all_gather", "ulysses")
"""torch's ring merges in fp32."""
CALLS = [
    *(Call(kind=kind, ranks=ranks, kv_heads=kv) for kind, ranks, kv in product(ATTENTIONS, (2, 4), (8, 4))),
    *(Call(kind=kind, ranks=ranks, kv_heads=4, dtype=torch.float64) for kind, ranks in product(IN_FP64, (2, 4))),
    Call(kind="all_gather", ranks=2, kv_heads=1, heads=3, dtype=torch.float64, tile=5),
    Call(kind="all_gather", ranks=4, kv_heads=2, dtype=torch.float64, tile=4),
    *(Call(kind=kind, ranks=2, kv_heads=4, dtype=torch.float64, exact=False) for kind in IN_FP64),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_attention_over_parts_is_that_over_whole_sequences(pool: Pool, call: Call) -> None:
    """Forward and backward; where tiles are shorter than a chunk, the last is the shortest."""
    told = pool.run(attended, call.ranks, call)
    allowed = FP64 if call.dtype == torch.float64 else FP32
    for index, want in enumerate(plain_attention(call)):
        got = torch.full_like(want, torch.nan)
        for rank, (results, _, _) in enumerate(told):
            got[:, :, rows_of(rank, call.ranks, call.tokens)] = results[index].double()
        assert (got - want).abs().max() < allowed * want.abs().max(), ("result", "query", "key", "value")[index]


@pytest.mark.parametrize("call", [call for call in CALLS if call.exact], ids=str)
def test_attention_moves_what_the_formula_says(pool: Pool, call: Call) -> None:
    """Of 2 sequences, heads of 6 dims: the ledger, the formula written out, and what torch itself sends."""
    others, size, share = call.ranks - 1, call.dtype.itemsize, call.tokens // call.ranks
    queries, keys = (2 * share * heads * 6 * size for heads in (call.heads, call.kv_heads))
    want = {
        "all_gather": {
            ("all_gather", Traffic(1, others * 2 * keys)),
            ("reduce_scatter", Traffic(1, others * 2 * keys)),
        },
        "ulysses": {("all_to_all", Traffic(4, 2 * others * (queries + 2 * keys + queries) // call.ranks))},
        "ring": {("permute", Traffic(3 * others + 1, 2 * keys * (3 * others + 1)))},
    }[call.kind]
    sizes = AttentionSizes(tokens=2 * share, heads=call.heads, kv_heads=call.kv_heads, head_dim=6, dtype=call.dtype)
    formula = expected_context(call.kind, sizes, ranks=call.ranks, calls=1, recomputed=False)
    for _, booked, sent in pool.run(attended, call.ranks, call):
        assert booked == formula
        assert {(entry.kind, traffic) for entry, traffic in booked.items()} == want
        assert {(entry.phase, entry.axis) for entry in booked} == {("context", "cp")}
        how = "all_to_all_single" if call.kind == "ring" else "send"
        assert sent == {how: sum(traffic.sent_bytes for traffic in booked.values())}


@pytest.mark.parametrize("kind", [*ATTENTIONS])
def test_nothing_of_time_x_time_is_made(pool: Pool, kind: str) -> None:
    """Less than a quarter of one head's scores; a mask of both chunks alone would be a quarter."""
    call = Call(kind=kind, ranks=2, heads=2, kv_heads=2, tokens=4096)
    assert max(pool.run(peak_of_attention, 2, call)) < 4096 * 4096 * 4 // 4


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_token_has_one_rank_and_all_ranks_as_much_work(ranks: int) -> None:
    whole = torch.arange(2 * 24 * 3).view(2, 24, 3)
    for rank in range(ranks):
        rows, own = rows_of(rank, ranks, 24), Zigzag(rank, ranks)
        assert torch.equal(own.positions(24 // ranks), rows)
        assert torch.equal(own.part(whole), whole[:, rows])
        assert int((rows + 1).sum()) * ranks == 24 * 25 // 2, "pairs of a query and a key that it sees"
    assert torch.equal(joined(cut(whole, ranks)), whole)
    assert torch.equal(cut(whole, ranks)[-1], whole[:, rows_of(ranks - 1, ranks, 24)])
    assert sorted(CHUNKS[ranks]) == sorted(2 * [*range(ranks)])


RUNS = [
    *(Run(dp=2, stage=stage) for stage in range(4)),
    *(Run(dp=2, stage=stage, microbatches=2, attention="ulysses") for stage in (1, 3)),
    *(Run(cp=4, stage=stage, attention=kind) for stage, kind in ((3, "all_gather"), (2, "ulysses"), (3, "ring"))),
    Run(stage=1, tp=2, attention="ring", microbatches=2, recompute="full"),
    Run(dp=2, stage=2, attention="ring", recompute="selective"),
    *(Run(stage=stage, microbatches=2, offload="host") for stage in (0, 3)),
    Run(stage=3, tp=2),
    Run(stage=2, tp=2, attention="ulysses", microbatches=2),
    Run(stage=0, tp=2, microbatches=2),
    Run(stage=1, tp=2, attention="ulysses", recompute="full"),
    Run(dp=2, stage=2, replicate=2),
    Run(cp=4, stage=1, replicate=2, attention="ulysses"),
    Run(stage=3, recompute="full", loss_tiles=2, tile=3),
    Run(stage=1, recompute="selective", attention="ulysses"),
    Run(stage=2, recompute="selective"),
]
MORE = [
    *(Run(dp=2, stage=stage, microbatches=2, attention="ulysses") for stage in (0, 2)),
    *(Run(stage=stage, microbatches=2, offload="host") for stage in (1, 2)),
]
ALL = of_lengths(RUNS, lambda run: (run.dp, run.cp, run.tp, run.attention), MORE)
SEEN: dict[Run, list[dict[str, Any]]] = {}


def told_by(pool: Pool, run: Run) -> list[dict[str, Any]]:
    if run not in SEEN:
        SEEN[run] = pool.run(trained, run.ranks, run, timeout_s=300)
    return SEEN[run]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("run", ALL, ids=str)
def test_every_stage_trains_as_in_one_process(pool: Pool, run: Run) -> None:
    told = told_by(pool, run)
    want = oracle(run.dp, run.microbatches, run.steps)
    for step, expected in enumerate(want.losses):
        losses = [of_rank["losses"][step] for of_rank in told]
        assert len({*losses}) == run.dp * run.cp, "ranks of cp see tokens of their own, those of tp the same"
        assert sum(losses) / len(losses) == pytest.approx(expected, rel=FP32)
        assert {of_rank["norms"][step] for of_rank in told} == {told[0]["norms"][step]}
        assert told[0]["norms"][step] == pytest.approx(want.norms[step], rel=FP32)
    params = told[0]["params"]
    assert params.keys() == want.params.keys()
    for name, value in want.params.items():
        apart = (params[name] - value).norm() / value.norm()
        assert apart < FP32, f"{name}: {apart:.1e}"


def test_every_stage_has_the_same_bits(pool: Pool) -> None:
    first, *others = (told_by(pool, Run(dp=2, stage=stage, steps=SHORT))[0]["params"] for stage in range(4))
    for params in others:
        assert [name for name, value in first.items() if not torch.equal(value, params[name])] == []


@pytest.mark.parametrize("run", ALL, ids=str)
@pytest.mark.product(keep=5)
def test_a_step_moves_what_the_formula_says(pool: Pool, run: Run) -> None:
    """Every layer and microbatch, and once more in backward where its forward is made again."""
    calls, others = SHAPE.layers * run.microbatches, run.cp - 1
    queries, keys = (SEQUENCES * TOKENS // run.cp * heads // run.tp * 4 * 4 for heads in (8, 4))
    forwards = calls * (1 if run.recompute == "none" else 2)
    moved = {
        "all_gather": {
            "all_gather": Traffic(forwards, forwards * others * 2 * keys),
            "reduce_scatter": Traffic(calls, calls * others * 2 * keys),
        },
        "ulysses": {
            "all_to_all": Traffic(2 * (forwards + calls), (forwards + calls) * others * 2 * (queries + keys) // run.cp)
        },
        "ring": {
            "permute": Traffic(
                (forwards + calls) * others + calls * run.cp, ((forwards + calls) * others + calls * run.cp) * 2 * keys
            )
        },
    }[run.attention]
    want = {Entry("context", kind, "cp", "float32"): traffic for kind, traffic in moved.items()}
    assert [of_rank["moved"] for of_rank in told_by(pool, run)] == [want] * run.ranks


LINES = [
    "mesh.cp=2 zero.stage=3 precision=fp32 train.accumulate=2",
    "mesh.cp=2 zero.stage=2 precision=bf16 mesh.cp_attention=ulysses model.kv_heads=2 block.activation_checkpoint=full",
    "mesh.dp=1 mesh.cp=2 mesh.tp=2 zero.stage=1 precision=fp32 model.kv_heads=2",
    "mesh.cp=2 zero.stage=2 precision=fp32 block.compile=true",
    "mesh.cp=2 mesh.cp_attention=ring zero.stage=3 precision=bf16 model.kv_heads=1 train.accumulate=2",
]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("line", LINES)
def test_train_py_trains_over_cut_sequences(pool: Pool, tmp_path: Path, line: str) -> None:
    """The losses of a run with whole sequences, as many of them, and the traffic of theory."""
    text = write_text(tmp_path / "text.txt")
    settings = ["train.evaluate_every_steps=2", *line.split()]
    alone = [each for each in settings if not each.startswith("mesh.")]
    run = settled(text, *settings)
    told = pool.run(train, workers_of(run), run, tmp_path / "cut", timeout_s=300)
    (want,) = pool.run(train, 1, settled(text, *alone), tmp_path / "whole", timeout_s=300)
    allowed = 2e-2 if "bf16" in line else FP32
    assert all(each.agrees and "context" in each.phases for each in told)
    for each in told:
        assert each.losses == pytest.approx(want.losses, rel=allowed)
        assert each.held_out == pytest.approx(want.held_out, rel=allowed)


def test_a_run_goes_on_over_cut_sequences_and_back(pool: Pool, tmp_path: Path) -> None:
    """Two steps with whole sequences, two with cut ones, two with whole ones: a step is the same 4 sequences."""
    text = write_text(tmp_path / "text.txt")
    saving = ["checkpoint.every=2", f"checkpoint.folder={tmp_path / 'saved'}"]
    settings = ["precision=fp32", "train.global_sequences=4", "train.accumulate=null", "train.evaluate_batches=0"]
    settings += ["schedule.kind=constant", "schedule.warmup_steps=0"]
    want = pool.run(train, 2, settled(text, *settings, "train.steps=6"), tmp_path)[0].losses
    losses = []
    for steps, mesh in ((2, "mesh.cp=1"), (4, "mesh.cp=2"), (6, "mesh.dp=2")):
        run = settled(text, *settings, *saving, f"train.steps={steps}", mesh, "launch.workers=2", "resume=auto")
        losses += pool.run(train, 2, run, tmp_path, timeout_s=300)[0].losses
    assert losses == pytest.approx(want, rel=FP32)


def refused(tmp_path: Path, *settings: str) -> str:
    with pytest.raises(ConfigError) as error:
        settled(tmp_path, *settings)
    return str(error.value)


def test_settings_that_do_not_fit_are_named_with_what_does(tmp_path: Path) -> None:
    told = refused(tmp_path, "mesh.cp=4", "train.sequence_tokens=36")
    assert "mesh.cp=4 does not divide train.sequence_tokens=36" in told
    assert "take a multiple of 8, as train.sequence_tokens=32" in told
    told = refused(tmp_path, "mesh.cp=2", "mesh.tp=4", "train.sequence_tokens=36", "model.heads=4", "model.kv_heads=4")
    assert "mesh.cp=2 x mesh.tp=4 does not divide train.sequence_tokens=36" in told
    assert "take a multiple of 8, as" in told
    assert "mesh.cp_attention=ulysses has no effect with mesh.cp=1" in refused(tmp_path, "mesh.cp_attention=ulysses")
    told = refused(tmp_path, "mesh.cp_attention=flash", "mesh.cp=2")
    assert "mesh.cp_attention='flash': choose one of ['all_gather', 'ulysses', 'ring']" in told
    told = refused(tmp_path, "mesh.cp=2", "mesh.cp_attention=ulysses")  # of 2 heads and 1 of keys
    assert "mesh.cp=2, which does not divide heads=2 and kv_heads=1" in told
    assert [*CP_ATTENTIONS] == [*ATTENTIONS]


def test_ranks_that_the_degrees_do_not_make_get_the_factorings() -> None:
    with pytest.raises(
        ValueError, match=re.escape("mesh.cp=2 x mesh.tp=2, but there are 6 ranks: (dp, cp, tp, pp)")
    ) as e:
        MeshConfig(cp=2, tp=2).data_ranks(6)
    assert "(1, 2, 3, 1)" in str(e.value)
    mesh = MeshConfig(dp=2, cp=2, tp=2)
    assert (mesh.ranks, mesh.data_ranks(8), mesh.readers(4)) == (8, 4, 2)
    with pytest.raises(ValueError, match=re.escape("launch.workers=8")):
        mesh.data_ranks(4)


def test_heads_that_ulysses_cannot_share_out_are_named() -> None:
    with pytest.raises(ValueError, match=r"mesh.cp=4, which does not divide heads=6 and kv_heads=3 .* of \[1, 3\]"):
        check_heads(6, 3, 4)
    check_heads(8, 4, 4)


def test_sequences_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match=r"sequences of 10 tokens over cp=2 ranks: .*take 8 tokens"):
        Zigzag(0, 2).part(torch.zeros(1, 10))


def refusals(rank: int, ranks: int) -> list[str]:
    """Of a library's user: a model without the methods, another attention, ranks that do not divide."""
    mesh = make_mesh("cpu")
    group = context_group(mesh, 1)
    told = []
    for refused in (
        lambda: ContextParallel(nn.Linear(2, 2), group, Ledger(), attention="all_gather", exact=True),
        lambda: ContextParallel(nn.Linear(2, 2), group, Ledger(), attention="flash", exact=True),
        lambda: context_group(mesh, 2),
    ):
        with pytest.raises(ValueError, match="cp") as error:
            refused()
        told.append(str(error.value))
    return told


def test_what_a_library_asks_in_vain_is_named(pool: Pool) -> None:
    (told,) = pool.run(refusals, 1)
    model, attention, ranks = told
    assert "mesh.cp=1: Linear has no module with attend()" in model
    assert "mesh.cp_attention='flash': choose one of ['all_gather', 'ulysses', 'ring']" in attention
    assert "cp=2 does not divide the 1 data-parallel ranks; allowed: [1]" in ranks


def test_positions_count_for_the_longest_sequence() -> None:
    model = Llama(SHAPE)
    tokens = torch.arange(8).view(1, 8)
    shifted = model.features(tokens, torch.arange(8) + 5)
    assert torch.equal(model.features(tokens), model.features(tokens, torch.arange(8)))
    assert torch.allclose(shifted, model.features(tokens), atol=1e-5), "angles are relative"
    apart: Tensor = model.features(tokens, 2 * torch.arange(8)) - model.features(tokens)
    assert apart.abs().max() > 1e-4
