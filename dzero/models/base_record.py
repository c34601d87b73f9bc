"""Record of the model that adapters belong to, by which a resumed run recognizes the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from dzero.models.adapters import base_of
from dzero.models.llama import Llama
from dzero.models.published import WRAPPED, fixed_config, published_name
from dzero.models.tensor_views import Readable

NO_DIFFERENCE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Keys of config.json that do not change the model."""


def base_record(model: nn.Module, weights: Mapping[str, Readable], frozen: str, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model, and a checksum of its stored weights, as JSON values.

    The checksum is of the names and shapes of all tensors, and of one row of each, so that few bytes are read. A llama
    of the project has the record of the model of transformers that the same folder holds. `frozen` and `dtype` are
    `precision.frozen` and `precision.param`, which decide on the values that adapters were trained beside.
    """
    if isinstance(model, Llama):
        config = fixed_config(model.shape)
        weights = {f"{WRAPPED}{published_name('llama', name)}": tensor for name, tensor in weights.items()}
    else:
        config = json.loads(base_of(model).config.to_json_string())
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        row = tensor.read([0] * len(tensor.shape), [*(min(1, size) for size in tensor.shape[:-1]), *tensor.shape[-1:]])
        digest.update(row.contiguous().view(-1).view(torch.uint8).numpy().data)
    return {
        "config": {key: value for key, value in config.items() if key not in NO_DIFFERENCE},
        "checksum": digest.hexdigest(),
        "frozen": frozen,
        "dtype": dtype,
    }


def base_difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words how two results of `base_record` differ; empty if they are of the same weights.

    Keys that only one config.json has are passed over, since other versions of transformers write others.
    """
    both = was["config"].keys() & now["config"].keys()
    if keys := sorted(key for key in both if was["config"][key] != now["config"][key]):
        return f"its {keys[0]} was {was['config'][keys[0]]}, is {now['config'][keys[0]]}"
    if was["checksum"] != now["checksum"]:
        return "its weights have other values"
    before = was.get("frozen", "param")
    if before != now["frozen"]:
        return f"precision.frozen was {before}, is {now['frozen']}"
    # What is quantized was rounded to the dtype of parameters before.
    same = before == "param" or was.get("dtype") == now["dtype"]
    return "" if same else f"with precision.frozen={before}, precision.param was {was.get('dtype')}, is {now['dtype']}"
