"""Configuration of a run: the config dataclasses of all packages, and checks between them.

Hydra composes `conf/` with `RunConfig` as its schema, so every key is typed. Besides this file, only `cli/train.py`,
`overrides.py` and `monitor/run_names.py` use Hydra.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dzero.checkpoint.config import CheckpointConfig, ExportConfig, ResumeConfig
from dzero.compatibility import check_compatible
from dzero.data.config import DataConfig
from dzero.errors import RunError
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.launch.config import LauncherConfig
from dzero.mesh_config import MeshConfig
from dzero.models.adapter_config import AdapterConfig
from dzero.models.config import ModelConfig
from dzero.monitor import run_names
from dzero.monitor.config import MonitorConfig, ProfileConfig
from dzero.optim.config import OptimConfig
from dzero.optim.loss_scaler import ScalerConfig
from dzero.optim.lr_schedule import ScheduleConfig
from dzero.parallel.config import BlockConfig
from dzero.parallel.divisibility import FP8_MULTIPLE, check_fp8_tokens, check_sizes
from dzero.precedence import NOTHING_TYPED, GaveWay, Typed, settle, typed_in_vain
from dzero.utils.hub_cache import local_folder
from dzero.utils.ranges import check, positive, whole
from dzero.utils.rules import Settings
from dzero.zero.config import PrecisionConfig, ZeroConfig
from dzero.zero.offload_config import OffloadConfig

PACKAGE = Path(__file__).parent
CONF = next((folder for folder in (PACKAGE / "conf", PACKAGE.parent / "conf") if folder.is_dir()), PACKAGE / "conf")
"""Folder of the config groups: inside an installed package, or beside the package in a clone."""

PLACES = (
    "checkpoint.folder",
    "data.cache",
    "export.folder",
    "model.name_or_path",
    "model.weights",
    "offload.disk.paths",
    "resume.source",
)
"""Settings of files and folders, in which `~` is expanded; shells do not expand it in KEY=~/FOLDER."""
MODELS = ("model.name_or_path", "model.weights")
"""Settings of folders that may be given as `org/name` of a repository in the local cache of Hugging Face."""
MOST_SEQUENCES = 10**6
"""Limit of the sequences of a microbatch, and of a step."""
MOST_EPOCHS = 10**6


class ConfigError(RunError):
    """Error for a setting that cannot take effect; the message names the key, the value and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run, and size of its steps.

    A step has microbatch_sequences x accumulate x ranks sequences. Ranks of a cp group count as one.
    """

    steps: int = 200
    """Number of optimizer steps."""
    epochs: float | None = None
    """Length of the run in passes over the data, from which the steps follow. null: steps."""
    microbatch_sequences: int = 4
    """Sequences per microbatch, the input of one forward and backward on a rank."""
    sequence_tokens: int = 256
    """Tokens per sequence."""
    accumulate: int | None = 1
    """Microbatches per step (gradient accumulation). null: computed from global_sequences."""
    global_sequences: int | None = None
    """Sequences per step over all ranks. If set, it is checked, or with accumulate=null determines accumulate."""
    seed: int = 0
    """Seed of initial weights and of the order of the data."""
    evaluate_every_steps: int = 100
    """Steps between two evaluations of the held-out loss."""
    evaluate_batches: int = 8
    """Microbatches per rank in each evaluation. 0: no evaluation."""
    patience: int | None = None
    """Evaluations in a row without a lower held-out loss after which the run ends. null: it goes on to its end."""
    answers: int | None = None
    """Held-out conversations that the model answers at each evaluation, into log and TensorBoard. null: 2 for
    data.kind=chat, with parameters on the device and whole sequences and layers on each rank."""
    answer_tokens: int = 32
    """Tokens of each answer."""
    max_skipped_steps: int = 20
    """Number of consecutive steps that may be skipped for non-finite gradients before the run stops."""
    on_nan: str = "skip"
    """Reaction to a non-finite loss on any rank: `skip` the step, or `stop` the run."""

    def __post_init__(self) -> None:
        if self.on_nan not in ("skip", "stop"):
            raise ValueError(f"train.on_nan={self.on_nan!r}: choose skip or stop")
        sequences = whole(1, MOST_SEQUENCES)
        check("train", self, microbatch_sequences=sequences, accumulate=sequences, global_sequences=sequences)
        check("train", self, patience=whole())
        check("train", self, answers=whole(0, MOST_SEQUENCES), answer_tokens=whole(1, MOST_SEQUENCES))
        check("train", self, epochs=positive(MOST_EPOCHS))
        check("train", self, steps=whole(), sequence_tokens=whole(), seed=whole(0, 2**63 - 1))
        check("train", self, evaluate_every_steps=whole(), evaluate_batches=whole(0), max_skipped_steps=whole(0))
        check_compatible(Settings.of(train=self))

    def microbatches(self, ranks: int) -> int:
        """Return the microbatches per optimizer step; raise ValueError if they cannot make `global_sequences`."""
        check_compatible(Settings.of(train=self).having({"step.readers": ranks}))
        if self.accumulate is not None:
            return self.accumulate
        assert self.global_sequences is not None
        return self.global_sequences // (self.microbatch_sequences * ranks)

    def over(self, sequences: int, ranks: int) -> TrainConfig:
        """Return these settings with the steps of `epochs` passes over as many sequences, the last one whole."""
        if self.epochs is None:
            return self
        steps = math.ceil(self.epochs * sequences / self.sequences(ranks))
        return replace(self, steps=max(1, steps), epochs=None)

    def sequences(self, ranks: int) -> int:
        """Return the sequences of one optimizer step over all ranks."""
        return self.microbatch_sequences * self.microbatches(ranks) * ranks


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run, one config group per package."""

    model: ModelConfig
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    auto: bool = False
    """Set by zero=auto: choose stage, tiers, recomputation and microbatch, unless they are given."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    block: BlockConfig = field(default_factory=BlockConfig)
    launch: LauncherConfig = field(default_factory=LauncherConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    hardware: HardwareConfig | None = None
    """Machine that predictions and `zero=auto` are made for. null: this machine. It has no effect on training."""

    @property
    def settings(self) -> Settings:
        """All settings, as the rules of what does not go together read them."""
        groups = {
            each.name: getattr(self, each.name) for each in fields(self) if is_dataclass(getattr(self, each.name))
        }
        return Settings.of(**groups).having({"auto": self.auto})

    @property
    def model_folder(self) -> str | None:
        """Folder that the model comes from, which may have its tokenizer; None for a model by sizes alone."""
        return self.model.weights_folder or (self.model.name_or_path if self.model.kind == "hf" else None)

    @property
    def token_multiple(self) -> int:
        """Number of tokens of which padded sequences have a multiple; 0 if all are padded to their full length."""
        if self.mesh.pp > 1:
            return 0
        in_8_bits = 1 if self.precision.compute == "param" else FP8_MULTIPLE * self.mesh.cp
        return math.lcm(self.mesh.token_multiple, in_8_bits)

    def __post_init__(self) -> None:
        if self.train.epochs is None:
            self.schedule.factor(self.train.steps)  # raises if warm-up and decay do not fit
            self.profile.check(self.train.steps)
        check_compatible(self.settings)
        check_sizes(self.mesh, self.model)
        self.mesh.check_tokens(self.train.sequence_tokens)
        if self.precision.compute != "param":
            tokens = self.train.microbatch_sequences * self.train.sequence_tokens
            check_fp8_tokens(self.precision.compute, tokens, self.mesh.cp)
        longest = self.model.max_tokens
        if longest is not None and longest < self.train.sequence_tokens:
            raise ValueError(
                f"train.sequence_tokens={self.train.sequence_tokens}: the model takes sequences up to "
                f"model.max_tokens={longest}; shorten them or raise that"
            )


def register(of: type[RunConfig] = RunConfig) -> None:
    """Register `of` as the schema with which Hydra composes `conf/`: `RunConfig`, or a subclass with more groups."""
    run_names.register()
    schema = OmegaConf.structured(of)
    _thaw(schema)
    schema.model = OmegaConf.structured(ModelConfig)  # it has no default, because its sizes come from conf/model
    _thaw(schema.model)
    ConfigStore.instance().store(name="run_schema", node=schema)


def _thaw(node: DictConfig) -> None:
    """Make settings writable: OmegaConf makes frozen dataclasses read-only, and Hydra closes mappings to new keys."""
    OmegaConf.set_readonly(node, False)
    if OmegaConf.get_type(node) is dict:
        OmegaConf.set_struct(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _thaw(child)


def resolve(composed: DictConfig) -> RunConfig:
    """Return the composed configuration as validated dataclasses; raise ConfigError if it is invalid."""
    return resolve_typed(composed, NOTHING_TYPED)[0]


def resolve_typed(composed: DictConfig, typed: Typed) -> tuple[RunConfig, tuple[GaveWay, ...]]:
    """Return the composed configuration as validated dataclasses, and settings of presets that gave way to typed ones.

    Args:
        composed: What Hydra composed.
        typed: Settings on the command line.

    Raises:
        ConfigError: It is invalid.
    """
    for key in PLACES:
        place = OmegaConf.select(composed, key)
        if isinstance(place, str):
            OmegaConf.update(composed, key, os.path.expanduser(place))
        elif isinstance(place, ListConfig):
            OmegaConf.update(composed, key, [os.path.expanduser(each) for each in place])
    try:
        for key in MODELS:  # once, so that all ranks read the same snapshot
            if isinstance(name := OmegaConf.select(composed, key), str):
                OmegaConf.update(composed, key, local_folder(name))
        return settle(composed, partial(_built, typed=typed), _updated, typed)
    except (ValueError, OSError, OmegaConfBaseException) as error:
        raise ConfigError(str(error)) from error


def _built(composed: DictConfig, typed: Typed) -> RunConfig:
    try:
        config = OmegaConf.to_object(composed)
    except FrozenInstanceError as unknown:  # a key that `+` added
        key = str(unknown).split("'")[1]
        raise ValueError(f"{key}: unknown key") from unknown
    assert isinstance(config, RunConfig)
    if error := typed_in_vain(config.settings, typed):
        raise error
    return config


def _updated(composed: DictConfig, way: GaveWay) -> DictConfig:
    changed = copy.deepcopy(composed)
    OmegaConf.update(changed, way.key, way.value, merge=False)
    return changed


def with_settings(config: RunConfig, settings: Mapping[str, Any], **top: Any) -> RunConfig:
    """Return the run with other values of some settings `group.name`, and of those at the `top`.

    ValueError is raised as by the dataclasses.
    """
    groups: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return replace(config, **top, **{group: replace(getattr(config, group), **each) for group, each in groups.items()})


def saving_apart(config: RunConfig, folder: Path) -> RunConfig:
    """Return `config` with its own checkpoint.folder, for one of several runs of a sweep.

    A relative folder is inside `folder`, the run's output folder. An absolute one gets a subfolder named like `folder`.
    """
    given = Path(config.checkpoint.folder)
    own = given / folder.name if given.is_absolute() else folder / given
    return replace(config, checkpoint=replace(config.checkpoint, folder=str(own)))


def as_yaml(config: RunConfig) -> str:
    """Return the resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))
