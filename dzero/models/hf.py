"""Any causal language model of transformers (extra `hf`), built offline on meta, as a decoder of ours.

Only configuration files and safetensors are read: no code from the folder runs, nothing is unpickled or downloaded.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dzero.models.config import check_vocabulary

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class HFDecoder(nn.Module):
    """`model`, a causal LM of transformers: tokens int64 [batch, time] -> logits [batch, time, vocab]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def attention_width(self) -> int | None:
        """heads * head_dim, summed over the layers; every layer counts as attending to the whole sequence.

        None where the configuration tells no heads (state-space models)."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        if not heads:
            return None
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return int(config.num_hidden_layers * heads * head_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Without a cache of keys and values: every call is a whole sequence."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def build_hf(name_or_path: str, vocab_size: int | None = None) -> HFDecoder:
    """The model on meta, in fp32, from a folder's config.json or, for a bare model type, its default sizes.

    vocab_size: ids of the data. Raises ModuleNotFoundError without transformers, FileNotFoundError or ValueError for
    a folder or type that is none, ValueError for a vocabulary that is too small.
    """
    transformers = _transformers()
    config = _read_config(transformers, name_or_path)
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(f"model.name_or_path={name_or_path}: {type(config).__name__} is no causal LM") from error
    check_vocabulary(config.get_text_config().vocab_size, vocab_size)
    return HFDecoder(model)


def local_weights(folder: str, model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Readers of the folder's safetensors by names in `model`; each opens its file when it is called.

    Tensors must be stored under the names and in the shapes of the model's state dict (tied ones under any of their
    names, the prefix of the model without head may be absent); a layout that transformers would first convert is
    refused as missing. Headers are checked now: raises FileNotFoundError for an absent file and ValueError for a
    broken one, for missing tensors and for other shapes. Warns of tensors that the model has no place for.
    """
    if not isinstance(model, HFDecoder):
        raise TypeError(f"weights of {type(model).__name__}: only models that build_hf made read them")
    stored = _stored_tensors(Path(folder))
    prefix = f"{model.model.base_model_prefix}."
    tied: dict[int, list[str]] = {}
    for name, tensor in model.model.state_dict(keep_vars=True).items():
        tied.setdefault(id(tensor), []).append(name)
    readers: dict[str, Callable[[], Tensor]] = {}
    missing, used = [], set()
    tensors = model.model.state_dict()
    for names in tied.values():
        spellings = [s for name in names for s in (name, name.removeprefix(prefix))]
        key = next((s for s in spellings if s in stored), None)
        if key is None:
            missing.append(names[0])
            continue
        file, shape = stored[key]
        if shape != list(tensors[names[0]].shape):
            raise ValueError(f"{file}: {key} has shape {shape}, the model needs {list(tensors[names[0]].shape)}")
        used.update(spellings)
        readers[f"model.{names[0]}"] = partial(_read, file, key)
    if missing:
        raise ValueError(f"{folder}: {len(missing)} tensors of the model are not in its safetensors files: {missing}")
    if unused := sorted(set(stored) - used):
        warnings.warn(f"{folder}: the model has no place for {unused}; they are not loaded", stacklevel=2)
    return readers


def _transformers() -> ModuleType:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "model.kind=hf needs the package transformers: pip install 'dzero[hf]'", name=error.name
        ) from error
    module: ModuleType = transformers
    return module


def check_folder(name_or_path: str) -> None:
    """What can be told without transformers: raises FileNotFoundError for a folder that is none or no model's."""
    folder = Path(name_or_path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model.name_or_path={name_or_path}: the folder has no config.json")
    if not folder.is_dir() and len(folder.parts) > 1:
        raise FileNotFoundError(
            f"model.name_or_path={name_or_path}: no such folder; give a local one with config.json, or a model type of "
            "transformers such as gpt2 (nothing is downloaded)"
        )


def _read_config(transformers: Any, name_or_path: str) -> Any:
    check_folder(name_or_path)
    folder = Path(name_or_path)
    if folder.is_dir():
        try:
            return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(
                f"model.name_or_path={name_or_path}: transformers {transformers.__version__} itself has no such model "
                f"or its config.json is broken; code from the folder is never run ({error})"
            ) from error
    types = sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if name_or_path not in types:
        raise FileNotFoundError(
            f"model.name_or_path={name_or_path}: neither a local folder with config.json nor a model type of "
            f"transformers; nothing is downloaded. Allowed types: {', '.join(types)}"
        )
    return transformers.AutoConfig.for_model(name_or_path)


def _stored_tensors(folder: Path) -> dict[str, tuple[Path, list[int]]]:
    """(file, shape) of every tensor in the folder's safetensors files, from their headers."""
    if (folder / INDEX).is_file():
        files = sorted({folder / name for name in json.loads((folder / INDEX).read_text())["weight_map"].values()})
    else:
        files = [folder / SINGLE]
    found = {}
    for file in files:
        if file.parent != folder or not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; model.weights=true reads {SINGLE} or {INDEX} in {folder}")
        with _open(file) as tensors:
            found.update({key: (file, list(tensors.get_slice(key).get_shape())) for key in tensors.keys()})  # noqa: SIM118
    return found


def _read(file: Path, key: str) -> Tensor:
    with _open(file) as tensors:
        tensor: Tensor = tensors.get_tensor(key)
        return tensor


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error
