"""`python -m dzero plan`: settings in, tables and a verdict out, whatever this machine is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from in_process import dzero

from dzero import RunError
from dzero.estimate.forecast import Forecast
from dzero.overrides import composed
from dzero.plan.picture import draw
from dzero.plan.plan_run import forecast_run
from dzero.plan.run_layout import check_ranks
from dzero.plan.tables import tables
from dzero.utils.terminal import plain

CONF = Path(__file__).parent.parent.parent / "conf"
SMALL = ["model.hidden_size=64", "model.layers=2", "model.heads=2", "model.ffn_size=128", "model.vocab_size=256"]


def forecast_of(*settings: str) -> Forecast:
    config = composed([*SMALL, *settings], CONF)
    assert config.hardware is not None
    return forecast_run(config, config.hardware)


def test_a_run_that_fits_says_so_and_one_that_does_not_says_by_how_much() -> None:
    fits = forecast_of("mesh.dp=64", "hardware=h100_80g", "zero.stage=3")
    assert fits.fits
    assert fits.verdict() == f"fits {fits.hardware.name}"
    need = fits.tiers["device"].total_bytes
    small = forecast_of(
        "mesh.dp=64",
        "hardware=h100_80g",
        "zero.stage=3",
        f"hardware.device_bytes={need}",
        "hardware.reserved_bytes=1000",
    )
    assert not small.fits
    assert small.tiers["device"].short_bytes == 1000
    assert small.verdict() == f"does not fit {fits.hardware.name}: each rank lacks 1000 B on the device"


def test_host_slots_of_8_billion_parameters_on_disk_have_one_turn_of_the_size_of_its_ends() -> None:
    """Embedding and head have 128,256 x 4,096 elements each, a block 218,112,000, the root few.
    Of an element 2 bytes of parameter, gradient and new parameter, 4 of master and 8 of moments."""
    config = composed(["model=llama_8b", "offload=infinity", "zero.stage=3", "mesh.dp=1", "hardware=h100_80g"], CONF)
    assert config.hardware is not None
    found = forecast_run(config, config.hardware).tiers["host"].total_bytes
    by_hand = (2 + 2 + 2 + 4 + 8) * (128_256 * 4096 + 2 * 218_112_000)
    assert by_hand <= found < 1.01 * by_hand


@pytest.mark.full
def test_more_ranks_hold_less_each_and_stage_3_the_least() -> None:
    states = [
        sum(forecast_of(f"mesh.dp={ranks}", f"zero.stage={stage}", "hardware=h100_80g").tiers["device"].kinds[kind]
            for kind in ("param", "master", "moments"))
        for stage, ranks in ((0, 8), (1, 8), (3, 8), (3, 64))
    ]  # fmt: skip
    assert states[0] == 8 * states[1] == 8 * states[2]
    assert states[2] > 7 * states[3]


def test_hundreds_of_ranks_move_what_the_table_says_and_take_the_slower_link() -> None:
    inside = forecast_of("mesh.dp=8", "zero.stage=3", "hardware=h100_80g")
    across = forecast_of("mesh.dp=16", "zero.stage=3", "hardware=h100_80g")
    link, network = inside.hardware.node_link, across.hardware.network
    assert link is not None
    assert network is not None
    assert across.hardware.devices_per_node * network < link  # eight rings, and a port for each
    reached = inside.hardware.link_efficiency
    for found, rate in ((inside, reached * link), (across, reached * 8 * network)):
        calls = found.moved.calls["shard"] + 2  # and two that agree: on norms, on the loss
        seconds = found.moved.axes["shard"] / rate + calls * found.hardware.collective_latency_s
        assert found.pace.seconds["shard"] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("optim.rule=SGD", 0),
        ("optim.rule=SGD optim.options={momentum:0.9}", 1),
        ("optim.rule=AdamW", 2),
        ("optim.rule=Adam optim.options={amsgrad:true}", 3),
    ],
)
def test_a_rule_keeps_as_many_moments_as_it_has(rule: str, kept: int) -> None:
    found = forecast_of("mesh.dp=2", "zero.stage=2", "hardware=h100_80g", *rule.split())
    master = found.tiers["device"].kinds["master"]
    assert found.tiers["device"].kinds.get("moments", 0) == kept * master


@pytest.mark.parametrize(
    ("settings", "moved"),
    {
        "precision=bf16": 4 + 2 * 4 + 4 * 4 + 2,
        "precision=bf16 precision.reduce=bf16": 2 + 2 * 4 + 4 * 4 + 2,
        "precision=fp32": 4 + 2 * 4 + 4 * 4,
        "precision=bf16_remainder": 4 + 2 * 2 + 4 * 4 + 2 * 2,
        "precision=bf16_remainder precision.moments=bf16": 4 + 2 * 2 + 4 * 2 + 2 * 2,
        "precision=bf16 precision.moments=int8": 4 + 2 * 4 + 4 * 1 + 2,
    }.items(),
)
def test_the_hosts_update_takes_as_long_as_its_bytes_take_through_host_memory(settings: str, moved: int) -> None:
    """Per parameter: gradient read, master and moments read and written, working copy written, with remainders read.

    Gradients are in fp32 where the backend sums them in fp32, its default.
    """
    found = forecast_of("mesh.dp=8", "zero.stage=2", "hardware=h100_80g", "offload=host", *settings.split())
    hardware = found.hardware
    assert hardware.host_memory_bandwidth is not None
    seconds = found.params * moved / hardware.host_memory_bandwidth
    assert found.bound.seconds["host update"] == pytest.approx(seconds, rel=0.02)  # shards are rounded up
    assert found.pace.seconds["host update"] == pytest.approx(seconds / hardware.memory_efficiency, rel=0.02)


def test_the_cores_are_a_floor_to_the_hosts_update() -> None:
    slow = forecast_of("mesh.dp=8", "offload=host", "hardware=h100_80g", "hardware.update_elems_per_s=1000000")
    assert slow.pace.seconds["host update"] == pytest.approx(slow.params / 1e6, rel=0.02)


def test_what_is_unknown_is_said_and_not_guessed() -> None:
    found = forecast_of("mesh.dp=16", "zero.stage=3", "hardware=h100_80g", "hardware.network=null")
    assert found.pace.step_s is None
    told = plain(tables(found))
    assert "the hardware does not say node_link or network" in told
    assert re.search(r"shard +unknown +unknown", told)


def test_a_picture_is_drawn_and_another_format_refused(tmp_path: Path) -> None:
    found = forecast_of("mesh.dp=2", "hardware=laptop", "offload=host")
    draw(found, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    draw(found, tmp_path / "plan.svg")
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    with pytest.raises(RunError, match=r"must end with one of \.png, \.svg, \.pdf"):
        draw(found, tmp_path / "plan.gif")


def test_the_command_prints_tables_and_ends_with_whether_it_fits() -> None:
    line = ["plan", *SMALL, "mesh.dp=512", "hardware=v100_32g", "precision=fp16"]
    for settings, code in (([], 0), (["hardware.device_bytes=1000000", "hardware.reserved_bytes=0"], 1)):
        run = dzero(*line, *settings)
        assert run.returncode == code, run.stderr
        assert "memory of one rank of 512" in run.stdout
        assert run.stdout.splitlines()[-1].startswith("does not fit" if code else "fits")


def test_a_run_is_told_where_its_ranks_are_not_those_it_was_planned_for() -> None:
    config = composed([*SMALL, "mesh.dp=64"], CONF)
    told = (
        "mesh.dp=64, but there are 2 ranks: (dp, cp, tp, pp) that make as many, the nearest first: [(1, 1, 1, 2), "
        "(1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1)], or start"
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        check_ranks(config, 2)
