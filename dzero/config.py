"""The whole configuration of a run: the owners' dataclasses under one roof, and what must agree between them.

Hydra composes `conf/` onto `RunConfig` as its schema, so every key is typed. Besides train.py and the command-line
doors, no other file knows Hydra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dzero.checkpoint.config import CheckpointConfig
from dzero.comm.collectives import is_exact
from dzero.data.corpus import DataConfig
from dzero.data.files import find
from dzero.degrees import MeshConfig
from dzero.errors import RunError
from dzero.launch import LauncherConfig, launched
from dzero.models.config import ModelConfig
from dzero.models.hf import check_folder
from dzero.monitor.profile import ProfileConfig
from dzero.monitor.sink import MonitorConfig
from dzero.optim.build import OptimConfig
from dzero.optim.scaler import ScalerConfig
from dzero.optim.schedule import ScheduleConfig
from dzero.parallel.blocks import BlockConfig
from dzero.parallel.schedules import check_microbatches
from dzero.plan.machine import HardwareConfig
from dzero.together import Together, check_together
from dzero.zero.layout import Layout, PrecisionConfig, ZeroConfig
from dzero.zero.tiers import OffloadConfig


class ConfigError(RunError):
    """A setting that cannot take effect; the message names the key, the value and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and in what portions.

    A step consumes `microbatch_sequences` x `accumulate` x ranks sequences of `sequence_tokens` tokens, where those of
    mesh.cp, which share theirs, count as one; set `global_sequences` to have that product checked, or with `accumulate`
    None made, whatever the number of ranks.
    `evaluate_every_steps`: held-out loss on `evaluate_batches` microbatches per rank (0: never). `max_skipped_steps`:
    in a row, for what is not finite, before the run stops. `on_nan`: a rank's loss that is not finite, though its
    gradients may be: skip the step, or stop.
    """

    steps: int = 200
    microbatch_sequences: int = 4
    sequence_tokens: int = 256
    accumulate: int | None = 1
    global_sequences: int | None = None
    seed: int = 0
    evaluate_every_steps: int = 100
    evaluate_batches: int = 8
    max_skipped_steps: int = 20
    on_nan: str = "skip"

    def __post_init__(self) -> None:
        if self.on_nan not in ("skip", "stop"):
            raise ValueError(f"train.on_nan={self.on_nan!r}: choose skip or stop")
        if self.accumulate is None and self.global_sequences is None:
            raise ValueError("train.accumulate=null: set train.global_sequences, from which it then follows")
        for key in ("steps", "microbatch_sequences", "sequence_tokens", "accumulate", "evaluate_every_steps"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"train.{key}={value}: must be a whole number ≥ 1")
        for key in ("seed", "evaluate_batches", "max_skipped_steps"):
            if getattr(self, key) < 0:
                raise ValueError(f"train.{key}={getattr(self, key)}: must be a whole number ≥ 0")

    def microbatches(self, ranks: int) -> int:
        """Of one optimizer step. Raises ValueError where `global_sequences` is not what ranks and microbatches make."""
        wanted, per_rank = self.global_sequences, self.microbatch_sequences * ranks
        made = self.accumulate or (wanted or 0) // per_rank
        if wanted is None or wanted == made * per_rank:
            return made
        allowed = (
            f"train.accumulate={wanted // per_rank} makes it"
            if wanted % per_rank == 0
            else f"with {ranks} ranks it must be a multiple of {per_rank}, or change train.microbatch_sequences"
        )
        if self.accumulate is None:
            raise ValueError(
                f"train.global_sequences={wanted} is no multiple of train.microbatch_sequences="
                f"{self.microbatch_sequences} x {ranks} ranks, so train.accumulate=null finds no number; {allowed}"
            )
        raise ValueError(
            f"train.global_sequences={wanted}, but train.microbatch_sequences={self.microbatch_sequences} x "
            f"train.accumulate={self.accumulate} x {ranks} ranks = {made * per_rank}; {allowed}"
        )

    def sequences(self, ranks: int) -> int:
        """Sequences of one optimizer step over all ranks."""
        return self.microbatch_sequences * self.microbatches(ranks) * ranks


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that `train.py` obeys, one group per owner."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    auto: bool = False
    """`zero=auto`: choosing.py settles what was not given before anything starts; what runs has False here."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    block: BlockConfig = field(default_factory=BlockConfig)
    launch: LauncherConfig = field(default_factory=LauncherConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: str | None = None
    """A checkpoint's folder, `auto` for the latest in checkpoint.folder, None to start afresh."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    hardware: HardwareConfig | None = None
    """What predictions and `zero=auto` are made for; None is this machine. A run obeys none of it."""

    def __post_init__(self) -> None:
        self.schedule.factor(self.train.steps)  # raises where warm-up and decay do not fit
        self.profile.check(self.train.steps)
        if self.precision.param != "fp16":
            keys = [item.name for item in fields(self.scaler)]
            _refuse_changed("scaler", self.scaler, keys, f"at precision.param={self.precision.param}, only at fp16")
        if self.train.evaluate_batches == 0:
            _refuse_changed("train", self.train, ["evaluate_every_steps"], "with train.evaluate_batches=0")
        if self.data.held_out == 0.0:
            keys = ["evaluate_every_steps", "evaluate_batches"]
            _refuse_changed("train", self.train, keys, "with data.held_out=0")
        if self.checkpoint.every is None:
            keys = ["keep", "last", "staging_bytes", "verify", "on_error", "deadline_s"]
            _refuse_changed("checkpoint", self.checkpoint, keys, "without checkpoint.every")
        if self.offload.activations != "device" and self.block.activation_checkpoint == "none":
            raise ValueError(
                f"offload.activations={self.offload.activations} with block.activation_checkpoint=none: only what a "
                "block keeps of its inputs leaves the device, and without checkpointing that is the smallest part of "
                "what it keeps; take block.activation_checkpoint=full, or offload.activations=device"
            )
        check_together(Together(self.mesh, self.model, self.block, self.zero, self.offload, self.optim.rule))
        self.mesh.check_tokens(self.train.sequence_tokens)
        self.optim.check_whole({"mesh.tp": self.mesh.tp, "mesh.ep": self.mesh.ep, "block.tiles": self.block.tiles})
        longest = self.model.max_tokens
        if longest is not None and longest < self.train.sequence_tokens:
            raise ValueError(
                f"train.sequence_tokens={self.train.sequence_tokens}: the model takes sequences up to "
                f"model.max_tokens={longest}; shorten them or raise that"
            )

    @property
    def worker_count(self) -> int:
        """Ranks of a plain run on this machine: launch.workers, or as many as the mesh says, or as devices.

        Raises ValueError for more than there are GPUs.
        """
        wanted = self.launch.workers or self.mesh.ranks
        inner = self.mesh.sharing * self.mesh.pp
        if wanted is None and self.launch.device_type == "cpu" and inner > 1:
            wanted = inner
        return replace(self.launch, workers=wanted).worker_count

    def check_ranks(self, world: int) -> None:
        """What depends on the number of all ranks. Raises ValueError."""
        self.layout(self.mesh.data_ranks(world), self.launch.device_type)

    def layout(self, ranks: int, device_type: str) -> Layout:
        """The table as these settings fill it on `ranks` data-parallel ranks. Raises ValueError."""
        replicate, shard = self.mesh.degrees(ranks, stage=self.zero.stage)
        layout = Layout.of(
            self.zero,
            self.precision,
            self.offload,
            replicate=replicate,
            shard=shard,
            microbatches=self.train.microbatches(self.mesh.readers(ranks)),
            exact=is_exact(self.zero.reduction, device_type),
            model_ranks=self.mesh.tp,
            pipeline_ranks=self.mesh.pp,
            expert_ranks=self.mesh.ep,
        )
        if self.mesh.pp > 1:
            check_microbatches(self.mesh.pp_schedule, layout.microbatches, self.mesh.pp)
        self.optim.check(layout)
        return layout

    def check_here(self) -> None:
        """What this machine can tell before any worker starts: its devices and files. Raises ValueError or OSError."""
        if not launched():
            self.check_ranks(self.worker_count)
        elif self.launch.workers is not None:
            raise ValueError(f"launch.workers={self.launch.workers} has no effect under torchrun; remove it")
        if self.data.path is not None:
            find(self.data.path)
        if self.model.name_or_path is not None:
            check_folder(self.model.name_or_path)
        if isinstance(self.model.weights, str) and not Path(self.model.weights).is_dir():
            raise FileNotFoundError(f"model.weights={self.model.weights}: no such folder; nothing is downloaded")


def _refuse_changed(group: str, config: Any, keys: Sequence[str], why: str) -> None:
    """Raises ValueError for a value that is not its default, where none has an effect."""
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name in keys and value != item.default:
            raise ValueError(f"{group}.{item.name}={value} has no effect {why}; remove it")


def register(of: type[RunConfig] = RunConfig) -> None:
    """Make `of` the schema under which Hydra composes `conf/`: `RunConfig`, or one with groups of its own besides."""
    schema = OmegaConf.structured(of)
    _thaw(schema)
    schema.model = OmegaConf.structured(ModelConfig)  # has no default: its sizes come from conf/model
    _thaw(schema.model)
    ConfigStore.instance().store(name="run_schema", node=schema)


def _thaw(node: DictConfig) -> None:
    """OmegaConf makes the config of a frozen dataclass read-only, and Hydra closes mappings: open both to settings."""
    OmegaConf.set_readonly(node, False)
    if OmegaConf.get_type(node) is dict:
        OmegaConf.set_struct(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _thaw(child)


def resolve(composed: DictConfig) -> RunConfig:
    """The composed configuration as validated dataclasses. Raises ConfigError."""
    try:
        config = OmegaConf.to_object(composed)
    except (ValueError, OmegaConfBaseException) as error:
        raise ConfigError(str(error)) from error
    assert isinstance(config, RunConfig)
    return config


def as_yaml(config: RunConfig) -> str:
    """The resolved configuration, for people."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))
