"""The model that the adapters of a checkpoint belong to, read from its own folder when they are merged into it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dzero.hardware import dtype_of
from dzero.models.base_record import base_difference, base_record
from dzero.models.hf import decoder_from
from dzero.models.published import WRAPPED, Description
from dzero.models.tensor_views import Readable, View
from dzero.models.weights import local_weights
from dzero.utils.hub_cache import local_folder
from dzero.zero.quantized_weights import CODECS, WeightCodec
from dzero.zero.rounding import to_working
from dzero.zero.units import params_of


@dataclass(frozen=True)
class Rounded(View):
    """A tensor in another dtype, rounded as the parameters of a run are."""

    parts: tuple[Readable]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.parts[0].shape)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """Read the elements [offset, offset + size) along every dim, as a CPU tensor."""
        values = self.parts[0].read(offset, size)
        return values if values.dtype == self.dtype else to_working(values.float(), self.dtype)


@dataclass(frozen=True)
class Decoded(View):
    """A matrix, or one per expert, with the values that its quantized form stands for."""

    parts: tuple[Readable]
    codec: WeightCodec

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.parts[0].shape)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """Read the elements [offset, offset + size) along every dim, as a CPU tensor."""
        whole = self.shape[1:]  # blocks are about whole rows
        values = self.parts[0].read([offset[0], *(0 for _ in whole)], [size[0], *whole]).flatten(1).contiguous()
        self.codec.decode(self.codec.encode(values), values)
        inside = (slice(first, first + count) for first, count in zip(offset[1:], size[1:], strict=True))
        return values.view(size[0], *whole)[:, *inside]


def base_weights(
    described: Description, record: Mapping[str, Any] | None, folder: str | None, dtype: torch.dtype
) -> dict[str, Rounded]:
    """Return the tensors of the model without adapters, by their published names; tied ones once.

    Args:
        described: The model with its adapter.
        record: What a checkpoint recorded of the model's folder (`models.base_record.base_record`), if anything.
        folder: Folder of the model; None: the one that the settings of the adapter name.
        dtype: Dtype of the parameters; buffers keep their own.

    Raises:
        FileNotFoundError: If the folder is not there.
        ValueError: If it is that of another model.
    """
    assert described.adapter is not None
    found = folder if folder is not None else json.loads(described.adapter.config).get("base_model_name_or_path")
    repair = "give the folder of the model that the adapters belong to: --base=FOLDER"
    if not isinstance(found, str):
        raise ValueError(f"the adapters do not name the model that they belong to; {repair}")
    if not Path(local_folder(found)).is_dir():
        raise FileNotFoundError(f"{found}: the model that the adapters belong to is not there; {repair}")
    decoder = decoder_from(json.loads(described.config))
    weights = {**local_weights(found, decoder)}
    frozen, used = ("param", "fp32") if record is None else (record.get("frozen", "param"), record.get("dtype", "fp32"))
    if record is not None and (other := base_difference(record, base_record(decoder, weights, frozen, used))):
        raise ValueError(f"{found}: the adapters belong to another model: {other}; {repair}")
    tensors = decoder.state_dict(keep_vars=True)
    params = dict(decoder.named_parameters())
    if (codec := CODECS.get(frozen)) is not None:
        for param in params_of(decoder.requires_grad_(False), codec):
            if param.codec is not None:
                weights[param.name] = Decoded((Rounded((weights[param.name],), dtype_of(used)),), codec)
    aliases = {name for name, _ in decoder.named_parameters(remove_duplicate=False)} - params.keys()
    return {
        name.removeprefix(WRAPPED): Rounded((value,), dtype if name in params else tensors[name].dtype)
        for name, value in weights.items()
        if name not in aliases
    }
