"""Three ways to go on after a translation: DzeroTrainer, a loop of one's own, or a command line of `dzero train`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dzero.integrations.deepspeed.forms import AUTO
from dzero.integrations.deepspeed.optimizers import Optimizer
from dzero.integrations.deepspeed.schedules import Schedule
from dzero.integrations.deepspeed.translation import Translation
from dzero.integrations.deepspeed.words import as_code, preset_words, word_of, words_of
from dzero.zero.config import PRECISIONS, PrecisionConfig, ZeroConfig
from dzero.zero.offload_config import OFFLOADS

KINDS = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
"""Schedule of dzero train that is nearest to DeepSpeed's."""


@dataclass(frozen=True)
class Advice:
    """Three ways to go on from a DeepSpeed configuration.

    Attributes:
        arguments: Arguments of TrainingArguments that agree with the file.
        loop: Lines of Python for a loop of one's own.
        settings: Words of a command line of `dzero train`, empty if it cannot do what the file asks for.
        yours: Settings of that command line which the file leaves open, and what they depend on.
        notes: What differs from DeepSpeed.
    """

    arguments: dict[str, Any]
    loop: tuple[str, ...]
    settings: tuple[str, ...]
    yours: dict[str, str]
    notes: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command line, quoted for a shell."""
        return shlex.join(["dzero", "train", *self.settings])


def advise(translation: Translation, ranks: int | None = None) -> Advice:
    """Return the three ways.

    Args:
        translation: A translated configuration.
        ranks: Number of ranks; None: not known.
    """
    given = {each.key for each in translation.verdicts}
    batch = batch_of(translation, ranks)
    arguments, loop = _arguments(translation, batch, given), tuple(_loop(translation, batch))
    notes = tuple(_notes(translation, batch))
    if translation.schedule is not None and translation.schedule[0] not in KINDS:
        return Advice(arguments, loop, (), {}, notes)
    yours: dict[str, str] = {}
    words = (
        *_state_words(translation, yours),
        *_batch_words(batch, yours),
        *_optimizer_words(translation, yours),
        *_schedule_words(translation, yours),
    )
    return Advice(arguments, loop, words, yours, notes)


def batch_of(translation: Translation, ranks: int | None) -> dict[str, int]:
    """Return total, micro and accumulate as far as they follow from each other and `ranks`, as in DeepSpeed."""
    found = dict(translation.batch)
    values = {each.key: each.value for each in translation.verdicts}
    if AUTO not in (values.get("gradient_accumulation_steps"), values.get("train_micro_batch_size_per_gpu")):
        if found and not {"total", "micro"} <= found.keys():
            found.setdefault("accumulate", 1)
        if "total" in found and ranks is not None:
            found.setdefault("micro", found["total"] // (found.get("accumulate", 1) * ranks))
            found.setdefault("accumulate", found["total"] // (found["micro"] * ranks))
    return found


def _state_words(translation: Translation, yours: dict[str, str]) -> Iterator[str]:
    zero = translation.stage if isinstance(translation.stage, ZeroConfig) else ZeroConfig(stage=translation.stage)
    yield f"zero.stage={zero.stage}"
    yield from (word for word in words_of("zero", zero, ZeroConfig()) if not word.startswith("zero.stage="))
    if translation.precision is None:
        yours["precision"] = "bf16 and fp16 are auto: bf16, fp16 or fp32"
    else:
        yield from preset_words("precision", translation.precision, PRECISIONS)
    yield from preset_words("offload", translation.offload, OFFLOADS)
    if translation.scaler is not None:
        yield from words_of("scaler", translation.scaler, type(translation.scaler)())


def _batch_words(batch: Mapping[str, int], yours: dict[str, str]) -> Iterator[str]:
    if "total" in batch:
        yield f"train.global_sequences={batch['total']}"
    if "micro" in batch:
        yield f"train.microbatch_sequences={batch['micro']}"
    else:
        yours["train.microbatch_sequences"] = "the file leaves it open; --ranks=N finds it from train_batch_size"
    if "accumulate" in batch:
        yield f"train.accumulate={batch['accumulate']}"
    elif "total" in batch:
        yield "train.accumulate=null"  # it follows from the total
    else:
        yours["train.accumulate"] = "the file leaves it open"


def _optimizer_words(translation: Translation, yours: dict[str, str]) -> Iterator[str]:
    optimizer, peak = translation.optimizer, _peak(translation)
    if translation.max_norm == AUTO:
        yours["optim.max_norm"] = "gradient_clipping is auto"
    else:
        yield f"optim.max_norm={word_of(translation.max_norm)}"
    if optimizer is None:
        yours |= dict.fromkeys(("optim.lr", "optim.weight_decay"), "the file has no optimizer")
        return
    options = {**optimizer.options, **({} if peak is None else {"lr": peak})}
    yours |= {f"optim.{key}": "it is auto" for key in optimizer.auto if key not in options}
    if optimizer.rule == "AdamW":
        yield from (f"optim.{key}={word_of(value)}" for key, value in options.items())
    else:
        own = {key: value for key, value in options.items() if key not in ("lr", "weight_decay")}
        yield f"optim.rule={optimizer.rule}"
        yield from (f"optim.{key}={word_of(value)}" for key, value in options.items() if key not in own)
        if own:
            yield f"optim.options={word_of(own)}"


def _peak(translation: Translation) -> float | None:
    """Return the rate that the schedule puts in place of the optimizer's; None if it has none or leaves it open."""
    if translation.schedule is None:
        return None
    kind, params = translation.schedule
    lr = None if translation.optimizer is None else translation.optimizer.options.get("lr")
    if params.get("warmup_max_lr", lr) in (None, AUTO) and kind in ("warmuplr", "warmupcosinelr", "warmupdecaylr"):
        return None
    known = {key: value for key, value in params.items() if value != AUTO}
    return Schedule(kind, known, 0.0 if lr is None else float(lr)).peak


def _schedule_words(translation: Translation, yours: dict[str, str]) -> Iterator[str]:
    if translation.schedule is None:
        yours["schedule.kind"] = "the file has no scheduler, so the rate stays: schedule.kind=constant"
        return
    kind, params = translation.schedule
    yield f"schedule.kind={KINDS[kind]}"
    steps, total = params.get("warmup_num_steps", 1000), params.get("total_num_steps", AUTO)
    if steps == AUTO:
        yours["schedule.warmup_steps"] = "warmup_num_steps is auto"
    else:
        yield f"schedule.warmup_steps={int(steps)}"
    if total == AUTO:
        yours["train.steps"] = "the length of the run" + ("" if steps == AUTO else f", at least {int(steps)}")
    else:
        yield f"train.steps={max(int(total), 0 if steps == AUTO else int(steps))}"
    if kind != "warmuplr":
        yield f"schedule.final={params.get('cos_min_ratio', 1e-4) if kind == 'warmupcosinelr' else 0.0}"


def _notes(translation: Translation, batch: Mapping[str, int]) -> Iterator[str]:
    """Yield what differs from DeepSpeed in numbers that the verdicts of single keys do not tell."""
    values = {each.key: each.value for each in translation.verdicts}
    optimizer, schedule = translation.optimizer, translation.schedule
    if "gradient_clipping" not in values:
        yield "gradient_clipping is not in the file: DeepSpeed 0.19.8 then clips at 1.0; DzeroTrainer by max_grad_norm"
    if translation.precision in ("bf16", "fp16", None) and batch.get("accumulate") != 1:
        yield "DeepSpeed adds microbatches in 16 bits unless data_types.grad_accum_dtype is fp32; dzero adds in fp32"
    if translation.scaler is not None and translation.scaler.hysteresis > 1:
        yield "a finite step refills the loss scale's hysteresis, as with consecutive_hysteresis"
    if optimizer is not None and optimizer.rule == "AdamW" and str(values.get("optimizer.type")).lower() == "adam":
        yield "Adam in the file is AdamW, as in DeepSpeed unless adam_w_mode is false"
    if optimizer is not None and optimizer.options.get("weight_decay") != 0:
        yield "dzero train decays matrices only; DeepSpeed, DzeroTrainer and the loop decay every parameter"
    if schedule is None:
        return
    lr, most = (None if optimizer is None else optimizer.options.get("lr")), schedule[1].get("warmup_max_lr", AUTO)
    if lr is not None and most not in (lr, AUTO):
        yield "warmup_max_lr replaces lr; transformers and DzeroTrainer want them equal, so write it as lr in the file"
    if translation.scaler is not None:
        yield "in a loop, leave out rates.step() where optim.consecutive_skips > 0, as DeepSpeed and DzeroTrainer do"
    if schedule[0] not in KINDS:
        yield "dzero train has no such schedule: take DzeroTrainer or the loop"
    else:
        how = "linearly" if schedule[1].get("warmup_type", "log").lower() == "linear" else "with the step's logarithm"
        yield (
            f"dzero train warms up by (t + 1)/(steps + 1) at update t; DeepSpeed rises {how}, one update later, as "
            "DzeroTrainer and the loop do here"
        )


def _arguments(translation: Translation, batch: Mapping[str, int], given: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    precision = translation.precision
    param = precision.param if isinstance(precision, PrecisionConfig) else precision
    found |= {param: True} if param in ("bf16", "fp16") else {}
    names = {"micro": "per_device_train_batch_size", "accumulate": "gradient_accumulation_steps"}
    found |= {name: batch[key] for key, name in names.items() if key in batch}
    if "gradient_clipping" in given and translation.max_norm != AUTO:
        found["max_grad_norm"] = translation.max_norm or 0.0
    options = {} if translation.optimizer is None else translation.optimizer.options
    if (peak := _peak(translation)) is not None or "lr" in options:
        found["learning_rate"] = options.get("lr", peak)
    if "betas" in options:
        found["adam_beta1"], found["adam_beta2"] = options["betas"]
    found |= {name: options[key] for key, name in (("eps", "adam_epsilon"),) if key in options}
    found |= {"weight_decay": options["weight_decay"]} if "weight_decay" in options else {}
    params = {} if translation.schedule is None else translation.schedule[1]
    for key, name in (("warmup_num_steps", "warmup_steps"), ("total_num_steps", "max_steps")):
        if params.get(key, AUTO) != AUTO:
            found[name] = int(params[key])
    return found


def _loop(translation: Translation, batch: Mapping[str, int]) -> Iterator[str]:
    shard = {**translation.shard, "microbatches": batch.get("accumulate", AUTO)}
    yield f"sharded = dzero.shard(model, {_call(shard)})"
    optimizer, peak = translation.optimizer or Optimizer("AdamW", {}, ("lr", "weight_decay")), _peak(translation)
    options = {**optimizer.options, **dict.fromkeys(optimizer.auto, AUTO)}
    lr = options["lr"]
    options |= {"lr": lr if peak is None else peak, "max_norm": translation.max_norm}
    if "betas" in options and options["betas"] != AUTO:
        options["betas"] = tuple(options["betas"])
    if translation.scaler is not None:
        options["scaler"] = translation.scaler
    ours = optimizer.rule == "AdamW"
    made = "dzero.AdamW(sharded, " if ours else f"dzero.TorchOptimizer(sharded, torch.optim.{optimizer.rule}, "
    yield f"optim = {made}{_call(options)})"
    if translation.schedule is not None:
        kind, params = translation.schedule
        given = ", ".join(f"{key!r}: {_open(key, value)}" for key, value in params.items())
        yield f"schedule = Schedule({kind!r}, {{{given}}}, lr={_open('lr', lr)})"
        yield "rates = torch.optim.lr_scheduler.LambdaLR(optim, schedule.factor())"


def _call(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_open(key, value)}" for key, value in arguments.items())


def _open(key: str, value: Any) -> str:
    """Return a value as Python, and one that is "auto" as a name in capitals."""
    return key.upper() if value == AUTO else as_code(value)
