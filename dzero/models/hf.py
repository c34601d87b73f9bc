"""Any causal language model of transformers (extra `hf`), built offline on meta, as a decoder of ours.

Only its configuration file is read: no code from the folder runs, nothing is unpickled or downloaded.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dzero.models.config import check_vocabulary


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
