"""A DeepSpeed configuration in DzeroTrainer: "auto" and mismatches as transformers has them, and what follows.

transformers fills "auto" from TrainingArguments, and refuses other values that differ from them. Lengths of schedules
are filled when the number of steps is known. An optimizer of the file updates all trained parameters in one group, and
a schedule of the file replaces Trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from dzero.integrations.deepspeed.config_keys import TABLE
from dzero.integrations.deepspeed.forms import AUTO
from dzero.integrations.deepspeed.reading import read
from dzero.integrations.deepspeed.schedules import Schedule
from dzero.integrations.deepspeed.translation import Translation, translate
from dzero.integrations.deepspeed.verdicts import shown
from dzero.integrations.trainer_optimizer import OptimizerRecipe

Values = Mapping[str, Callable[[Any], Any]]
AT_START: Values = {
    "train_batch_size (calculated)": lambda args: (
        args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
    ),
    "per_device_train_batch_size": lambda args: args.per_device_train_batch_size,
    "gradient_accumulation_steps": lambda args: args.gradient_accumulation_steps,
    "max_grad_norm": lambda args: args.max_grad_norm,
    "learning_rate": lambda args: args.learning_rate,
    "betas": lambda args: [args.adam_beta1, args.adam_beta2],
    "adam_epsilon": lambda args: args.adam_epsilon,
    "weight_decay": lambda args: args.weight_decay,
    "fp16": lambda args: args.mixed_precision == "fp16",
    "bf16": lambda args: args.mixed_precision == "bf16",
    "zero": lambda args: 0,
}
"""Values of TrainingArguments, and of `accelerate launch`, by the name under `auto` in the table of keys."""
FREE = ("zero",)
"""Values that fill "auto", but that the file may contradict."""


class TrainerConfig:
    """A configuration as Trainer's arguments complete it.

    Args:
        given: A JSON file, or its content as a mapping.
        args: TrainingArguments.

    Attributes:
        translation: What dzero needs.

    Raises:
        ValueError: A key is refused, or differs from TrainingArguments.
    """

    def __init__(self, given: str | Path | Mapping[str, Any], args: Any) -> None:
        self._config = _filled(read(given), {name: value(args) for name, value in AT_START.items()})
        self._lr = args.learning_rate
        param = None if args.mixed_precision == "no" else args.mixed_precision
        self.translation: Translation = translate(self._config, args.world_size, param)
        if refused := self.translation.refused:
            raise ValueError("deepspeed: " + "; ".join(map(str, refused)))

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `dzero.shard`."""
        return self.translation.shard

    def optimizer(self, recipe: OptimizerRecipe) -> OptimizerRecipe:
        """Return the optimizer of the file if it has one, else `recipe`; with the file's loss scale and first rate."""
        found, scaler = self.translation.optimizer, self.translation.scaler
        rule, groups, settings = recipe.rule, recipe.groups, dict(recipe.settings)
        if found is not None:
            rule, settings = getattr(torch.optim, found.rule), dict(found.options)
            groups = [{"params": [name for group in groups for name in group["params"]]}]
            if "betas" in settings:
                settings["betas"] = tuple(settings["betas"])
        if self.translation.schedule is not None:
            settings["lr"] = Schedule(*self.translation.schedule, float(settings.get("lr", self._lr))).peak
        return OptimizerRecipe(rule, groups, settings if scaler is None else {**settings, "scaler": scaler})

    def scheduler(self, optim: Any, steps: int, args: Any) -> Any | None:
        """Return the schedule of the file over a run of `steps`; None if it has none.

        Raises:
            ValueError: Lengths in the file differ from the run's.
        """
        if self.translation.schedule is None:
            return None
        late = {"warmup_steps": args.get_warmup_steps(steps), "num_training_steps": steps}
        translation = translate(_filled(self._config, late), args.world_size)
        assert translation.schedule is not None
        lr = self._lr if translation.optimizer is None else translation.optimizer.options["lr"]
        return torch.optim.lr_scheduler.LambdaLR(optim, Schedule(*translation.schedule, float(lr)).factor())


def _filled(config: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with "auto" replaced by `values`; raise ValueError for values that differ from them."""
    filled, differing = deepcopy(config), []
    for key, row in TABLE.items():
        if row.auto is None or row.auto not in values:
            continue
        *sections, name = key.split(".")
        node: Any = filled
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if not isinstance(node, dict) or node.get(name) is None:
            continue
        if node[name] == AUTO:
            node[name] = values[row.auto]
        elif row.auto not in FREE and node[name] != values[row.auto]:
            differing.append(f"{key}={shown(node[name])} but {row.auto}={shown(values[row.auto])}")
    if differing:
        raise ValueError(f'deepspeed: the file and TrainingArguments differ: {"; ".join(differing)}; "auto" follows')
    return filled
