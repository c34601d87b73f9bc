"""`zero=auto`: what it chooses runs within the budget, is the fastest that does, and leaves alone what was given.

It looks inside, because the oracle tries everything that the search may choose, on budgets that no machine here has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from from_words import run_of
from pool import Pool
from rank_cases import taken_and_moved
from simulator.measured_memory import MeasuredMemory
from small_runs import write_text
from typed_commands import as_torchrun, typed

from dzero import DiskConfig, OffloadConfig, RunError
from dzero.config import RunConfig
from dzero.estimate.candidates import Candidate
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.search import HEADROOM, Fits, Subject, search, short_bytes
from dzero.hardware import format_bytes
from dzero.plan.auto import candidates_of, choose, default_of, given_settings, subject_of, with_choice
from dzero.plan.search_tables import nothing_fits, ranking_tables, words
from dzero.utils.terminal import plain

RANKS, SEQUENCES, VOCABULARY = 2, 8, 1024
SMALL = [
    *("model.hidden_size=128", "model.layers=4", "model.heads=4", "model.kv_heads=2", "model.ffn_size=352"),
    *(f"model.vocab_size={VOCABULARY}", "train.sequence_tokens=128", f"mesh.dp={RANKS}", "zero.reduction=exact"),
    "zero=auto",
]
FREE = ["train.accumulate=null", f"train.global_sequences={SEQUENCES}"]
MIB = 1 << 20
PLENTY = 1 << 40
BUDGETS = [(40, PLENTY), (30, PLENTY), (22, PLENTY), (10, PLENTY), (8, 8), (6, 8)]
"""MiB of one device; of one rank's part of the host."""
Searched = tuple[RunConfig, list[Candidate], Callable[[HardwareConfig], Subject]]
SAME_AS_BY_TRYING = pytest.mark.full(
    "tests/estimate/inside/test_inside_search.py::test_the_search_finds_what_trying_everything_finds"
)


def node(device_mib: int, host_mib: int = PLENTY, disk_mib: int = PLENTY) -> HardwareConfig:
    """One rank's part of a small node; links slow enough that what moves is seen in the pace."""
    figures: dict[str, Any] = dict.fromkeys(("host_bandwidth", "fp8_flops", "network"))
    figures |= dict.fromkeys(("bf16_flops", "fp16_flops", "fp32_flops"), 2e11)
    figures |= dict.fromkeys(("host_link", "node_link"), 2e9) | dict.fromkeys(("disk_read", "disk_write"), 1e9)
    figures |= dict.fromkeys(("memory_efficiency", "link_efficiency"), 1.0)
    figures |= dict.fromkeys(("reserved_bytes", "operator_s"), 0)
    return replace(
        run_of("hardware=h100_80g").hardware,
        **figures,
        name="a small node",
        devices_per_node=RANKS,
        device_bytes=device_mib * MIB,
        host_bytes=RANKS * host_mib * MIB,
        disk_bytes=RANKS * disk_mib * MIB,
        efficiency=0.8,
        attention_flops=1e11,
        device_bandwidth=1e13,
        collective_latency_s=1e-5,
        host_memory_bandwidth=2.8e10,
        update_elems_per_s=1e9,
    )


@pytest.fixture(scope="module")
def searched() -> Searched:
    """The small run, everything that is searched for it, and what judges it; each run of the model is made once."""
    config, anywhere = replace(run_of(*SMALL, *FREE), auto=False), node(64)
    subject = subject_of(config, anywhere)
    costs = cache(subject.costs)
    candidates = candidates_of(config, given_settings(config, [*SMALL, *FREE]), anywhere)
    return config, candidates, lambda hardware: replace(subject, costs=costs, hardware=hardware)


def taken_by(rank: int, ranks: int, runs: list[RunConfig]) -> list[MeasuredMemory]:
    """Each of them made, trained for some steps and forgotten."""
    return [taken_and_moved(run, VOCABULARY)[0] for run in runs]


@SAME_AS_BY_TRYING
def test_what_is_chosen_runs_within_each_budget(pool: Pool, searched: Searched, tmp_path: Path) -> None:
    config, candidates, on = searched
    hardware = [node(*budget) for budget in BUDGETS]
    best = [search(candidates, on(each)).best[0] for each in hardware]
    runs = [with_choice(config, each.candidate.settings) for each in best]
    disk = DiskConfig(paths=[str(tmp_path)])
    placed = [
        replace(run, offload=replace(run.offload, disk=disk)) if run.offload.moments == "disk" else run for run in runs
    ]
    found: list[MeasuredMemory] = pool.run(taken_by, RANKS, placed, timeout_s=300)[0]
    for each, choice, run, took in zip(hardware, best, runs, found, strict=True):
        assert took.device_most <= each.device_bytes, run
        assert took.host <= each.share(RANKS).host_bytes, run
        assert took.disk <= each.share(RANKS).disk_bytes, run
        foreseen, device = choice.forecast.memory, choice.forecast.tiers["device"]
        assert device.total_bytes - device.kinds["fragmentation"] == pytest.approx(took.device, rel=0.05), run
        assert (sum(foreseen.host.values()), sum(foreseen.disk.values())) == (took.host, took.disk), run
    assert {run.zero.stage for run in runs} == {0, 1, 2, 3}
    assert {run.block.activation_checkpoint for run in runs} == {"none", "selective", "full"}
    assert {run.offload.moments for run in runs} == {"device", "host", "disk"}
    assert {run.offload.moments_fraction for run in runs} == {0.75, 1.0}
    assert {run.train.microbatch_sequences for run in runs} == {1, 2, 4}


def brute(candidates: list[Candidate], subject: Subject) -> list[Fits]:
    """All that fit, each with its own run of the model."""
    every = [
        Fits(candidate=each, forecast=subject.forecast(each.layout, subject.costs(each.recompute, each.microbatch)))
        for each in candidates
    ]
    fit = [each for each in every if not short_bytes(each.forecast.tiers)]
    return sorted(fit, key=lambda each: (float(f"{each.forecast.pace.step_s:.2e}"), each.candidate.simplicity))


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("budget", [(10,), (40,), (18,), (8, 8), (7, 8), (6,)])
def test_the_search_finds_what_trying_everything_finds(searched: Searched, budget: tuple[int, ...]) -> None:
    """Of each kind the first by its pace; of the first kinds, and those within 5 % of the first, the shortest timeline;
    of those within 5 % of that, the simplest."""
    _, candidates, on = searched
    subject = on(node(*budget))
    every, best = brute(candidates, subject), search(candidates, subject).best
    firsts = {each.candidate.kind: each for each in reversed(every)}.values()
    kinds = sorted(firsts, key=every.index)
    paces = [each.forecast.pace.step_s or 0.0 for each in kinds]
    near = [each for at, each in enumerate(kinds) if at < 5 or paces[at] <= 1.05 * paces[0]]
    ends = [each.forecast.timeline().end_s for each in near]  # type: ignore[union-attr]
    ties = [each for each, end in zip(near, ends, strict=True) if end <= 1.05 * min(ends)]
    assert best[0].candidate == min(ties, key=lambda each: each.candidate.simplicity).candidate
    assert len(best) == min(5, len(near))


@SAME_AS_BY_TRYING
def test_a_model_that_fits_with_room_stays_on_the_device() -> None:
    """Although pace.py hides the host's update whole: a few per cent are no reason to offload."""
    config = run_of(*SMALL, "hardware=h100_80g", "model=llama_1b", "train.sequence_tokens=512", "mesh.dp=8")
    ranking = choose(config, ["zero=auto"]).ranking
    assert {tier for tier, _ in ranking.best[0].forecast.layout.tiers.values()} == {"device"}


def test_what_was_refused_says_what_it_lacks(searched: Searched) -> None:
    _, candidates, on = searched
    hardware = node(20)
    ranking = search(candidates, on(hardware))
    whole = next(each for each in ranking.refused if each.candidate.simplicity == 0)
    (roomy,) = brute([whole.candidate], on(node(1 << 20)))
    need = roomy.forecast.tiers["device"].total_bytes
    assert 0 < whole.short["device"] <= need - int((1 - HEADROOM) * hardware.device_bytes)
    told = plain(ranking_tables(ranking, {}))
    assert "what would come before, but is too large" in told
    assert "on the device" in told


def test_an_impossible_budget_is_refused_with_what_is_lacking(searched: Searched) -> None:
    """bf16 parameters, fp32 masters and two fp32 moments take 2 + 4 + 8 bytes, each rank half of them, wherever."""
    _, candidates, on = searched
    subject = on(node(2, 2, 1))
    states = 14 * sum(param.elems for unit in subject.units for param in unit.params) // RANKS
    assert states > (2 + 2 + 1) * MIB, "all tiers together are too small"
    ranking = search(candidates, subject)
    assert ranking.best == ()
    assert ranking.closest is not None
    tiers = ranking.closest.forecast.tiers
    assert sum(tier.total_bytes for tier in tiers.values()) >= states
    told = nothing_fits(ranking, {})
    for (name, tier), mib in zip(tiers.items(), (2, 2, 1), strict=True):
        usable = int(0.95 * mib * MIB)
        if (lacks := tier.total_bytes - usable) > 0:
            assert f"  {name:<6}  {format_bytes(tier.total_bytes)} of {mib}.00 MiB" in told
            assert f"({format_bytes(usable)} usable): {format_bytes(lacks)} short" in told
    assert re.search(r"to mend it: .*(more ranks|more scratch space)", told)
    enough = {name: -(-int(tier.total_bytes / (1 - HEADROOM)) // MIB) + 1 for name, tier in tiers.items()}
    assert search(candidates, on(node(enough["device"], enough["host"], enough["disk"]))).best


GIVEN = {
    "offload.master=host offload.master_fraction=0.5": 12,
    "block.activation_checkpoint=full": 10,
    "zero.stage=2": 10,
    "train.microbatch_sequences=2": 10,
}


@SAME_AS_BY_TRYING
@pytest.mark.parametrize("line", GIVEN)
def test_what_is_given_stays_and_the_step_keeps_its_sequences(searched: Searched, line: str) -> None:
    given, hardware = [*line.split(), *(FREE if "offload" in line or "block" in line else [])], node(GIVEN[line])
    config = replace(run_of(*SMALL, *given), auto=False)
    candidates = candidates_of(config, given_settings(config, given), hardware)
    for candidate in candidates:
        run = with_choice(config, candidate.settings)
        assert run.train.sequences(RANKS) == config.train.sequences(RANKS)
        for key, _, value in (word.partition("=") for word in line.split()):
            group, _, name = key.partition(".")
            assert str(getattr(getattr(run, group), name)) == value
    assert len({tuple(each.settings.items()) for each in candidates}) == len(candidates) > 1
    _, _, on = searched
    assert search(candidates, on(hardware)).best


def test_without_a_figure_of_the_hardware_the_simplest_comes_first(searched: Searched) -> None:
    _, candidates, on = searched
    ranking = search(candidates, on(replace(node(24), bf16_flops=None)))
    first = ranking.best[0]
    assert first.forecast.pace.step_s is None
    assert first.candidate.simplicity == min(each.candidate.simplicity for each in ranking.best)
    assert {tier for tier, _ in first.forecast.layout.tiers.values()} == {"device"}
    assert "without flops of the hardware the simplest, not the fastest" in plain(ranking_tables(ranking, {}))


@SAME_AS_BY_TRYING
def test_a_cpu_machine_has_one_memory_so_the_host_wins_nothing() -> None:
    words_of = [*SMALL, "hardware=laptop", "model.layers=16", "train.microbatch_sequences=1"]
    config = replace(run_of(*words_of), auto=False)
    laptop = config.hardware
    subject, candidates = subject_of(config, laptop), candidates_of(config, {"train.microbatch_sequences"}, laptop)
    subject = replace(subject, costs=cache(subject.costs))
    chosen = []
    for mib in (64, 48, 40, 36, 32):
        one_memory = replace(laptop, host_bytes=RANKS * mib * MIB, device_bytes=mib * MIB, reserved_bytes=0)
        ranking = search(candidates, replace(subject, hardware=one_memory))
        chosen += [each.candidate.settings["offload.moments"] for each in ranking.best[:1]]
    assert set(chosen) == {"device", "disk"}, chosen


def test_nodes_that_measure_themselves_may_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(RunError, match=r"zero=auto on several nodes: .* hardware=NODE"):
        choose(run_of(*SMALL), SMALL)


@SAME_AS_BY_TRYING
def test_a_choice_can_be_pasted(searched: Searched) -> None:
    """What the line says, given as settings, is the run that was chosen."""
    config, candidates, on = searched
    for budget in ((30,), (7, 8)):
        best = search(candidates, on(node(*budget))).best[0].candidate
        defaults = {key: default_of(config, key) for key in best.settings if key != "zero.stage"}
        pasted = words(best.settings, defaults).split()
        batch = [] if any("accumulate" in word for word in pasted) else ["train.accumulate=1"]
        assert run_of(*SMALL[:-1], FREE[1], *batch, *pasted) == with_choice(config, best.settings)


def test_given_scratch_disks_are_those_of_choices_on_disk(tmp_path: Path) -> None:
    config = run_of(*SMALL, f"offload.disk.paths=[{tmp_path}]", "offload.prefetch_units=3")
    on_disk = with_choice(config, {"offload.master": "disk", "offload.moments": "disk"}).offload
    assert (on_disk.disk.paths, on_disk.prefetch_units) == ([str(tmp_path)], 3)
    assert with_choice(config, {"offload.master": "host"}).offload == OffloadConfig(master="host")


def test_train_says_what_was_chosen_and_trains_it(tmp_path: Path) -> None:
    settings = [*SMALL, "hardware=laptop", "train.steps=1", "train.evaluate_batches=0", "mesh.dp=1"]
    settings += ["model.layers=1", "offload=none", "block.activation_checkpoint=none"]
    settings += [f"data.path={write_text(tmp_path / 'text.txt')}", "monitor.tensorboard=false"]
    run = typed(
        *("train.py", *settings, f"offload.disk.paths=[{tmp_path}]"),  # in case that disks are chosen
        cwd=tmp_path,
        env=as_torchrun(),
    )
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("zero=auto chose: zero.stage="))
    stage = line.partition("zero.stage=")[2][0]
    assert f"stage {stage} on 1 cpu ranks" in run.stdout
