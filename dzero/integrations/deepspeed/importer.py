"""Import of checkpoints of DeepSpeed: the states in a folder become a checkpoint of dzero, tensor by tensor.

    universal checkpoint (ds_to_universal)            masters, moments, number of updates, step
    pytorch_model.bin, model.safetensors              masters; moments are zeros, as at the start of a run
    (zero_to_fp32)

The checkpoint is of the ordinary format: any stage, tier and number of ranks resumes from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dzero.checkpoint.export_hf import MODEL
from dzero.checkpoint.format import BUFFER, MASTER, PARAM, StoredBox
from dzero.checkpoint.store import Directory
from dzero.checkpoint.whole_checkpoint import IMPORTED, WholeTensor, write_checkpoint
from dzero.integrations.deepspeed.consolidated import WEIGHTS, read_weights
from dzero.integrations.deepspeed.fitting import fitted
from dzero.integrations.deepspeed.states import MOMENTS, DeepSpeedStates
from dzero.integrations.deepspeed.torch_reader import TorchFiles
from dzero.integrations.deepspeed.universal import ZERO, read_universal
from dzero.models.published import describe

SCHEDULE = "schedule"
"""Key of a checkpoint's `extra` for the state of a schedule of torch, as `DzeroTrainer` reads it."""
LATEST_UNIVERSAL, LATEST = "latest_universal", "latest"
MOST_TAG_BYTES = 4096
UNCONVERTED = "_optim_states.pt"


@dataclass(frozen=True)
class Import:
    """An import that was checked, and can be written.

    Attributes:
        tensors: Tensors to write, by their names in a checkpoint.
        state: Values of the manifest that are not tensors.
        step: Step of the checkpoint.
        lrs: Learning rate of each parameter group of DeepSpeed; empty if there is none.
    """

    states: DeepSpeedStates
    tensors: Mapping[str, WholeTensor]
    state: dict[str, Any]
    step: int
    lrs: list[float]

    @property
    def tensor_bytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(StoredBox.unplaced(name, each.dtype, each.shape).size_bytes for name, each in self.tensors.items())

    def write(self, target: Path, progress: Callable[[int], None] = lambda count: None) -> Path:
        """Write the checkpoint into the new folder `target`, verify it, and return its path."""
        return write_checkpoint(target, self.step, self.tensors, self.state, progress)


def import_deepspeed(
    folder: Path | str,
    target: Path | str,
    model: nn.Module | None = None,
    *,
    step: int | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Path:
    """Write a checkpoint that holds the states in a folder of DeepSpeed; call this in one process.

    Args:
        folder: A universal checkpoint, the folder above it, or a folder of weights.
        target: New folder of checkpoints, which `Checkpointer` resumes from.
        model: Model that will resume, before `shard`; it may be on the meta device, unless the folder leaves out
            frozen parameters, which are then taken from it. None: the names and shapes of its parameters are those of
            DeepSpeed.
        step: Step of the checkpoint. None: that of DeepSpeed's run.
        progress: Called with the bytes of each tensor that was written.

    Returns:
        The checkpoint.

    Raises:
        ValueError: If the folder is damaged, holds code, is not converted, or is of another model.
        CheckpointError: If `target` exists, or cannot be written.
    """
    with planned_import(Path(folder), model, step=step) as found:
        return found.write(Path(target), progress)


@contextmanager
def planned_import(folder: Path, model: nn.Module | None = None, *, step: int | None = None) -> Iterator[Import]:
    """Yield the import of a folder, all of whose files were checked; the arguments are those of `import_deepspeed`."""
    with TorchFiles() as files:
        states = _read(folder, files)
        if model is not None:
            states = fitted(states, model)
        elif states.omits_frozen:
            raise ValueError(
                f"{folder}: frozen parameters were left out, as transformers does with adapters: in Python, load the "
                "model with its adapters, and call import_deepspeed(FOLDER, TARGET, model), which takes them from it"
            )
        elif not states.moments:
            raise ValueError(
                f"{folder}: weights alone do not tell which of them are buffers or tied: name the model, --model FOLDER"
            )
        at = states.step if step is None else step
        lrs = [float(group["lr"]) for group in states.groups if "lr" in group]
        described = None if model is None else describe(model)
        yield Import(states, _tensors(states), _state(states, lrs, described), at, lrs)


def _read(folder: Path, files: TorchFiles) -> DeepSpeedStates:
    """Read the kind of folder that this is."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if os.path.lexists(folder / ZERO):
        return read_universal(folder, files)
    if os.path.lexists(folder / LATEST_UNIVERSAL):
        return read_universal(_tagged(folder, LATEST_UNIVERSAL), files)
    if any(os.path.lexists(folder / name) for name in WEIGHTS):
        return read_weights(folder, files)
    inner = _tagged(folder, LATEST) if os.path.lexists(folder / LATEST) else folder
    if inner.is_dir() and any(name.endswith(UNCONVERTED) for name in os.listdir(inner)):
        raise ValueError(
            f"{inner}: a checkpoint of DeepSpeed that is not converted: where DeepSpeed is installed, run `python -m "
            f"deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {inner} --output_folder "
            f"{inner}_universal`, and import {inner}_universal"
        )
    raise ValueError(
        f"{folder}: neither a universal checkpoint of DeepSpeed ({ZERO}/ beside mp_rank_00_model_states.pt) nor one of "
        f"{', '.join(WEIGHTS)}"
    )


def _tagged(folder: Path, pointer: str) -> Path:
    """Return the folder that a file names, which DeepSpeed writes beside its checkpoints."""
    with Directory(folder) as inside:
        tag = inside.read(pointer, MOST_TAG_BYTES).decode(errors="replace").strip()
    if not tag or "/" in tag or "\0" in tag or tag in (".", ".."):
        raise ValueError(f"{folder / pointer}: {tag!r} is no name of a folder beside it")
    return folder / tag


def _tensors(states: DeepSpeedStates) -> dict[str, WholeTensor]:
    """Return the tensors of the checkpoint: fp32 states of each trained parameter together, then the others."""
    tensors: dict[str, WholeTensor] = {}
    for name, master in states.masters.items():
        tensors[f"{MASTER}.{name}"] = WholeTensor(master, torch.float32, master.shape)
        for key in MOMENTS:
            moment = states.moments[key][name] if states.moments else None
            tensors[f"{key}.{name}"] = WholeTensor(moment, torch.float32, master.shape)
    for name, other in states.others.items():
        kind = BUFFER if name in states.buffers else PARAM
        tensors[f"{kind}.{name}"] = WholeTensor(other, states.dtypes[name], other.shape)
    return tensors


def _state(states: DeepSpeedStates, lrs: list[float], described: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a manifest holds besides tensors."""
    scaler = {} if states.scale is None else {"scale": states.scale, "good_steps": 0, "bad_steps": 0}
    optim = {
        "rule": "adamw",
        "groups": states.groups or [{"params": [*states.masters]}],
        "scaler": scaler,
        "skipped_steps": states.skipped,
        "consecutive_skips": 0,
        "states": {name: {"step": states.updates} for name in states.masters},
    }
    extra: dict[str, Any] = {IMPORTED: {"from": "deepspeed", "folder": states.where, "lr": lrs, **states.told}}
    extra[SCHEDULE] = _schedule(states, lrs)
    if described is not None:
        extra[MODEL] = described
    return {"optim": optim, "extra": extra}


def _schedule(states: DeepSpeedStates, lrs: list[float]) -> dict[str, Any]:
    """Return the state of a LambdaLR of torch after the updates of the run; its formula is that of the new run."""
    done = states.updates
    return {"last_epoch": done, "_step_count": done + 1, "_last_lr": lrs, "lr_lambdas": [None] * len(lrs)}
