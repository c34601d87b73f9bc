"""Causal language models of transformers (extra `hf`), built offline on the meta device.

Only the configuration file is read. No code from the folder runs, and nothing is unpickled or downloaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dzero.errors import converting, import_optional
from dzero.models.config import MOST_EXPERTS, MOST_IDS, MOST_LAYERS, MOST_WIDTH, check_vocabulary
from dzero.utils.hub_cache import cache_folder, is_repository, local_folder, private_copies, read_bytes
from dzero.utils.ranges import shown

MOST_POSITIONS = 10**8
BOUNDS = (
    (r"(^|_)(ids?|idx|index|indices|seed|theta|base|rate|loss|coef|weight|scale|temperature|factor|version)$", None),
    (r"vocab|(^|_)(codebook_size|num_embeddings|num_embeds)$", MOST_IDS - 1),
    (r"(^|_)num_labels$", 10**6),  # transformers makes a name for each
    (r"experts?$", MOST_EXPERTS),
    (
        r"(^|_)(n_)?(layers?|blocks?|depths?|stages?|levels?|modules|codebooks?|quantizers|flows|loops|cycles|streams)$"
        r"|^num_(mem|encoder|decoder|res|resnet|mtp|nextn|upscale|upsampling|transition|self_attends)_\w*"
        r"|(layer|block|expert)s?_(types?|pattern)$|_pattern$|(layer|block)s_per_",
        MOST_LAYERS,
    ),
    (r"position|n_ctx$|context_length|seq_len|sequence_length", MOST_POSITIONS),
    (
        r"(size|dims?|heads?|width|channels?|groups?|hidden|inner|features?|d_model|d_ff|d_kv|n_embd|embed|rank|filters?"
        r"|kernels?|buckets|hashes|latents?|queries)$",
        MOST_WIDTH,
    ),
    (r"^(n|num|number_of)_|(^|_)(num|count|per|times|passes)(_|$)|inputs?$", MOST_EXPERTS),
)
"""What a key of a config.json is by its name, the first that fits, and the largest number that this can be.

Names that are only values come first, then numbers of ids, of modules, of positions, sizes of one dimension, and all
other numbers of something. A list or a text with a letter for each module is as long as the number that it stands for.
Ten million modules take minutes.
"""
LEAST = {"vocab_size": 1, "hidden_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1} | dict.fromkeys(
    ("num_local_experts", "num_experts", "n_routed_experts"), 0
)
CONFIG, GENERATION = "config.json", "generation_config.json"


class HFDecoder(nn.Module):
    """Causal LM of transformers with `Llama`'s interface: int64 tokens [batch, time] -> logits [batch, time, vocab]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def attention_width(self) -> int | None:
        """Product heads * head_dim, summed over the layers.

        Every layer counts as attending to the whole sequence. None without heads (state-space models).
        """
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        if not heads:
            return None
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return int(config.num_hidden_layers * heads * head_dim)

    def computed_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that the model's constructor computes, on the CPU, by their names in this decoder.

        The model is built once more for this, and each of its parameters goes to meta as soon as it is registered.
        """

        def on_meta(_: nn.Module, __: str, param: nn.Parameter | None) -> nn.Parameter | None:
            if param is None or param.is_meta:
                return None
            return nn.Parameter(param.detach().to("meta"), param.requires_grad)

        hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # it may return one
        with hook, torch.random.fork_rng(devices=[]):
            built = type(self.model)(self.model.config)
        return {f"model.{name}": buffer for name, buffer in built.named_buffers() if not buffer.is_meta}

    def get_input_embeddings(self) -> Any:
        """Return the embedding of the wrapped model (used by `zero/units.py`)."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """Return the head of the wrapped model."""
        return self.model.get_output_embeddings()

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits of whole sequences; no key-value cache is used.

        With `positions`, int64 [batch, time], tokens attend only within their document, which begins at each 0.
        """
        packed = {} if positions is None else {"position_ids": positions}
        logits: Tensor = self.model(input_ids=tokens, use_cache=False, **packed).logits
        return logits


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class for messages: of an `HFDecoder`, that of the model of transformers in it."""
    return type(model.model if isinstance(model, HFDecoder) else model).__name__


def build_hf(name_or_path: str, vocab_size: int | None = None) -> HFDecoder:
    """Return the model on the meta device, in fp32, from a folder with config.json, or a type with its default sizes.

    `name_or_path` may also be `org/name` of a repository in the local cache of Hugging Face.
    Raise ValueError if it is no causal LM, or its vocabulary is smaller than that of the data, `vocab_size`.
    """
    transformers = import_optional("transformers", "model.kind=hf", "hf")
    config = _read_config(transformers, name_or_path)
    what = f"model.name_or_path={name_or_path}"
    elsewhere = "train it by DzeroTrainer or a loop of your own (docs/guides/which_way.md)"
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{what}: {type(config).__name__} is no causal LM; {elsewhere}")
    if config.is_encoder_decoder:  # transformers would make its decoder alone
        raise ValueError(
            f"{what}: {config.model_type} has an encoder, and its decoder alone is another model; {elsewhere}"
        )
    encoders = transformers.models.auto.modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if config.model_type in encoders and not getattr(config, "is_decoder", False):
        raise ValueError(
            f"{what}: {config.model_type} attends to later tokens, so it would be trained on what it sees; set "
            "is_decoder to true in its config.json, or take a causal model"
        )
    _check_vocabulary(config, what, vocab_size)
    # For sizes that make no model, transformers may raise any kind of error.
    with converting(f"{what}: its config.json makes no model", Exception), torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if os.path.lexists(Path(folder := local_folder(name_or_path)) / GENERATION):
        broken = f"{what}: transformers does not read its {GENERATION}"
        with private_copies(Path(folder), [GENERATION]) as private, converting(broken, Exception):
            model.generation_config = transformers.GenerationConfig.from_pretrained(private, local_files_only=True)
    return HFDecoder(model)


def check_vocabulary_of(name_or_path: str, vocab_size: int) -> None:
    """Raise ValueError if the model of a folder, or of a type, has fewer ids than `vocab_size`."""
    transformers = import_optional("transformers", "model.kind=hf", "hf")
    _check_vocabulary(_read_config(transformers, name_or_path), f"model.name_or_path={name_or_path}", vocab_size)


def _check_vocabulary(config: Any, what: str, vocab_size: int | None) -> None:
    more = "give the model more: resize_token_embeddings({}) and save_pretrained in transformers"
    check_vocabulary(config.get_text_config().vocab_size, vocab_size, key=f"{what}: its vocab_size", more=more)


def decoder_from(config: Mapping[str, Any]) -> HFDecoder:
    """Return the model of a config.json's values on the meta device, in fp32; its class is that of `architectures`.

    Raises:
        ValueError: If transformers has no such class, or the values make no model of it.
    """
    transformers = import_optional("transformers", "merging adapters", "hf")
    found = dict(config)
    check_numbers(f"config.json of a {found.get('model_type')}", found)
    with converting(f"config.json of a {found.get('model_type')}: it makes no model", Exception), torch.device("meta"):
        (architecture,) = found.pop("architectures")
        model = getattr(transformers, architecture)
        if not issubclass(model, transformers.PreTrainedModel):
            raise TypeError(f"{architecture} is no model")
        for key in ("attn_implementation", "_attn_implementation"):  # only shapes are needed, and some name other code
            found.pop(key, None)
        kind = found.pop("model_type")
        settings = model.config_class  # of models that transformers builds by their class alone, too
        if getattr(settings, "model_type", None) != kind:
            settings = type(transformers.AutoConfig.for_model(kind))
        return HFDecoder(model(settings(**found)))


def check_numbers(file: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError for a number in a config.json that is larger than what its name stands for (`BOUNDS`) can be."""
    todo: list[tuple[str, Any, int | None]] = [("", values, None)]
    while todo:
        path, value, most = todo.pop()
        if isinstance(value, Mapping):
            for key, inner in value.items():
                bound = next((most for pattern, most in BOUNDS if re.search(pattern, str(key).lower())), None)
                todo.append((f"{path}.{key}" if path else str(key), inner, bound))
        elif isinstance(value, (list, str)) and most == MOST_LAYERS and len(value) > most:
            raise ValueError(f"{file}: {path} has {len(value)} entries: must be at most {most}")
        elif isinstance(value, list):
            todo += [(f"{path}[{index}]", inner, most) for index, inner in enumerate(value)]
        elif most is not None and isinstance(value, (int, float)) and not value <= most:
            raise ValueError(f"{file}: {path}={shown(value)}: must be a whole number up to {most}")


def _check_sizes(config: Any, folder: Path) -> None:
    """Raise ValueError for an impossible size; transformers builds some models in spite of it."""
    for key, least in LEAST.items():
        value = getattr(config, key, None)
        if isinstance(value, int) and value < least:
            raise ValueError(f"{folder / 'config.json'}: {key}={value}: must be a whole number from {least} on")
    heads, kv_heads = (getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
        raise ValueError(
            f"{folder / 'config.json'}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"
        )


def check_folder(name_or_path: str) -> None:
    """Raise FileNotFoundError for a folder that is missing or has no config.json; works without transformers."""
    what, folder = f"model.name_or_path={name_or_path}", Path(local_folder(name_or_path))
    if folder.is_dir():
        if not os.path.lexists(folder / CONFIG):
            raise FileNotFoundError(f"{what}: the folder has no config.json")
        read_bytes(folder / CONFIG)  # a link that is not followed is told before workers start
    elif is_repository(name_or_path):
        raise FileNotFoundError(
            f"{what}: no such folder, and no such repository in the cache of Hugging Face ({cache_folder()}); nothing "
            f"is downloaded: run `hf download {name_or_path}` first, or give a local folder with config.json"
        )
    elif len(folder.parts) > 1:
        raise FileNotFoundError(
            f"{what}: no such folder; give a local one with config.json, or a model type of transformers such as gpt2 "
            "(nothing is downloaded)"
        )


def _read_config(transformers: Any, name_or_path: str) -> Any:
    """Return the configuration of transformers that a folder, or a model type, has."""
    check_folder(name_or_path)
    folder = Path(local_folder(name_or_path))
    if folder.is_dir():
        return _parsed_config(transformers, f"model.name_or_path={name_or_path}", folder)
    types = sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if name_or_path not in types:
        raise FileNotFoundError(
            f"model.name_or_path={name_or_path}: neither a local folder with config.json nor a model type of "
            f"transformers; nothing is downloaded. Allowed types: {', '.join(types)}"
        )
    return transformers.AutoConfig.for_model(name_or_path)


def _parsed_config(transformers: Any, setting: str, folder: Path) -> Any:
    """Return the configuration in a folder, parsed by transformers from a private copy of its config.json."""
    what = (
        f"{setting}: transformers {transformers.__version__} itself has no such model or its config.json is broken; "
        "code from the folder is never run"
    )
    # For a broken file, transformers may raise any kind of error.
    with converting(what, Exception):
        values = json.loads(read_bytes(folder / CONFIG))
    if isinstance(values, dict):  # anything else is refused by transformers
        check_numbers(str(folder / CONFIG), values)
    with private_copies(folder, [CONFIG]) as private, converting(what, Exception):
        config = transformers.AutoConfig.from_pretrained(private, local_files_only=True, trust_remote_code=False)
    config.name_or_path = str(folder)
    _check_sizes(config.get_text_config(), folder)
    return config
