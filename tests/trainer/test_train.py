"""`python train.py` keeps its promises: it learns, repeats itself, tells what happened, and takes every setting."""

from __future__ import annotations

import gzip
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from in_process import dzero as command
from pool import Pool, WorkerError
from small_runs import ROOT, SMALL, Told, ran, settled, train, write_text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from typed_commands import typed

SHORT = ("train.sequence_tokens=32", "model.layers=1", "data.held_out=0.1", "monitor.tensorboard=false")


def run(pool: Pool, folder: Path, data: Path, *settings: str, ranks: int = 2) -> Told:
    """A run on the pool's ranks; all of them saw the same losses, and moved what theory says."""
    told = pool.run(train, ranks, settled(data, f"launch.workers={ranks}", *settings), folder, timeout_s=400.0)
    assert all(each[:3] == told[0][:3] for each in told)
    assert all(each.agrees for each in told)
    assert all(np.isfinite(told[0].losses))
    return told[0]  # type: ignore[no-any-return]


def losses_in(log: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step=\d+ loss=(\S+)", log, re.MULTILINE)]


# The numbers


@pytest.fixture(scope="module")
def of_stage_3(pool: Pool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run(pool, tmp_path_factory.mktemp("stage_3"), text, "zero.stage=3").losses


SAME = ("zero.stage=3", "zero.stage=0 block.activation_checkpoint=full", "zero.stage=3 precision=bf16_remainder")
SAME_FULL = ("zero.stage=1", "zero.stage=2", "zero.stage=3 block.activation_checkpoint=selective")
REPEATS = "tests/trainer/test_train.py::test_a_run_repeats_its_losses_at_every_stage"


@pytest.mark.parametrize("line", [*SAME, *(pytest.param(line, marks=pytest.mark.full(REPEATS)) for line in SAME_FULL)])
def test_a_run_repeats_its_losses_at_every_stage(
    pool: Pool, text: Path, tmp_path: Path, of_stage_3: list[float], line: str
) -> None:
    assert run(pool, tmp_path, text, *line.split()).losses == of_stage_3


def test_another_seed_gives_other_losses(pool: Pool, text: Path, tmp_path: Path, of_stage_3: list[float]) -> None:
    assert run(pool, tmp_path, text, "zero.stage=3", "train.seed=1").losses != of_stage_3


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(
    "line",
    [
        "zero.stage=1 precision=fp16 train.accumulate=4",
        "zero.stage=2 precision=fp32 optim.rule=SGD optim.options={momentum:0.9}",
        "zero.stage=3 precision=bf16_remainder train.accumulate=4 schedule.kind=wsd schedule.decay_steps=1",
        "zero.stage=2 precision.moments=bf16 zero.reduction=native data.held_out=0",
        "zero.stage=3 model.tied=false block.tiles=3 block.loss_tiles=4 block.activation_checkpoint=full",
        "model=tiny_moe mesh.ep=2 zero.stage=2 precision=fp16 train.accumulate=2 launch.check_collectives=true",
        "zero.stage=3 mesh.dp=4 mesh.replicate=2",
        "zero.stage=3 mesh.dp=4 zero.reshard_after_forward=2",
    ],
)
def test_settings_train_together(pool: Pool, text: Path, tmp_path: Path, line: str) -> None:
    told = run(pool, tmp_path, text, *line.split(), ranks=4 if "mesh.dp=4" in line else 2)
    assert len(told.losses) == 3
    assert (told.held_out is None) == ("held_out=0" in line)


def test_the_global_batch_is_what_counts_not_how_it_is_cut(pool: Pool, text: Path, tmp_path: Path) -> None:
    whole = run(pool, tmp_path, text, "precision=fp32", "train.global_sequences=8", "train.microbatch_sequences=4")
    parts = run(pool, tmp_path, text, "precision=fp32", "train.global_sequences=8", "train.accumulate=2")
    np.testing.assert_allclose(whole.losses, parts.losses, rtol=1e-4)  # other sums of the same numbers in fp32


def test_a_transformers_model_trains_from_its_config(pool: Pool, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 256, "num_key_value_heads": 1, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = [f"model.{key}=null" for key in ("hidden_size", "layers", "heads", "kv_heads", "ffn_size")]
    told = run(pool, tmp_path, text, "model=hf", f"model.name_or_path={tmp_path}", *ours, "zero.stage=3")
    assert len(told.losses) == 3


@pytest.mark.parametrize("kind", ["jsonl", "npy"])
def test_other_files_hold_the_same_tokens(pool: Pool, text: Path, tmp_path: Path, kind: str) -> None:
    words = text.read_text()
    other = tmp_path / f"words.{kind}"
    if kind == "jsonl":
        other.write_text("\n".join(json.dumps({"body": part}) for part in words.split("a")))
        settings = ["data.field=body"]
    else:
        np.save(other, np.frombuffer(words.encode(), np.uint8).astype(np.uint16))
        settings = ["data.vocab_size=256"]
    told = run(pool, tmp_path, other, *settings)
    assert told.losses[0] == pytest.approx(np.log(256), rel=0.1)  # before it has learnt, all bytes are equal


# What stops a run


def test_a_run_that_only_overflows_stops_and_says_what_to_change(pool: Pool, text: Path, tmp_path: Path) -> None:
    overflow = settled(text, "precision=fp16", "scaler.init=1e12", "train.max_skipped_steps=1")
    with pytest.raises(WorkerError, match=r"2 steps in a row had non-finite gradients.*scaler.init") as stopped:
        pool.run(train, 2, overflow, tmp_path, timeout_s=400.0)
    assert "TrainingStopped" in str(stopped.value)


def test_too_little_held_out_is_told_before_the_first_step(pool: Pool, tmp_path: Path) -> None:
    short = write_text(tmp_path / "short.txt", words=40)
    with pytest.raises(WorkerError, match=r"another data\.held_out") as stopped:
        pool.run(train, 2, settled(short), tmp_path, timeout_s=400.0)
    assert "RunError" not in str(stopped.value)  # the command makes it one


# What is told


LANES = {
    "infinity": ("LOAD", "LOAD_param", "FETCH", "EVICT", "COMPUTE", "SPILL"),
    "host": ("FETCH", "EVICT", "COMPUTE"),
    "host_all": ("FETCH", "EVICT", "COMPUTE"),
    "disk": ("LOAD", "FETCH", "EVICT", "COMPUTE", "SPILL"),
}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("offload", LANES)
def test_offload_changes_no_loss_and_shows_its_lanes(pool: Pool, text: Path, tmp_path: Path, offload: str) -> None:
    on_disk = offload in ("disk", "infinity")
    setting = ["zero.stage=3", "train.accumulate=2"] + (["model.layers=4"] if on_disk else [])
    resident = run(pool, tmp_path / "resident", text, *setting)
    traced = ["profile=on", "profile.start_step=2", "profile.steps=2"]
    scratch = [f"offload.disk.paths=[{tmp_path}]", "offload.disk.block_bytes=65536"] if on_disk else []
    hosted = run(pool, tmp_path, text, *setting, f"offload={offload}", *scratch, *traced)
    assert hosted.losses == resident.losses
    assert hosted.held_out == resident.held_out
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    lanes = {f"offload/{lane}_{what}" for lane in LANES[offload] for what in ("busy_s", "waited_s", "moved_gib")}
    assert lanes <= set(events.Tags()["scalars"])
    with gzip.open(tmp_path / "profile" / "rank0.pt.trace.json.gz") as trace:
        entries = json.load(trace)["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in entries if each.get("name") == "thread_name"}
    tracks = {lane: lane for lane in LANES[offload] if lane != "LOAD_param"} | {"forward": "training"}
    for kind, name in tracks.items():
        of_kind = {each["tid"] for each in entries if str(each.get("name")).split(" ")[0] == kind}
        assert of_kind, kind
        assert all(names[tid].startswith(name) for tid in of_kind), "a lane's track has its name"


def shows_nothing_but_its_log(folder: Path, *settings: str) -> tuple[list[float], float]:
    """Losses of the log and on held-out data of a run of the command, which shows nothing else."""
    ended = typed("train.py", *settings, cwd=folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "collectives per step of rank 0, measured against theory" in ended.stdout
    assert "≠" not in ended.stdout
    assert not re.search("warning|error|Traceback", ended.stdout, re.IGNORECASE)
    (written,) = (folder / "outputs").glob("*/*")
    assert sorted(path.name.partition(".out.")[0] for path in written.iterdir()) == [".hydra", "events"]
    held_out = re.search(r"held_out_loss=(\S+)", ended.stdout)
    assert held_out is not None
    return losses_in(ended.stdout), float(held_out[1])


def test_a_run_learns_and_shows_nothing_but_its_log(tmp_path: Path) -> None:
    """Two words that take turns: who has seen one knows the next, whatever the arithmetic."""
    (tmp_path / "turns.txt").write_text("ping pong " * 3000)
    settings = [*SMALL.split(), "data.path=turns.txt", "train.steps=40", "train.evaluate_every_steps=40"]
    (first, *_, last), held_out = shows_nothing_but_its_log(
        tmp_path, *settings, "zero.stage=3", "optim.lr=1e-2", "launch.workers=2", "precision=fp32", "monitor.plan=false"
    )
    assert last < 0.6 * first
    assert held_out < 0.65 * first


@pytest.mark.slow
def test_the_whole_default_run_learns(tmp_path: Path) -> None:
    (first, *_, last), held_out = shows_nothing_but_its_log(tmp_path)
    assert last < 0.6 * first
    assert held_out < 0.65 * first


LEARNS = "tests/trainer/test_train.py::test_a_run_learns_and_shows_nothing_but_its_log"


@pytest.mark.full(LEARNS)
def test_every_run_of_a_sweep_has_its_folder_and_one_that_fails_stops_no_other(text: Path, tmp_path: Path) -> None:
    small = ["train.steps=3", *(word for word in SHORT if "held_out" not in word), f"data.path={text}"]
    ended = typed("train.py", "--multirun", "data.held_out=0.0001,0.05", *small, cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.count("or another data.held_out") == 1
    assert ended.stderr.endswith("error: a run of the sweep failed: see above\n")
    assert "Traceback" not in ended.stderr
    (sweep,) = (tmp_path / "multirun").glob("*/*")
    named = {"data.held_out=0.0001", "data.held_out=0.05"}
    assert {path.name for path in sweep.iterdir()} == {*named, "multirun.yaml"}
    assert len(losses_in(ended.stdout)) == 2  # the first and the last step of the run that could


@pytest.mark.full(LEARNS)
def test_two_nodes_of_torchrun_make_one_run_in_one_folder(text: Path, tmp_path: Path) -> None:
    store = [f"--rdzv-endpoint={tmp_path / 'store'}", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"]
    rendezvous = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", *store]
    small = ["train.steps=2", *SHORT, f"data.path={text}"]
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    words = ("-m", "torch.distributed.run", *rendezvous, str(ROOT / "train.py"), *small)
    with ThreadPoolExecutor() as nodes:
        launched = [nodes.submit(typed, *words, cwd=folder) for folder in folders]
        ended = [node.result() for node in launched]
    assert [node.returncode for node in ended] == [0, 0], [node.stderr for node in ended]
    assert [len(losses_in(node.stdout)) for node in ended] in ([2, 0], [0, 2])  # only rank 0 writes
    assert len(list(tmp_path.glob("*/outputs/*/*"))) == 1


# Several sources: resumed on other ranks they go on exactly, and what they took is told by source

LONG, FEW = "long.txt", "short.txt"


def texts(folder: Path) -> list[Path]:
    """A long and a short text of other letters."""
    write_text(folder / LONG, 4000)
    (folder / FEW).write_text("0123 4567 89 " * 120)
    return [folder / LONG, folder / FEW]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_mixture_resumes_on_other_ranks_at_the_same_sample(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """Losses are means over the samples of a step, so that equal losses are of the same samples."""
    settings = [*SMALL.split(), f"data.paths=[{','.join(map(str, texts(tmp_path)))}]", "data.weights=[0.75,0.25]"]
    settings += ["precision=fp32", "train.steps=4", "train.global_sequences=8", "train.accumulate=null"]
    settings += ["train.evaluate_every_steps=2", "checkpoint.every=2", "checkpoint.keep=9", "optim.rule=SGD"]
    settings += ["monitor.tensorboard=false"]
    whole = pool.run(ran, 2, [*settings, f"checkpoint.folder={tmp_path / 'a'}"], tmp_path)[0]
    own = [f"resume.source={tmp_path / 'a' / 'step_00000002'}", f"checkpoint.folder={tmp_path / 'b'}"]
    part = pool.run(ran, ranks, [*settings, *own, "monitor.tensorboard=true"], tmp_path)[0]
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("speed/tokens")[-1].value == 4 * 8 * 32  # of both parts
    assert part.losses == pytest.approx(whole.losses[2:], rel=1e-6)  # sums of fp32 in another order
    assert epochs(part.told) == epochs(whole.told)
    told = re.findall(rf"held_out_loss=(\S+) .*\[{LONG}\]=(\S+) .*\[{FEW}\]=(\S+)", whole.told)
    for total, first, second in told:  # printed with four digits
        assert float(total) == pytest.approx(0.75 * float(first) + 0.25 * float(second), abs=1e-4)
    assert len(told) == 2
    assert {name: count for name, count, _ in taken(whole.told)} == {LONG: str(4 * 6 * 32), FEW: str(4 * 2 * 32)}


def taken(told: str) -> list[tuple[str, str, str]]:
    """Of each source: its name, tokens that counted, and epochs."""
    return re.findall(r"from (\S+) +(\S+(?: k)?) tokens counted, (\S+) epochs", told)


def epochs(told: str) -> dict[str, str]:
    return {name: count for name, _, count in taken(told)}


@pytest.mark.full("tests/data/test_corpus.py::test_one_source_is_read_as_without_a_mixture")
def test_one_source_has_the_losses_of_the_run_without_a_mixture(pool: Pool, tmp_path: Path) -> None:
    (path, _) = texts(tmp_path)
    settings = [*SMALL.split(), "monitor.tensorboard=false"]
    alone = pool.run(ran, 2, [*settings, f"data.path={path}"], tmp_path)[0]
    one = pool.run(ran, 2, [*settings, f"data.paths=[{path}]", "data.weights=[3]"], tmp_path)[0]
    assert (one.losses, one.held_out) == (alone.losses, alone.held_out)


def test_a_run_over_chats_of_two_files_tells_what_it_took(pool: Pool, model: Path, tmp_path: Path) -> None:
    from published import chats_of, words  # which need transformers

    lines = chats_of(model).read_text().splitlines(keepends=True)
    for name, part in (("many", lines[:12]), ("few", lines[12:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    given = [word for word in words(model, tmp_path) if not word.startswith(("data.path", "monitor"))]
    given += [f"data.paths=[{tmp_path}/many.jsonl,{tmp_path}/few.jsonl]", "data.weights=[1,1]", "data.held_out=0.4"]
    given += ["train.epochs=2", "train.evaluate_every_steps=8", "train.answer_tokens=4", "monitor.plan=false"]
    (found,) = pool.run(ran, 1, given, tmp_path)
    assert re.search(r"50\.0% from \S*many\.jsonl: ", found.told)
    assert re.search(
        r"held_out_loss=\S+ .*held_out_loss\[many.jsonl\]=\S+ .*held_out_loss\[few.jsonl\]=\S+", found.told
    )
    assert re.search(r"answers '<\|im_start\|>user.*' with '", found.told)
    told = epochs(found.told)
    assert told.keys() == {"many.jsonl", "few.jsonl"}
    least, most = sorted(map(float, told.values()))  # shares are equal, sizes are not
    assert least < 2 < most
    tags = {*EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]}
    assert {"data/few.jsonl_tokens", "data/few.jsonl_epochs", "loss/held_out_few.jsonl"} <= tags
    shown = command("tokenize", *[each for each in given if each.startswith(("data", "model"))])
    assert re.search(r"many.jsonl:\n12 samples(.*\n)*few.jsonl:\n4 samples", shown.stdout), shown.stderr
