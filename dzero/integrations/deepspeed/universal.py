"""Universal checkpoints of DeepSpeed, as its program `ds_to_universal` writes them.

    FOLDER/
        mp_rank_00_model_states.pt            stages 1 and 2: names, shapes, buffers, steps, and the 16-bit module
        zero_pp_rank_0_mp_rank_00_…           stage 3: the same, with frozen parameters in fragments of each rank
        zero/optimizer_state.pt               settings of parameter groups; stage 3: the number of updates
        zero/<parameter>/fp32.pt              master: {"param": tensor}, or at stage 3 the tensor itself, flat
        zero/<parameter>/exp_avg.pt, exp_avg_sq.pt
        zero/<parameter>/step.pt              stages 1 and 2: the number of updates

Stages 1 and 2 also write fp32.pt, and nothing else, for tied names, frozen parameters and buffers, whose values are in
the module. Which parameters are trained is therefore taken from `param_shapes` of the model states.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dzero.checkpoint.store import Directory
from dzero.integrations.deepspeed.settings import (
    Plain,
    check_rule,
    count_of,
    groups_of,
    loss_scale_of,
    omits_frozen,
    steps_of_groups,
    updates_of,
)
from dzero.integrations.deepspeed.states import MASTER_FILE, MOMENTS, DeepSpeedStates, Named
from dzero.integrations.deepspeed.torch_reader import TorchFile, TorchFiles, TorchTensor
from dzero.models.tensor_views import Joined, Narrowed, Readable

ZERO, OPTIMIZER, STEP = "zero", "optimizer_state.pt", "step.pt"
STEPS, SKIPPED = "global_steps", "skipped_steps"
MODEL_STATES = re.compile(r"(?:bf16_)?(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})(?:_\d{1,9})?_model_states\.pt")


def read_universal(folder: Path, files: TorchFiles) -> DeepSpeedStates:
    """Read what a universal checkpoint holds; the values of tensors are read later.

    Raises:
        ValueError: If a file is missing, is none that DeepSpeed writes, or contradicts another.
    """
    states = _model_states(folder, files)
    shapes: dict[str, tuple[int, ...]] = {}
    cut = _is_cut(states[0].plain)
    names = [_shapes_into(shapes, each, group, cut=cut) for each in states for group in _listed(each, "param_shapes")]
    aliases = {alias for each in states for alias in _mapped(each, "shared_params")}
    others = _others(folder, states, files, shapes.keys() | aliases)
    with Directory(folder / ZERO) as zero:
        _check_names(zero, shapes.keys(), others.keys() | aliases)
    optimizer = TorchFile(files, folder / ZERO / OPTIMIZER).plain
    tensors: dict[str, dict[str, Readable]] = {key: {} for key in (MASTER_FILE, *MOMENTS)}
    steps: dict[str, int] = {}
    for name, shape in shapes.items():
        inside = folder / ZERO / name
        for key, of_key in tensors.items():
            of_key[name] = _state(TorchFile(files, inside / f"{key}.pt"), name, None if cut else shape)
        if os.path.lexists(inside / STEP):
            steps[name] = count_of(TorchFile(files, inside / STEP).plain, str(inside / STEP))
    if steps and (missing := sorted(shapes.keys() - steps)):
        raise ValueError(f"{folder / ZERO / missing[0]}: no {STEP}, as other parameters have")
    return DeepSpeedStates(
        where=str(folder),
        masters=tensors[MASTER_FILE],
        moments={key: tensors[key] for key in MOMENTS},
        others=dict(others),
        buffers=frozenset(name for each in states for name in each.plain.get("buffer_names") or ()),
        dtypes={name: tensor.dtype for name, tensor in others.items()},
        **_run(folder, states[0], optimizer, steps, names),
    )


def _run(
    folder: Path, states: TorchFile, optimizer: Any, steps: dict[str, int], names: list[list[str]]
) -> dict[str, Any]:
    """Return the fields of `DeepSpeedStates` that are no tensors."""
    where = str(folder / ZERO / OPTIMIZER)
    if not isinstance(optimizer, dict):
        raise ValueError(f"{where}: no state of an optimizer")
    counted = {key: count_of(states.plain.get(key), f"{states.path}: {key}") for key in (STEPS, SKIPPED)}
    groups = groups_of(optimizer, names, where)
    check_rule(states.plain, groups, str(folder))
    updates = updates_of(steps or steps_of_groups(optimizer, where), str(folder / ZERO))
    return {
        "step": counted[STEPS],
        "updates": counted[STEPS] - counted[SKIPPED] if updates is None else updates,
        "skipped": counted[SKIPPED],
        "scale": loss_scale_of(optimizer),
        "omits_frozen": omits_frozen(states.plain),
        "groups": groups,
        "told": {key: states.plain.get(key) for key in ("ds_version", "global_samples", "lr_scheduler")},
    }


def _model_states(folder: Path, files: TorchFiles) -> list[TorchFile]:
    """Return the files of model states that differ: one of each rank along tensor and pipeline parallelism."""
    found: dict[str, str] = {}
    for name in sorted(os.listdir(folder)):
        if (match := MODEL_STATES.fullmatch(name)) is not None and int(match[1] or 0) == 0:
            found[name] = match[2]
    if not found:
        raise ValueError(f"{folder}: no mp_rank_00_model_states.pt, which names the parameters, is beside {ZERO}/")
    states = [TorchFile(files, folder / name) for name in found]
    for each in states:
        if not isinstance(each.plain, dict):
            raise ValueError(f"{each.path}: no model states of DeepSpeed")
    return states


def _shapes_into(shapes: dict[str, tuple[int, ...]], file: TorchFile, group: Any, *, cut: bool) -> list[str]:
    """Add the shapes of a parameter group, which are those of parts if a parameter is `cut`; return its names."""
    where = f"{file.path}: param_shapes"
    if not isinstance(group, dict):
        raise ValueError(f"{where} holds no shapes by name")
    for name, shape in group.items():
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise ValueError(f"{where}: {name!r} is no name of a parameter")
        if name in shapes and not cut:
            raise ValueError(f"{where}: {name} is there twice")
        shapes[name] = _shape(shape, name, file)
    return [*group]


def _shape(told: Any, name: str, file: TorchFile) -> tuple[int, ...]:
    if not isinstance(told, list) or not all(type(n) is int and n >= 0 for n in told):
        raise ValueError(f"{file.path}: {name} has shape {told!r}")
    return tuple(told)


def _check_names(zero: Directory, trained: Collection[str], others: Collection[str]) -> None:
    """Raise ValueError unless there is a folder for each trained parameter, and for nothing unknown."""
    names = set()
    with os.scandir(zero.fd) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                names.add(entry.name)
            elif entry.name != OPTIMIZER:
                raise ValueError(f"{zero.path / entry.name}: neither the folder of a parameter nor {OPTIMIZER}")
    if missing := sorted({*trained} - names):
        raise ValueError(f"{zero.path}: {missing[0]} is not there, with {len(missing) - 1} other parameters")
    if unknown := sorted(names - {*trained} - {*others}):
        raise ValueError(f"{zero.path / unknown[0]}: the model states know no parameter or buffer of that name")


def _state(file: TorchFile, name: str, shape: tuple[int, ...] | None) -> Named:
    """Return the state in a file, in `shape`; with None, in the shape in which it is stored."""
    tensor = file.tensors.get((), file.tensors.get(("param",)))
    if tensor is None or not tensor.dtype.is_floating_point:
        raise ValueError(f"{file.path}: no state of a parameter is in it")
    told = file.plain if isinstance(file.plain, dict) else {}
    is_flat = () in file.tensors or told.get("sub_param_shape") is not None
    if shape is None:
        if is_flat:
            raise ValueError(f"{file.path}: its shape is not known with tensor parallelism; convert it at stage 1 or 2")
        shape = tensor.shape
    if tensor.shape != shape and not (is_flat or told.get("vocab_tensor")):
        raise ValueError(f"{file.path}: {list(tensor.shape)}, {name} is {list(shape)}")
    return Named(name, tensor, tensor.shape if told.get("vocab_tensor") else shape, tensor.dtype)


def _others(folder: Path, states: list[TorchFile], files: TorchFiles, known: Collection[str]) -> dict[str, Named]:
    """Return frozen parameters and buffers, by name; those in `known` are neither."""
    found: dict[str, Named] = {}
    frozen = {name: shape for each in states for name, shape in _mapped(each, "frozen_param_shapes").items()}
    for each in states:
        for keys, tensor in each.tensors.items():
            if keys[0] == "module" and len(keys) == 2 and keys[1] not in known and 0 not in tensor.shape:
                if keys[1] in found and len(states) > 1:
                    _check_alike(found[keys[1]], tensor, frozen)
                found[keys[1]] = Named(keys[1], tensor, tensor.shape, tensor.dtype)
    if in_parts := [name for name in frozen if name not in found]:
        found |= _in_fragments(folder, files, {name: _shape(frozen[name], name, states[0]) for name in in_parts})
    return found


def _check_alike(one: Named, other: TorchTensor, frozen: Mapping[str, Any]) -> None:
    """Raise ValueError for a frozen parameter that several ranks hold, perhaps in parts."""
    if one.name in frozen:
        raise ValueError(f"{other.where}: frozen parameters are not read from several ranks of tensor parallelism")


def _in_fragments(folder: Path, files: TorchFiles, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Named]:
    """Return frozen parameters of stage 3, of which each rank has a fragment."""
    ranks = {
        int(match[1]): name
        for name in os.listdir(folder)
        if (match := MODEL_STATES.fullmatch(name)) is not None and match[1] is not None
    }
    parts: dict[str, list[TorchTensor]] = {name: [] for name in shapes}
    for rank in range(len(ranks)):
        if rank not in ranks:
            raise ValueError(f"{folder}: model states of rank {rank} of {len(ranks)} are missing")
        file = TorchFile(files, folder / ranks[rank])
        for name, of_name in parts.items():
            if (tensor := file.tensors.get(("frozen_param_fragments", name))) is None or len(tensor.shape) != 1:
                raise ValueError(f"{file.path}: no fragment of the frozen parameter {name}")
            of_name.append(tensor)
    found: dict[str, Named] = {}
    for name, shape in shapes.items():
        joined = Joined(tuple(parts[name]), 0)
        if joined.shape[0] < math.prod(shape):
            raise ValueError(f"{folder}: fragments of {name} have {joined.shape[0]} elements, it is {list(shape)}")
        found[name] = Named(name, Narrowed((joined,), 0, 0, math.prod(shape)), shape, parts[name][0].dtype)
    return found


def _is_cut(states: Plain) -> bool:
    """Return whether tensor parallelism cuts parameters."""
    size = states.get("mp_world_size")
    return isinstance(size, int) and size > 1


def _listed(file: TorchFile, key: str) -> list[Any]:
    """Return the parameter groups in a list; older versions have one dictionary for all."""
    value = file.plain.get(key)
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{file.path}: no {key}: no model states of a ZeRO run of DeepSpeed")
    return value


def _mapped(file: TorchFile, key: str) -> Plain:
    value = file.plain.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{file.path}: {key} is no dictionary")
    return value
