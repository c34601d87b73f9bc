"""`transformers.Trainer` over a model that dzero shards.

    trainer = DzeroTrainer(model=model, args=args, train_dataset=data, dzero={"stage": 3, "offload": "host"})
    trainer.train()

    what Trainer does              here
    wraps the model                `dzero.shard`, in place, where training or evaluation first needs the model
    creates an optimizer           `dzero.AdamW`, or `dzero.TorchOptimizer` around another class, with Trainer's groups
    accumulates                    `Sharded.microbatch` around each training step
    clips and logs the norm        the optimizer clips by the true norm of all ranks, and tells it after its step
    bf16=True, fp16=True           dtypes of the layout: 16-bit parameters with fp32 masters, instead of autocast
    saves a checkpoint             `dzero.Checkpointer` in the checkpoint's folder, beside what `from_pretrained` loads

Everything else is Trainer's own: data, schedules, callbacks, evaluation, logs and the files of its state.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dzero.checkpoint.checkpointer import Checkpointer
from dzero.checkpoint.config import CheckpointConfig
from dzero.checkpoint.save_pretrained import save_pretrained
from dzero.errors import import_optional
from dzero.optim.adamw import AdamW
from dzero.optim.base import MasterOptimizer
from dzero.optim.torch_optimizer import TorchOptimizer
from dzero.zero.shard import shard
from dzero.zero.sharded import Sharded

transformers: Any = import_optional("transformers", "DzeroTrainer", "hf")

ARGUMENTS = ("stage", "precision", "offload")
"""Arguments of `dzero.shard` that `dzero=` may hold; no mesh, since every rank reads batches of its own."""
STATES = "dzero"
"""Folder of model and optimizer states in a checkpoint of Trainer."""
TORCH_KERNELS = ("fused", "foreach")
"""Arguments that choose among torch's own kernels of AdamW."""


class DzeroMixin:
    """Part of a trainer that shards by dzero; put it before `Trainer` or a subclass, such as TRL's `SFTTrainer`.

    Args:
        args, kwargs: Those of the trainer.
        dzero: Arguments of `dzero.shard`: stage, precision, offload.

    Raises:
        TypeError: `dzero` has another argument.
        ValueError: An argument of Trainer asks for another way of sharding.
    """

    def __init__(self, *args: Any, dzero: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._shard_settings = dict(dzero or {})
        if unknown := self._shard_settings.keys() - {*ARGUMENTS}:
            raise TypeError(f"dzero={{{min(unknown)!r}: ...}}: it takes {[*ARGUMENTS]}")
        self.sharded: Sharded | None = None
        self._norm = torch.zeros(())
        super().__init__(*args, **kwargs)
        self._refuse()
        trainer: Any = self
        trainer.place_model_on_device = False
        trainer.accelerator.backward = self._backward

    def _refuse(self) -> None:
        """Raise ValueError for arguments that shard in another way, or need the whole model."""
        trainer: Any = self
        args = trainer.args
        for given, told in (
            (args.fsdp_plugin_args is not None, "fsdp: the model would be sharded twice; leave it away"),
            (args.deepspeed is not None, "deepspeed: take dzero= in its place"),
            (args.n_gpu > 1, "several GPUs in one process: start one process per GPU, with torchrun"),
            (trainer.optimizer is not None, "optimizers: made for the model before it was sharded; take args.optim"),
            (args.auto_find_batch_size, "auto_find_batch_size: the layout depends on the batch; choose one"),
            (args.torch_compile, "torch_compile: the model is compiled as a whole, around its shards; leave it away"),
            (args.bf16_full_eval or args.fp16_full_eval, "full_eval: dtypes are those of dzero=; take its precision"),
            (
                args.save_only_model and args.load_best_model_at_end,
                "save_only_model and load_best_model_at_end: the best model is loaded from its states; save these too",
            ),
        ):
            if given:
                raise ValueError(f"DzeroTrainer with {told}")

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Leave 16-bit dtypes to the layout."""
        trainer: Any = super()
        return {**trainer._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is; its shards are made on the device."""

    # Model and optimizer.

    def _shard(self) -> Sharded:
        """Shard the model, once."""
        trainer: Any = self
        if self.sharded is None:
            settings = {"stage": 2, **self._shard_settings}
            settings.setdefault("precision", self._precision())
            if not dist.is_initialized():  # a script that was started without torchrun
                store = dist.HashStore()  # type: ignore[attr-defined]  # public, but torch leaves it out of __all__
                dist.init_process_group(store=store, rank=0, world_size=1)
                atexit.register(dist.destroy_process_group)
            self.sharded = shard(trainer.model, microbatches=trainer.args.gradient_accumulation_steps, **settings)
            prepared = trainer.accelerator.prepare_model(trainer.model, device_placement=False, evaluation_mode=True)
            assert prepared is trainer.model
        return self.sharded

    def _precision(self) -> str:
        """Return the name of the dtypes that Trainer's arguments and the model's own dtype ask for."""
        trainer: Any = self
        if trainer.args.fp16:
            return "fp16"
        dtype = next(param.dtype for param in trainer.model.parameters() if param.is_floating_point())
        return "bf16" if trainer.args.bf16 or dtype == torch.bfloat16 else "fp32"

    def create_optimizer(self, model: nn.Module | None = None) -> MasterOptimizer:
        """Create the optimizer that `args.optim` names, over the shards."""
        trainer: Any = self
        if trainer.optimizer is None:
            sharded = self._shard()
            rule, settings = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(
                trainer.args, trainer.model
            )
            groups = self._groups()
            if rule is torch.optim.AdamW:
                settings = {key: value for key, value in settings.items() if key not in TORCH_KERNELS}
                trainer.optimizer = AdamW(sharded, groups, **settings)
            else:
                trainer.optimizer = TorchOptimizer(sharded, rule, groups, **settings)
            trainer.optimizer.register_step_post_hook(self._tell_norm)
            trainer.accelerator._optimizers.append(_Skips(trainer.optimizer))
        assert isinstance(trainer.optimizer, MasterOptimizer)
        return trainer.optimizer

    def _groups(self) -> list[dict[str, Any]]:
        trainer: Any = self
        decayed = {*trainer.get_decay_parameter_names(trainer.model)}
        named = [(name, param) for name, param in trainer.model.named_parameters() if param.requires_grad]
        groups = [
            {"params": [param for name, param in named if (name in decayed) is decays], "weight_decay": decay}
            for decays, decay in ((True, trainer.args.weight_decay), (False, 0.0))
        ]
        return [group for group in groups if group["params"]]

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Shard the model, create optimizer and schedule, and load a checkpoint."""
        trainer: Any = self
        if trainer._created_lr_scheduler:
            trainer.lr_scheduler, trainer._created_lr_scheduler = None, False
        self._shard().reshard()
        self.create_optimizer()
        trainer.create_scheduler(num_training_steps=max_steps)
        trainer.model_wrapped = trainer.model
        if resume_from_checkpoint is not None:
            trainer.lr_scheduler.load_state_dict(self._load_states(resume_from_checkpoint)["schedule"])
            for group, lr in zip(trainer.optimizer.param_groups, trainer.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = lr
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(trainer.callback_handler, name, getattr(trainer, name))
        trainer.callback_handler.train_dataloader = train_dataloader
        return trainer.model, train_dataloader

    # Steps.

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of one microbatch."""
        trainer: Any = super()
        own: Any = self
        with self._shard().microbatch(is_last=own.accelerator.sync_gradients):
            loss: Tensor = trainer.training_step(model, inputs, num_items_in_batch)
        return loss

    def _backward(self, loss: Tensor, **_: Any) -> None:
        trainer: Any = self
        trainer.optimizer.scale_loss(loss).backward()

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip in the optimizer's step; return a tensor that the step sets to the norm."""
        trainer: Any = self
        trainer.optimizer.max_norm = trainer.args.max_grad_norm
        return self._norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        """Return the tensor that the optimizer's step sets to the norm; without `grad_norm`, nothing is clipped."""
        trainer: Any = self
        if grad_norm is None:
            trainer.optimizer.max_norm = None
        return self._norm

    def _tell_norm(self, optim: MasterOptimizer, *_: Any) -> None:
        if optim.last_decision is not None:
            self._norm.fill_(optim.last_decision.norm)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the sharded model."""
        trainer: Any = super()
        self._shard()
        found = trainer.evaluation_loop(*args, **kwargs)
        self._shard().reshard()
        return found

    # Files.

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model, whole, for `from_pretrained`. All ranks call this."""
        trainer: Any = self
        target = Path(output_dir or trainer.args.output_dir)
        if trainer.args.should_save:
            target.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        # A name that all ranks know, in the folder itself, so that files move into place one by one.
        made = [tempfile.mkdtemp(dir=target) if trainer.args.should_save else None]
        dist.broadcast_object_list(made, src=0)
        folder = Path(str(made[0])) / "model"
        try:
            save_pretrained(self._shard(), folder)
            if trainer.args.should_save:
                for each in folder.iterdir():
                    os.replace(each, target / each.name)
        finally:
            if trainer.args.should_save:
                shutil.rmtree(folder.parent)
        if trainer.args.should_save:
            if isinstance(trainer.model, transformers.PreTrainedModel) and trainer.model.can_generate():
                trainer.model.generation_config.save_pretrained(target)
            if (processing := trainer.processing_class) is not None:
                processing.save_pretrained(target)
            torch.save(trainer.args, target / "training_args.bin")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, whole, for `from_pretrained`. All ranks call this."""
        trainer: Any = self
        self._save(output_dir)
        if trainer.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write model and optimizer states by shard, and the schedule."""
        trainer: Any = self
        folder = Path(output_dir) / STATES
        with Checkpointer(CheckpointConfig(folder=str(folder)), self._shard(), trainer.optimizer) as checkpoints:
            checkpoints.save(trainer.state.global_step, {"schedule": trainer.lr_scheduler.state_dict()})

    def _load_states(self, checkpoint: str) -> dict[str, Any]:
        """Load model and optimizer states, and return what was saved beside them."""
        trainer: Any = self
        folder = Path(checkpoint) / STATES
        if not folder.is_dir():
            raise ValueError(f"{checkpoint}: no states of dzero ({STATES}/) are there, as after save_only_model=True")
        with Checkpointer(CheckpointConfig(folder=str(folder)), self._shard(), trainer.optimizer) as checkpoints:
            resumed = checkpoints.resume("auto", strict=True)
        assert resumed is not None
        return resumed.extra

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Wait for `_prepare_for_training`, which loads weights with the optimizer's states."""

    def _load_best_model(self) -> None:
        """Load the states of the best checkpoint."""
        trainer: Any = self
        self._load_states(trainer.state.best_model_checkpoint)


class _Skips:
    """Answer to accelerate, which asks an optimizer whether its last step was skipped, as after an fp16 overflow."""

    def __init__(self, optim: MasterOptimizer) -> None:
        self._optim = optim

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing."""
        return self._optim.consecutive_skips > 0


class DzeroTrainer(DzeroMixin, transformers.Trainer):  # type: ignore[misc]  # an optional package, typed as Any
    """`transformers.Trainer` over a model that dzero shards; see `DzeroMixin`."""
