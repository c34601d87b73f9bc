"""`python -m dzero plan`: settings in, tables, a picture and a verdict out, whatever this machine is."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import from_words
import pytest
import small_runs
import torch
from in_process import dzero
from PIL import Image
from pool import Pool
from small_runs import train, write_text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SMALL = ["model.hidden_size=64", "model.layers=2", "model.heads=2", "model.ffn_size=128", "model.vocab_size=256"]


def plan(*settings: str, **figures: Any) -> Any:
    return from_words.forecast(*SMALL, *settings, **figures)


def command(*words: str | Path, code: int = 0) -> str:
    """What `python -m dzero plan` prints."""
    run = dzero("plan", *SMALL, *words)
    assert run.returncode == code, run.stderr
    return run.stdout


def test_a_run_that_fits_says_so_and_one_that_does_not_says_by_how_much() -> None:
    words = ["mesh.dp=512", "hardware=h100_80g", "zero.stage=3"]
    found = plan(*words)
    told = command(*words)
    assert "memory of one rank of 512" in told
    assert told.splitlines()[-1] == found.verdict() == f"fits {found.hardware.name}"
    need = found.tiers["device"].total_bytes
    small = [f"hardware.device_bytes={need}", "hardware.reserved_bytes=1000"]
    short = command(*words, *small, code=1).splitlines()[-1]
    assert short == f"does not fit {found.hardware.name}: each rank lacks 1000 B on the device"


def test_host_slots_of_large_parameters_on_disk_have_one_turn_of_the_size_of_its_ends() -> None:
    """Embedding and head have 128,256 x 4,096 elements each, a block 218,112,000, the root few.
    Of an element 2 bytes of parameter, gradient and new parameter, 4 of master and 8 of moments."""
    words = ["model=llama_8b", "model.layers=4", "offload=infinity", "zero.stage=3", "mesh.dp=1", "hardware=h100_80g"]
    found = from_words.forecast(*words).tiers["host"].total_bytes
    by_hand = (2 + 2 + 2 + 4 + 8) * (128_256 * 4096 + 2 * 218_112_000)
    assert by_hand <= found < 1.01 * by_hand


def test_hundreds_of_ranks_move_what_the_table_says_and_take_the_slower_link() -> None:
    inside, across = (plan(f"mesh.dp={ranks}", "zero.stage=3", "hardware=h100_80g") for ranks in (8, 16))
    hardware = inside.hardware
    assert hardware.devices_per_node * hardware.network < hardware.node_link  # eight rings, and a port for each
    for found, rate in ((inside, hardware.node_link), (across, 8 * hardware.network)):
        calls = found.moved.calls["shard"] + 2  # and two that agree: on norms, on the loss
        seconds = found.moved.axes["shard"] / (hardware.link_efficiency * rate) + calls * hardware.collective_latency_s
        assert found.pace.seconds["shard"] == pytest.approx(seconds)


@pytest.mark.product(keep=2)
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
    kinds = plan("mesh.dp=2", "zero.stage=2", "hardware=h100_80g", *rule.split()).tiers["device"].kinds
    assert kinds.get("moments", 0) == kept * kinds["master"]


@pytest.mark.product(keep=3)
@pytest.mark.parametrize(
    ("settings", "moved"),
    {
        "precision=bf16": 4 + 2 * 4 + 4 * 4 + 2,
        "precision=bf16 precision.reduce=bf16": 2 + 2 * 4 + 4 * 4 + 2,
        "precision=bf16_remainder": 4 + 2 * 2 + 4 * 4 + 2 * 2,
        "precision=bf16_remainder precision.moments=bf16": 4 + 2 * 2 + 4 * 2 + 2 * 2,
        "precision=bf16 precision.moments=int8": 4 + 2 * 4 + 4 * 1 + 2,
    }.items(),
)
def test_the_hosts_update_takes_as_long_as_its_bytes_take_through_host_memory(settings: str, moved: int) -> None:
    """Per parameter: gradient read, master and moments read and written, working copy written, with remainders read.

    Gradients are in fp32 where the backend sums them in fp32, its default. Shards are rounded up.
    """
    found = plan("mesh.dp=8", "zero.stage=2", "hardware=h100_80g", "offload=host", *settings.split())
    seconds = found.params * moved / found.hardware.host_memory_bandwidth
    assert found.bound.seconds["host update"] == pytest.approx(seconds, rel=0.02)
    assert found.pace.seconds["host update"] == pytest.approx(seconds / found.hardware.memory_efficiency, rel=0.02)


def test_the_cores_are_a_floor_to_the_hosts_update() -> None:
    slow = plan("mesh.dp=8", "offload=host", "hardware=h100_80g", "hardware.update_elems_per_s=1000000")
    assert slow.pace.seconds["host update"] == pytest.approx(slow.params / 1e6, rel=0.02)


def test_what_is_unknown_is_said_and_not_guessed() -> None:
    words = ["mesh.dp=16", "zero.stage=3", "hardware=h100_80g", "hardware.network=null"]
    assert plan(*words).pace.step_s is None
    told = command(*words)
    assert "the hardware does not say node_link or network" in told
    assert re.search(r"shard +unknown +unknown", told)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    "settings",
    [
        "zero.stage=3 offload=infinity train.accumulate=8 hardware=h100_80g",
        "zero.stage=3 offload=host model.layers=80 hardware=h100_80g",
        "zero.stage=2 hardware=a100_40g hardware.device_bytes=1000000 hardware.reserved_bytes=0",
        "zero.stage=2 hardware=h100_80g hardware.node_link=null",
    ],
)
def test_a_plan_has_a_picture_of_sane_size(settings: str, tmp_path: Path) -> None:
    fits = "device_bytes" not in settings
    command("mesh.dp=4", *settings.split(), "--picture", tmp_path / "plan.png", code=0 if fits else 1)
    png = (tmp_path / "plan.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert png.startswith(b"\x89PNG")
    assert 1500 < width < 2000
    with_timeline = "null" not in settings
    assert (850 if with_timeline else 600) < height < (1300 if with_timeline else 800)
    assert 20_000 < len(png) < 400_000


def test_a_picture_may_be_of_vectors_and_leaves_out_microbatches_between_the_first_and_the_last(tmp_path: Path) -> None:
    command("mesh.dp=2", "hardware=h100_80g", "train.accumulate=8", "--picture", tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert "<svg" in drawn
    assert "6 more microbatches" in drawn
    refused = dzero("plan", *SMALL, "hardware=laptop", "--picture", tmp_path / "plan.gif")
    assert "must end with one of .png, .svg, .pdf" in refused.stderr


@pytest.mark.full("tests/plan/test_plan.py::test_a_plan_has_a_picture_of_sane_size")
def test_the_guides_picture_shows_what_its_command_plans(tmp_path: Path) -> None:
    """`python docs/scripts/pictures.py plan` draws it anew."""
    docs = from_words.CONF.parent / "docs"
    guide = (docs / "guides" / "plan.md").read_text().replace("\\\n", " ")
    (line,) = (line.split() for line in guide.splitlines() if "--picture plan.png" in line)
    assert line[:4] == ["python", "-m", "dzero", "plan"]
    drawn = tmp_path / "plan.png"
    run = dzero(*line[3:-1], drawn)
    assert run.returncode == 0, run.stderr
    with Image.open(drawn) as now, Image.open(docs / "pictures" / "plan.png") as kept:
        assert "lower bound" in now.info["Description"]
        assert kept.info.get("Description") == now.info["Description"], "docs/pictures/plan.png shows another plan"


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def plan_in(found: EventAccumulator) -> str:
    return str(found.Tensors("plan/text_summary")[0].tensor_proto.string_val[0].decode())


def test_the_command_writes_tables_and_picture_for_tensorboard(tmp_path: Path) -> None:
    command("mesh.dp=4", "hardware=h100_80g", "--tensorboard", tmp_path)
    found = events(tmp_path)
    assert "memory of one rank of 4" in plan_in(found)
    assert plan_in(found).splitlines()[-2].startswith("fits DGX H100")
    image = found.Images("plan")[0]
    assert image.width > 1500
    assert image.encoded_image_string.startswith(b"\x89PNG")


def test_without_matplotlib_the_board_has_the_tables_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    run = dzero("plan", *SMALL, "mesh.dp=4", "hardware=laptop", "--tensorboard", tmp_path)
    assert run.stderr.strip() == "the plan's picture needs matplotlib: pip install 'dzero[plot]'"
    found = events(tmp_path)
    assert "memory of one rank of 4" in plan_in(found)
    assert found.Tags()["images"] == []


def test_a_run_has_its_plan_in_its_board(pool: Pool, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    settings = ["monitor.tensorboard=true", "monitor.log_every_steps=1", "train.steps=2", "zero.stage=3"]
    pool.run(train, 2, small_runs.settled(text, *settings, "offload=host"), tmp_path, timeout_s=300)
    found = events(tmp_path)
    assert found.Images("plan")[0].step == 1
    assert "memory of one rank of 2" in plan_in(found)
    assert found.Scalars("memory/planned_gib")[0].value > 0
    assert [point.step for point in found.Scalars("loss/train")] == [1, 2]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("mesh.cp=2 mesh.dp=1", "share sequences, matrices or experts: python -m dzero plan, with the same settings"),
        ("train.global_sequences=8", "no plan of this run: IncompatibleError: train.global_sequences=8"),
        ("block.activation_checkpoint=full block.compile=true", ""),
    ],
)
def test_a_run_under_way_is_planned_or_told_why_not(setting: str, says: str, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    peak, lacks = from_words.planned_under_way(from_words.run_of(*SMALL, *setting.split()), 3, tmp_path)
    assert ((peak or 0) > 0, lacks is None) == (not says, not says)
    assert says in str(lacks)
    assert torch.equal(torch.get_rng_state(), before)
