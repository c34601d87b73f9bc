"""DeepSpeed configurations: a verdict for every key, advice that dzero accepts, and one line for what cannot be read.

The configurations of deepspeed_configs/ are written for these tests, in the manner of public ones. DeepSpeed's own
names and rates (deepspeed_keys.json, deepspeed_rates.json) are printed by benchmarks/deepspeed_keys.py.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from in_process import dzero as command
from on_ranks import on_ranks
from typed_commands import in_a_process

import dzero
from dzero.cli.from_deepspeed import as_json
from dzero.config import CONF
from dzero.integrations.deepspeed.advice import advise
from dzero.integrations.deepspeed.config_keys import NEEDLESS, REFUSED, SECTIONS, TABLE, TAKEN
from dzero.integrations.deepspeed.reading import read
from dzero.integrations.deepspeed.schedules import Schedule
from dzero.integrations.deepspeed.trainer import TrainerConfig
from dzero.integrations.deepspeed.translation import translate
from dzero.integrations.deepspeed.words import as_code
from dzero.integrations.trainer_checkpoints import LAST_FILE, checkpoint_to_resume
from dzero.overrides import composed

transformers = pytest.importorskip("transformers")

HERE = Path(__file__).parents[1]
CORPUS = {path.stem: path for path in sorted((HERE / "deepspeed_configs").glob("*.json"))}
REFUSES = {
    "chat_actor_hybrid": {"hybrid_engine"},
    "curriculum": {"curriculum_learning", "progressive_layer_drop"},
    "lamb_bert": {
        "optimizer.type",
        *(f"optimizer.params.{each}" for each in ("bias_correction", "max_coeff", "min_coeff")),
    },
    "lion": {"optimizer.type"},
    "mics": {"zero_optimization.mics_shard_size"},
    "muon": {"optimizer.type"},
    "one_bit_adam": {
        "optimizer.type",
        *(f"optimizer.params.{each}" for each in ("freeze_step", "cuda_aware", "comm_backend_name")),
    },
    "one_cycle_momentum": {"scheduler.params.cycle_momentum"},
    "quantized": {"compression_training"},
    "sequence_parallel": {"sequence_parallel_size"},
    "tensor_parallel": {"tensor_parallel.autotp_size"},
    "typo": {"zero_optimisation", "gradient_clip"},
    "zeropp": {"zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients"},
}
"""Keys of the corpus that are refused; everything else translates with no edit, as public configurations do."""
CHOSEN = {
    "train.steps": "10000000000",
    "train.microbatch_sequences": "1",
    "train.accumulate": "2",
    "optim.lr": "1e-4",
    "optim.weight_decay": "0.0",
    "optim.max_norm": "1.0",
    "optim.betas": "[0.9,0.95]",
    "optim.eps": "1e-8",
    "schedule.kind": "constant",
    "schedule.warmup_steps": "10",
    "precision": "bf16",
}
"""Choices for what a file leaves to the reader."""


def leaves(config: Any, section: str = "") -> Iterator[str]:
    """Keys of a configuration, of sections those in them."""
    for name, value in config.items():
        key = f"{section}.{name}" if section else name
        if isinstance(value, dict) and value and key in SECTIONS:
            yield from leaves(value, key)
        else:
            yield key


def check_translated(given: Any, ranks: int | None = None, *, compose: bool = True) -> set[str]:
    """Check that each key has a verdict and that dzero takes the advice; return the refused keys."""
    config = read(given)
    found = translate(config, ranks)
    told = {each.key for each in found.verdicts}
    assert {*leaves(config)} <= told
    for each in found.verdicts:
        assert each.kind in (TAKEN, NEEDLESS, REFUSED)
        assert each.text
        assert "\n" not in str(each)
    advice = advise(found, ranks)
    json.dumps(as_json(found, advice))
    for line in advice.loop:
        compile(line, "loop", "exec")
    if not found.refused:
        for value in found.shard.values():
            assert eval(as_code(value)) == value
    if compose and advice.settings and not found.refused:
        composed([*advice.settings, *(f"{key}={CHOSEN[key]}" for key in advice.yours)], CONF)
    return {each.key for each in found.refused}


@pytest.mark.parametrize("name", CORPUS)
def test_each_configuration_of_the_corpus_translates_or_is_refused_as_expected(name: str) -> None:
    assert check_translated(CORPUS[name], compose=False) == REFUSES.get(name, set())


@pytest.mark.product(keep=4)
@pytest.mark.parametrize("name", CORPUS)
def test_dzero_train_takes_the_settings_of_a_translation(name: str) -> None:
    check_translated(CORPUS[name])


def test_every_key_of_deepspeed_is_in_the_table() -> None:
    names = json.loads((HERE / "deepspeed_keys.json").read_text())["keys"]
    assert len(names) > 200
    for name in names:
        parts = name.split(".")
        above = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        assert name in SECTIONS or above & TABLE.keys(), name


@pytest.mark.parametrize("case", json.loads((HERE / "deepspeed_rates.json").read_text())["rates"])
def test_rates_are_deepspeeds(case: dict[str, Any]) -> None:
    schedule = Schedule(case["kind"].lower(), case["params"], case["lr"])
    factor = schedule.factor()
    assert [schedule.peak * factor(update) for update in range(len(case["rates"]))] == pytest.approx(
        case["rates"], rel=1e-13, abs=1e-18
    )


QUARTER = dict.fromkeys(("grad_fraction", "master_fraction", "moments_fraction"), 0.25)
HOST = dict.fromkeys(("grad", "master", "moments"), "host")
DISK = {"param": "host", **dict.fromkeys(HOST, "disk"), "disk": dzero.DiskConfig(paths=["/a"])}
NVME, CPU = {"device": "nvme", "nvme_path": "/a"}, {"device": "cpu"}
BF16 = {"enabled": True}
FP16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2}
BATCH = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
SUMS = dzero.PrecisionConfig(grad="fp32")
PARTS_OF_2 = dzero.ZeroConfig(stage=3, reshard_after_forward=2)


def zero(stage: Any = 3, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def sharded(stage: int, offload: Any) -> dict[str, Any]:
    return {"shard": {"stage": stage, "precision": "fp32", "offload": offload}}


FOLLOWED: list[tuple[dict[str, Any], int | None, dict[str, Any]]] = [
    (zero(), None, sharded(3, "none")),
    (zero(2, offload_optimizer=CPU), None, sharded(2, "host")),
    (zero(cpu_offload=True, cpu_offload_params=True), None, sharded(3, "host_all")),
    (zero(0, offload_optimizer=CPU), None, sharded(0, "none")),
    (zero(offload_optimizer={**CPU, "ratio": 0.25}), None, sharded(3, dzero.OffloadConfig(**HOST, **QUARTER))),
    (zero(offload_optimizer=NVME, offload_param=CPU), None, sharded(3, dzero.OffloadConfig(**DISK))),
    ({"bf16": BF16}, None, {"precision": "bf16"}),
    ({"bfloat16": BF16, "data_types": {"grad_accum_dtype": "fp32"}}, None, {"precision": SUMS}),
    ({"bf16": BF16, "communication_data_type": "fp32"}, None, {"precision": replace(SUMS, reduce="fp32")}),
    ({"data_types": {"grad_accum_dtype": "fp32"}}, None, {"precision": "fp32"}),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, None, {"precision": "fp16"}),
    ({"bf16": {"enabled": "auto"}}, None, {"precision": None}),
    ({"fp16": FP16}, None, {"scaler": dzero.ScalerConfig(init=4096.0, growth_interval=500, hysteresis=3, floor=2.0)}),
    (BATCH, 8, {}),
    (zero(zero_hpz_partition_size=2), 4, {"stage": PARTS_OF_2}),
    (zero(zero_hpz_partition_size=2), None, {"stage": PARTS_OF_2}),
    (zero(zero_hpz_partition_size=2, offload_param={"device": "none"}), 4, {"stage": PARTS_OF_2}),
    (zero(zero_hpz_partition_size=2), 2, {"stage": 3}),  # a second copy over all ranks is the first
]
"""Configurations, numbers of ranks, and what follows."""


@pytest.mark.parametrize(("config", "ranks", "says"), FOLLOWED)
def test_what_a_file_says_is_followed(config: dict[str, Any], ranks: int | None, says: dict[str, Any]) -> None:
    found = translate(read(config), ranks)
    assert found.refused == []
    assert {name: getattr(found, name) for name in says} == says


class Refused(NamedTuple):
    """A configuration, the key that is refused, the number of ranks, and what is said."""

    config: dict[str, Any]
    key: str
    ranks: int | None = None
    told: str = ""


PARTS = "zero_optimization.zero_hpz_partition_size"
OFFLOADED = "zero_optimization.offload_optimizer"
CYCLE = {"cycle_min_lr": 0, "cycle_max_lr": 1}
REFUSED_TOGETHER = [
    Refused({"fp16": BF16, "bf16": BF16}, "fp16.enabled"),
    Refused({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "train_batch_size"),
    Refused(BATCH, "train_batch_size", ranks=4),
    Refused(zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}), f"{OFFLOADED}.ratio"),
    Refused(zero(offload_optimizer={"device": "nvme"}), f"{OFFLOADED}.nvme_path"),
    Refused(zero(zero_hpz_partition_size=2), PARTS, ranks=3),
    Refused(zero(zero_hpz_partition_size=2, offload_param=CPU), PARTS, ranks=4),
    Refused(zero(zero_hpz_partition_size=2, cpu_offload_params=True), PARTS),
    Refused({"bf16": BF16, "data_types": {"grad_accum_dtype": "fp16"}}, "data_types.grad_accum_dtype"),
    Refused({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}}, "optimizer.params.momentum"),
    Refused({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "scheduler.params.total_num_steps"),
    Refused({"scheduler": {"type": "OneCycle", "params": CYCLE}}, "scheduler.params.cycle_momentum"),
    Refused({"fp16": {"enabled": 1}}, "fp16.enabled"),
    Refused({"gradient_clipping": -1}, "gradient_clipping"),
    Refused(zero(4), "zero_optimization.stage"),
    Refused(zero("auto"), "zero_optimization.stage"),
    Refused({"bf16": True}, "bf16"),
    Refused({"zero_optimization": {"aio": {}}}, "zero_optimization.aio", told="did you mean aio?"),
    Refused({"zero_optimization": {"stag": 3}}, "zero_optimization.stag", told="did you mean zero_optimization.stage?"),
    Refused({"gradient_clip": 1.0}, "gradient_clip", told="did you mean gradient_clipping?"),
]


@pytest.mark.parametrize("case", REFUSED_TOGETHER)
def test_values_that_do_not_fit_are_refused_by_their_key(case: Refused) -> None:
    assert check_translated(case.config, case.ranks) == {case.key}
    assert case.told in str(translate(read(case.config), case.ranks).refused[0])


def test_a_refused_key_leaves_the_others_followed() -> None:
    config = {
        "train_batch_size": 10,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "bf16": BF16,
        "data_types": {"grad_accum_dtype": "fp16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "momentum": 0.9}},
    }
    found = translate(read(config))
    keys = {each.key for each in found.refused}
    assert keys == {"train_batch_size", "data_types.grad_accum_dtype", "optimizer.params.momentum"}
    assert (found.batch, found.max_norm, found.precision) == ({"micro": 4}, 0.5, "bf16")
    assert found.optimizer is not None
    assert found.optimizer.options["lr"] == 0.1


def test_what_deepspeed_does_not_read_is_needless() -> None:
    fp16 = {"enabled": True, "loss_scale": 8, "hysteresis": 2}
    config = zero(2, offload_param={"device": "nvme"}, zero_hpz_partition_size=8)
    found = translate(read({"fp16": fp16, **config}))
    idle = {"fp16.hysteresis", "zero_optimization.offload_param.device", PARTS}
    assert {each.key for each in found.verdicts if each.kind == NEEDLESS} == idle
    assert found.shard == {"stage": 2, "precision": "fp16", "offload": "none"}
    assert found.scaler is not None
    assert (found.scaler.init, found.scaler.floor) == (8.0, 8.0)


def test_sections_may_be_any_mapping_and_printing_may_be_left_off() -> None:
    params = MappingProxyType({"lr": 1e-4, "betas": (0.9, 0.95)})
    config = {"optimizer": {"type": "AdamW", "params": params}, "steps_per_print": math.inf}
    assert check_translated(config) == set()
    assert translate(read(config)).optimizer.options["betas"] == [0.9, 0.95]  # type: ignore[union-attr]


def test_ranks_make_a_batch_size_into_settings() -> None:
    words = advise(translate({"train_batch_size": 64}, 8), 8).settings
    assert {"train.microbatch_sequences=8", "train.accumulate=1"} <= {*words}


UNREADABLE = [
    (b"{", "JSONDecodeError"),
    (b"", "JSONDecodeError"),
    (b'{"fp16": {"enabled": true, "enabled": false}}', "twice"),
    (b'{"gradient_clipping": NaN}', "gradient_clipping is nan"),
    (b'{"gradient_clipping": 1e999}', "finite"),
    (b'{"a\\nb": {"steps_per_print": Infinity}}', "steps_per_print is inf"),
    (b'{"train_batch_size": 1' + b"0" * 5000 + b"}", "Hjson"),
    (b'{"train_batch_size": 1' + b"0" * 100 + b"}", "larger than any setting"),
    (b'{"a": ' * 100_000, "Error"),
    (b'{"a": ' * 50 + b"1" + b"}" * 50, "deeper"),
    (b"[1, 2]", "a list, not a mapping"),
    (b"\xff\xfe", "UnicodeDecodeError"),
    (b'{"x": "' + b"a" * (1 << 20) + b'"}', "larger than"),
]


@pytest.mark.parametrize(("data", "told"), UNREADABLE, ids=[told for _, told in UNREADABLE])
def test_what_is_no_configuration_is_refused_in_one_line(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=told) as error:
        read(path)
    assert "\n" not in str(error.value)
    for given in (tmp_path, tmp_path / "missing.json", "/dev/null", "eyJ0cmFpbl9iYXRjaF9zaXplIjogOH0="):
        with pytest.raises(ValueError, match="no such file"):
            read(given)


def test_hjson_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        """{
  // ZeRO
  "zero_optimization": {"stage": 3, /* of 3 */ "stage3_gather_16bit_weights_on_model_save": true,},
  # the rest
  gradient_clipping: 1.0,
  "train_batch_size": "auto",
}"""
    )
    assert read(path) == {
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "gradient_clipping": 1.0,
        "train_batch_size": "auto",
    }


OPEN = {
    "LR": 1e-3,
    "WEIGHT_DECAY": 0.1,
    "BETAS": (0.9, 0.95),
    "EPS": 1e-8,
    "MAX_NORM": 1.0,
    "MICROBATCHES": 2,
    "WARMUP_NUM_STEPS": 2,
    "TOTAL_NUM_STEPS": 9,
    "WARMUP_MIN_LR": 0,
    "WARMUP_MAX_LR": 1e-3,
}
"""What the lines leave to the reader."""
SOME = ["trainer_zero3_decay", "bloom_bf16", "megatron_fp16", "nvme_optimizer", "sgd"]
OTHERS = sorted({*CORPUS} - {*REFUSES, *SOME, "hpz"})  # hpz has parts of 8 ranks, which one does not have


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("names", [SOME, OTHERS], ids=["some", "others"])
@on_ranks(1)
def test_the_lines_for_a_loop_run(rank: int, ranks: int, names: list[str], tmp_path: Path) -> None:
    """Take a step by the advised lines of each configuration, with scratch folders that are here."""
    for name in names:
        lines = "\n".join(advise(translate(read(CORPUS[name]))).loop)
        lines = lines.replace("/scratch", str(tmp_path)).replace("/local_nvme", str(tmp_path))
        (tmp_path / f"{name}.py").write_text(lines)
        torch.manual_seed(0)  # with some weights, the first scale of fp16 overflows
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        given = {"model": model, "torch": torch, "dzero": dzero, "Schedule": Schedule, **OPEN}
        made = runpy.run_path(str(tmp_path / f"{name}.py"), given)
        optim = made["optim"]
        microbatches = int(lines.partition("microbatches=")[2].partition(")")[0].replace("MICROBATCHES", "2"))
        for number in range(microbatches):
            with made["sharded"].microbatch(is_last=number == microbatches - 1):
                inputs = torch.ones(2, 4, dtype=next(model.parameters()).dtype)
                optim.scale_loss(model(inputs).float().square().mean()).backward()
        optim.step()
        if "rates" in made:
            made["rates"].step()
        assert optim.last_decision.finite, name


def test_the_command_prints_three_ways_and_tells_by_its_exit_code(tmp_path: Path) -> None:
    done = command("from-deepspeed", CORPUS["trainer_zero3_decay"])
    assert done.returncode == 0, done.stderr
    for words in ("Taken", "Needless", "DzeroTrainer(", "dzero.shard(model, stage=3", "dzero train zero.stage=3"):
        assert words in done.stdout
    assert "zero_optimization.stage3_gather_16bit_weights_on_model_save = true" in done.stdout, "long keys are whole"
    done = command("from-deepspeed", CORPUS["typo"], "--json")
    assert done.returncode == 3
    assert {each["key"] for each in json.loads(done.stdout)["keys"]} == {*leaves(read(CORPUS["typo"]))}
    (other := tmp_path / "stage.json").write_text('{"zero_optimization": {"stage": "3"}}')
    done = command("from-deepspeed", other)
    assert done.returncode == 3
    assert done.stdout.endswith("\nNothing follows without a stage. Change it, and call this again.\n")
    done = command("from-deepspeed", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    for package in ("torch", "transformers", "numpy"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('not here')")
    path = os.pathsep.join([str(tmp_path), str(HERE.parents[1])])
    done = in_a_process("-m", "dzero", "from-deepspeed", CORPUS["typo"], cwd=tmp_path, env={"PYTHONPATH": path})
    assert done.returncode == 3, done.stderr


EXTREMES: list[Any] = [None, True, False, 0, 1, -1, 3, 10**18, -(10**18), 1e-300, 1e300, 0.5, "", "auto", "cpu", "nvme"]
EXTREMES += ["x\ny\0", [], {}, [0.9, 0.999], [1, "a"], {"enabled": True}, {"enabled": "auto"}, "${oc.env:HOME}", "/a'b"]
EXTREMES += ["\ud800", "AdamW"]


def mutated(draw: random.Random, config: Any) -> Any:
    """A configuration with a few keys dropped, renamed, moved or given another value."""
    config = copy.deepcopy(config)
    for _ in range(draw.randint(1, 4)):
        places = [(config, key) for key in config]
        places += [(each, key) for each in config.values() if isinstance(each, dict) for key in each]
        for each in [node[key] for node, key in places if isinstance(node[key], dict)]:
            places += [(each, key) for key in each]
        if not places:
            return config
        node, key = draw.choice(places)
        match draw.randint(0, 4):
            case 0:
                del node[key]
            case 1:
                node[key] = draw.choice(EXTREMES)
            case 2:
                node[f"{key}{draw.choice('xs_.=')}"] = node.pop(key)
            case 3:
                node[key] = {key: node[key]}
            case _:
                node[draw.choice([*TABLE]).rpartition(".")[2]] = draw.choice(EXTREMES)
    return config


@pytest.mark.parametrize(
    ("rounds", "compose"), [(400, False), pytest.param(3000, True, marks=pytest.mark.slow)], ids=["some", "thousands"]
)
def test_a_changed_configuration_has_verdicts_and_no_traceback(rounds: int, compose: bool) -> None:
    """With `compose` dzero takes the advice, too."""
    draw, clean = random.Random(rounds), 0
    configs = [json.loads(path.read_text()) for path in CORPUS.values()]
    for _ in range(rounds):
        config = mutated(draw, draw.choice(configs))
        try:
            refused = check_translated(config, draw.choice([None, 1, 3, 8]), compose=compose)
        except Exception as error:
            error.add_note(json.dumps(config))
            if not str(error).startswith("deepspeed={...}: "):
                raise
        else:
            clean += not refused
    assert clean > rounds / 20


# DzeroTrainer with a file, beside what TrainingArguments says


@pytest.mark.parametrize("path", CORPUS.values(), ids=[*CORPUS])
def test_the_advised_arguments_agree_with_the_file(path: Path, tmp_path: Path) -> None:
    translation = translate(read(path), ranks=1)
    if translation.refused:
        return
    advised = advise(translation, ranks=1).arguments
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, **{"max_steps": 5, **advised})
    optim = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    found = TrainerConfig(path, args)
    assert (found.scheduler(optim, args.max_steps, args) is None) == (translation.schedule is None)


def test_what_accelerate_launch_says_fills_auto(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    assert TrainerConfig({"bf16": {"enabled": "auto"}}, args).settings["precision"] == "bf16"
    assert TrainerConfig({"zero_optimization": {"stage": 1}}, args).settings["precision"] == "bf16"


def test_no_warm_up_is_told_as_0(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    rates = []
    for steps in (0, "auto"):
        params = {"total_num_steps": "auto", "warmup_num_steps": steps}
        optim = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        config = TrainerConfig({"scheduler": {"type": "WarmupDecayLR", "params": params}}, args)
        schedule = config.scheduler(optim, 4, args)
        for _ in range(4):
            rates.append(schedule.get_last_lr())
            optim.step()
            schedule.step()
    assert rates[:4] == rates[4:]


# Which checkpoint a run of DzeroTrainer goes on from, and what it may save over


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Whole checkpoints of steps 2 and 10, and what a killed save left at step 12."""
    for step in (2, 10, 12):
        (tmp_path / f"checkpoint-{step}" / "dzero").mkdir(parents=True)
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}" / LAST_FILE).touch()
    (tmp_path / "checkpoint-notes").mkdir()
    return tmp_path


def test_a_run_goes_on_from_the_last_whole_checkpoint(output: Path) -> None:
    killed = output / "checkpoint-12"
    assert checkpoint_to_resume(output, True, saves=False) == str(output / "checkpoint-10")
    assert killed.is_dir(), "a run that does not save moves nothing"
    assert checkpoint_to_resume(output, True, saves=True) == str(output / "checkpoint-10")
    names = {each.name for each in output.iterdir()}
    assert names == {"checkpoint-10", "checkpoint-2", "checkpoint-notes", "interrupted-save-12"}
    killed.mkdir()
    for name, told in (("checkpoint-3", "it is not there; whole"), ("checkpoint-12", "it was not saved to its end")):
        with pytest.raises(ValueError, match=f"{name}: {told}"):
            checkpoint_to_resume(output, str(output / name), saves=True)
    checkpoint_to_resume(output, str(output / "checkpoint-10/"), saves=True)
    assert (output / "interrupted-save-12.1").is_dir()


def test_a_run_that_would_save_over_checkpoints_is_refused(output: Path) -> None:
    assert checkpoint_to_resume(output, None, saves=False) is None
    for folder, resume, told in (
        (output, None, "checkpoint-2 is there already, and the run would save over it: go on from it"),
        (output, str(output / "checkpoint-2"), "checkpoint-10 is there already"),
        (output / "new", True, "resume_from_checkpoint=True: .*/new has no whole checkpoint"),
    ):
        with pytest.raises(ValueError, match=told):
            checkpoint_to_resume(folder, resume, saves=True)
    assert len([*output.iterdir()]) == 4, "nothing was moved"
