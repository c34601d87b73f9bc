"""Three ways to go on after a translation: DzeroTrainer, a loop of one's own, or a command line of `dzero train`."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dzero.integrations.deepspeed.forms import AUTO
from dzero.integrations.deepspeed.optimizers import Optimizer
from dzero.integrations.deepspeed.schedules import Schedule
from dzero.integrations.deepspeed.translation import Translation
from dzero.zero.config import PRECISIONS, PrecisionConfig, ZeroConfig
from dzero.zero.offload_config import OFFLOADS

KINDS = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
"""Schedule of dzero train that is nearest to DeepSpeed's."""


@dataclass(frozen=True)
class Advice:
    """What to write in place of a DeepSpeed configuration.

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
    yours: dict[str, str] = {}
    notes: list[str] = []
    states = [*_state_words(translation)]
    rest = [
        *_batch_words(translation, batch, yours),
        *_optimizer_words(translation, yours, notes),
        *_schedule_words(translation, yours, notes),
    ]
    if "gradient_clipping" not in given:
        notes.append(
            "gradient_clipping is not in the file: DeepSpeed 0.19.8 then clips at 1.0, and older versions do not"
        )
    if translation.precision is None:
        yours["precision"] = "bf16 and fp16 are auto: bf16, fp16 or fp32"
    can = translation.schedule is None or translation.schedule[0] in KINDS
    arguments = _arguments(translation, batch, given)
    loop = tuple(_loop(translation, batch))
    return Advice(arguments, loop, tuple(states + rest) if can else (), yours if can else {}, tuple(notes))


def batch_of(translation: Translation, ranks: int | None) -> dict[str, int]:
    """Return total, micro and accumulate as far as they follow from each other and `ranks`."""
    found = dict(translation.batch)
    if "total" in found and "micro" not in found and ranks is not None:
        found.setdefault("accumulate", 1)
        found["micro"] = found["total"] // (found["accumulate"] * ranks)
    elif {"total", "micro"} <= found.keys() and "accumulate" not in found and ranks is not None:
        found["accumulate"] = found["total"] // (found["micro"] * ranks)
    return found


def as_code(value: Any) -> str:
    """Return a setting as Python; of a config, the fields that differ from its defaults."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    default: Any = type(value)
    fields = ", ".join(f"{key}={as_code(each)}" for key, each in _differing(value, default()))
    return f"dzero.{type(value).__name__}({fields})"


def _differing(value: Any, base: Any) -> Iterator[tuple[str, Any]]:
    for each in dataclasses.fields(value):
        if getattr(value, each.name) != getattr(base, each.name):
            yield each.name, getattr(value, each.name)


def _words(group: str, value: Any, base: Any) -> list[str]:
    """Return settings of a command line for what differs between two configs of a group."""
    words = []
    for key, each in _differing(value, base):
        if dataclasses.is_dataclass(each):
            words += _words(f"{group}.{key}", each, getattr(base, key))
        else:
            words.append(f"{group}.{key}={_word(each)}")
    return words


def _word(value: Any) -> str:
    """Return a value as Hydra reads it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(repr(each) if isinstance(each, str) else _word(each) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_word(each)}' for key, each in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _preset_words(group: str, value: Any, presets: Mapping[str, Any]) -> list[str]:
    """Return the nearest preset of a group, and what differs from it."""
    if isinstance(value, str):
        return [f"{group}={value}"]
    name = min(presets, key=lambda each: len(_words(group, value, presets[each])))
    return [f"{group}={name}", *_words(group, value, presets[name])]


def _state_words(translation: Translation) -> Iterator[str]:
    zero = translation.stage if isinstance(translation.stage, ZeroConfig) else ZeroConfig(stage=translation.stage)
    yield f"zero.stage={zero.stage}"
    yield from (word for word in _words("zero", zero, ZeroConfig()) if not word.startswith("zero.stage="))
    if translation.precision is not None:
        yield from _preset_words("precision", translation.precision, PRECISIONS)
    yield from _preset_words("offload", translation.offload, OFFLOADS)
    if translation.scaler is not None:
        yield from _words("scaler", translation.scaler, type(translation.scaler)())


def _batch_words(translation: Translation, batch: Mapping[str, int], yours: dict[str, str]) -> Iterator[str]:
    if "total" in batch:
        yield f"train.global_sequences={batch['total']}"
    if "micro" in batch:
        yield f"train.microbatch_sequences={batch['micro']}"
    elif "total" in batch:
        yours["train.microbatch_sequences"] = "it follows from the number of ranks: give --ranks"
    else:
        yours["train.microbatch_sequences"] = "the file leaves it open"
    if "accumulate" in batch:
        yield f"train.accumulate={batch['accumulate']}"
    elif {"total", "micro"} <= batch.keys():
        yield "train.accumulate=null"  # it follows from the total


def _optimizer_words(translation: Translation, yours: dict[str, str], notes: list[str]) -> Iterator[str]:
    optimizer, peak = translation.optimizer, _peak(translation)
    if translation.max_norm == AUTO:
        yours["optim.max_norm"] = "gradient_clipping is auto"
    else:
        yield f"optim.max_norm={_word(translation.max_norm)}"
    if optimizer is None:
        yours |= dict.fromkeys(("optim.lr", "optim.weight_decay"), "the file has no optimizer")
        return
    options = {**optimizer.options, **({} if peak is None else {"lr": peak})}
    yours |= {f"optim.{key}": "it is auto" for key in optimizer.auto if key not in options}
    if optimizer.rule == "AdamW":
        yield from (f"optim.{key}={_word(value)}" for key, value in options.items())
    else:
        own = {key: value for key, value in options.items() if key not in ("lr", "weight_decay")}
        yield f"optim.rule={optimizer.rule}"
        yield from (f"optim.{key}={_word(value)}" for key, value in options.items() if key not in own)
        if own:
            yield f"optim.options={_word(own)}"
    if options.get("weight_decay") != 0:
        notes.append("dzero train decays matrices only; DeepSpeed, DzeroTrainer and the loop decay every parameter")


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


def _schedule_words(translation: Translation, yours: dict[str, str], notes: list[str]) -> Iterator[str]:
    if translation.schedule is None:
        yours["schedule.kind"] = "the file has no scheduler, so the rate stays: schedule.kind=constant"
        return
    kind, params = translation.schedule
    if kind not in KINDS:
        notes.append("dzero train has no such schedule: take DzeroTrainer or the loop")
        return
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
    how = params.get("warmup_type", "log").lower()
    notes.append(
        f"dzero train warms up linearly, by (t + 1)/(steps + 1) at update t; this file rises by {how} from its least "
        "rate, one update later; DzeroTrainer and the loop below do as the file says"
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
    return found


def _loop(translation: Translation, batch: Mapping[str, int]) -> Iterator[str]:
    shard = {**translation.shard, "microbatches": batch.get("accumulate", 1)}
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
