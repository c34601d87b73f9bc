"""The plan as a picture, in a file and in TensorBoard."""

from __future__ import annotations

import struct
from pathlib import Path
from unittest.mock import ANY

import pytest
import small_runs
import torch
from in_process import dzero
from PIL import Image
from pool import Pool
from small_runs import train, write_text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dzero import __main__ as commands
from dzero.config import RunConfig
from dzero.estimate.forecast import Forecast
from dzero.estimate.measure_hardware import unmeasured
from dzero.estimate.timeline import Bar, Timeline
from dzero.monitor.tensorboard import TensorBoardSink
from dzero.overrides import composed
from dzero.plan.picture import draw, pixels
from dzero.plan.picture_timeline import _Axis, _joined
from dzero.plan.plan_run import forecast_run, forecast_running, log_plan, onto_board

CONF = Path(__file__).parent.parent.parent / "conf"
SMALL = ["model.hidden_size=64", "model.layers=2", "model.heads=2", "model.ffn_size=128", "model.vocab_size=256"]


def settled(*settings: str) -> RunConfig:
    return composed([*SMALL, *settings], CONF)


def foreseen(settings: str) -> Forecast:
    config = settled("mesh.dp=4", *settings.split())
    assert config.hardware is not None
    return forecast_run(config, config.hardware)


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def text_of(found: EventAccumulator, tag: str) -> str:
    return str(found.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode())


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    "settings",
    [
        "zero.stage=0 hardware=laptop",
        "zero.stage=3 offload=infinity train.accumulate=8 hardware=h100_80g",
        "zero.stage=3 offload=host model.layers=80 hardware=h100_80g",
        "zero.stage=2 hardware=v100_32g hardware.device_bytes=1000000 hardware.reserved_bytes=0",
        "zero.stage=2 hardware=h100_80g hardware.node_link=null",
    ],
)
def test_every_layout_has_a_picture_of_sane_size(settings: str, tmp_path: Path) -> None:
    forecast = foreseen(settings)
    draw(forecast, tmp_path / "plan.png")
    png = (tmp_path / "plan.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert png.startswith(b"\x89PNG")
    assert 1500 < width < 2000
    with_timeline = forecast.timeline() is not None
    assert (850 if with_timeline else 600) < height < (1300 if with_timeline else 800)
    assert 20_000 < len(png) < 400_000


@pytest.mark.full
def test_the_guides_picture_shows_what_its_command_plans(tmp_path: Path) -> None:
    """`python docs/scripts/pictures.py plan` draws it anew."""
    guide = (CONF.parent / "docs" / "guides" / "plan.md").read_text().replace("\\\n", " ")
    (command,) = (line.split() for line in guide.splitlines() if "--picture plan.png" in line)
    assert command[:4] == ["python", "-m", "dzero", "plan"]
    drawn = tmp_path / "plan.png"
    run = dzero(*command[3:-1], drawn)
    assert run.returncode == 0, run.stderr
    with Image.open(drawn) as now, Image.open(CONF.parent / "docs" / "pictures" / "plan.png") as kept:
        assert "lower bound" in now.info["Description"]
        assert kept.info.get("Description") == now.info["Description"], "docs/pictures/plan.png shows another plan"


def test_of_many_microbatches_the_first_and_the_last_are_drawn() -> None:
    bars = tuple(Bar("compute", "a", "forward", float(at), at + 1.0) for at in range(8))
    axis = _Axis(Timeline(bars, (0.0, 2.0, 4.0, 6.0)))
    assert axis.left_out == 2
    drawn = [axis.seen(bar) for bar in bars]
    assert [len(parts) for parts in drawn] == [1, 1, 0, 0, 0, 0, 1, 1]
    assert drawn[1] == [(1.0, 2.0)]
    assert drawn[6] == [(2.0 + axis.gap_s, 3.0 + axis.gap_s)]
    assert axis.seen(Bar("shard", "a", "all_gather", 1.5, 6.5)) == [(1.5, 2.0), (2.0 + axis.gap_s, 2.5 + axis.gap_s)]
    assert _joined([(0.0, 1.0), (1.05, 2.0), (3.0, 4.0)], 0.1) == [(0.0, 2.0), (3.0, 4.0)]


def test_the_command_writes_tables_and_picture_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["dzero", "plan", *SMALL, "mesh.dp=4", "hardware=h100_80g", "--tensorboard", str(tmp_path)]
    monkeypatch.setattr("sys.argv", line)
    with pytest.raises(SystemExit, match="0"):
        commands.main()
    found = events(tmp_path)
    assert "memory of one rank of 4" in text_of(found, "plan")
    assert text_of(found, "plan").splitlines()[-2].startswith("fits DGX H100")
    image = found.Images("plan")[0]
    assert image.width > 1500
    assert image.encoded_image_string.startswith(b"\x89PNG")


def test_without_matplotlib_the_board_has_the_tables_and_one_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    board = TensorBoardSink(tmp_path)
    lacks = onto_board(board, foreseen("hardware=laptop"))
    board.close()
    assert lacks == "the plan's picture needs matplotlib: pip install 'dzero[plot]'"
    found = events(tmp_path)
    assert "memory of one rank of 4" in text_of(found, "plan")
    assert found.Tags()["images"] == []


def test_a_machine_that_was_never_measured_has_its_memory_drawn() -> None:
    forecast = forecast_run(settled("mesh.dp=2"), unmeasured(2, "cpu"))
    assert forecast.timeline() is None
    capacity = forecast.tiers["device"].capacity_bytes
    assert capacity is not None
    assert capacity > 1e9
    assert pixels(forecast).shape[2] == 3


def test_a_run_under_way_is_planned_without_touching_its_random_numbers() -> None:
    config = settled("block.activation_checkpoint=full", "block.compile=true")
    before = torch.get_rng_state()
    forecast = forecast_running(config, 2, "cpu", 256)
    assert forecast.layout.ranks == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_a_plan_that_fails_is_told_in_a_line_and_raises_nothing(tmp_path: Path) -> None:
    told = log_plan(TensorBoardSink(tmp_path), 1, settled("train.global_sequences=8"), 3, "cpu", 256)
    assert told == (None, ANY)
    assert str(told[1]).startswith("TensorBoard has no plan of this run: IncompatibleError: train.global_sequences=8")


def test_a_run_has_its_plan_in_its_board(pool: Pool, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    settings = [
        "monitor.tensorboard=true",
        "monitor.log_every_steps=1",
        "train.steps=2",
        "zero.stage=3",
        "offload=host",
    ]
    pool.run(train, 2, small_runs.settled(text, *settings), tmp_path, timeout_s=300)
    found = events(tmp_path)
    assert found.Images("plan")[0].step == 1
    assert "memory of one rank of 2" in text_of(found, "plan")
    assert found.Scalars("memory/planned_gib")[0].value > 0
    assert [point.step for point in found.Scalars("loss/train")] == [1, 2]
