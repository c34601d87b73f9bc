"""Folders of whole weights, as DeepSpeed's `zero_to_fp32` writes them, pickled or as safetensors."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from dzero.checkpoint.store import Directory
from dzero.integrations.deepspeed.states import DeepSpeedStates, Named
from dzero.integrations.deepspeed.torch_reader import TorchFile, TorchFiles
from dzero.models.safetensors_reader import INDEX, SINGLE, stored_tensors
from dzero.models.tensor_views import Readable

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHTS = (SINGLE, INDEX, BIN, BIN_INDEX)
"""Files, one of which such a folder has."""
MOST_INDEX_BYTES = 64 << 20


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_weights(folder: Path, files: TorchFiles) -> DeepSpeedStates:
    """Read which weights a folder holds; their values are read later.

    Raises:
        ValueError: If a file is missing or damaged, or holds more than tensors.
    """
    if any(os.path.lexists(folder / name) for name in (SINGLE, INDEX)):
        found: dict[str, Readable] = dict(stored_tensors(folder))
    else:
        found = _pickled(folder, files)
    return DeepSpeedStates(str(folder), masters=found, moments={}, others={})


def _pickled(folder: Path, files: TorchFiles) -> dict[str, Readable]:
    found: dict[str, Readable] = {}
    with Directory(folder) as inside:
        names = [BIN]
        if os.path.lexists(folder / BIN_INDEX):
            try:
                index = msgspec.json.decode(inside.read(BIN_INDEX, MOST_INDEX_BYTES), type=_Index)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{folder / BIN_INDEX}: no index of weights ({error})") from error
            names = sorted({*index.weight_map.values()})
        for name in names:
            if (folder / name).parent != folder:
                raise ValueError(f"{folder / BIN_INDEX}: {name!r} is no file beside it")
            file = TorchFile(files, folder / name)
            for keys, tensor in file.tensors.items():
                if len(keys) != 1 or keys[0] in found:
                    what = "is there twice" if keys and keys[-1] in found else "is no weight by its name"
                    raise ValueError(f"{file.path}: {': '.join(keys)} {what}")
                found[keys[0]] = Named(keys[0], tensor, tensor.shape, tensor.dtype)
    return found
