"""What model is trained: the group `model`.

    kind   built by                                             settings
    llama  `llama.Llama`, plain torch                           sizes; hidden_size, layers, heads, ffn_size are required
    moe    `moe.MoE`, the same with experts                     and those of experts; experts and top_k are required
    hf     any causal LM of transformers (extra `hf`), offline  name_or_path

and `weights`. A setting of the other kind would have no effect, so it is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dzero.models.llama import LlamaShape
from dzero.models.moe import MoEShape

SHAPES: dict[str, type[LlamaShape]] = {"llama": LlamaShape, "moe": MoEShape}
SIZES = {kind: {field.name for field in fields(shape)} for kind, shape in SHAPES.items()}
SETTINGS = {"llama": SIZES["llama"] | {"weights"}, "moe": SIZES["moe"], "hf": {"name_or_path", "weights"}}
DENSE = ("hidden_size", "layers", "heads", "ffn_size")
REQUIRED = {"llama": DENSE, "moe": (*DENSE, "experts", "top_k"), "hf": ("name_or_path",)}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model's kind and sizes; unset ones take the defaults of `LlamaShape` and `MoEShape`, which say what they are.

    `vocab_size` (unset: the data's), `kv_heads` (unset: heads). `name_or_path`: a local folder with config.json, or a
    model type such as `gpt2` in its default sizes. `weights`: a folder in whose safetensors files training
    starts, as Hugging Face publishes them; true for the folder that name_or_path names; false for random values.
    """

    kind: str = "llama"
    vocab_size: int | None = None
    hidden_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn_size: int | None = None
    max_tokens: int | None = None
    rope_theta: float | None = None
    norm_eps: float | None = None
    tied: bool | None = None
    experts: int | None = None
    top_k: int | None = None
    shared_experts: int | None = None
    scores: str | None = None
    balance: str | None = None
    balance_rate: float | None = None
    name_or_path: str | None = None
    weights: bool | str = False

    def __post_init__(self) -> None:
        if self.kind not in SETTINGS:
            raise ValueError(f"model.kind={self.kind!r}: choose one of {[*SETTINGS]}")
        allowed = SETTINGS[self.kind]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in {"kind", *allowed} and value is not field.default:
                raise ValueError(
                    f"model.{field.name}={value} has no effect with model.kind={self.kind}, "
                    f"which takes {sorted(allowed)}; remove it"
                )
        for key in REQUIRED[self.kind]:
            if getattr(self, key) is None:
                raise ValueError(f"model.{key} is unset: model.kind={self.kind} needs {[*REQUIRED[self.kind]]}; set it")
        if self.kind in SHAPES:
            self.shape(vocab_size=1)
            if self.weights is True:
                raise ValueError(
                    "model.weights=true: model.kind=llama has no folder of its own; name one, or take false"
                )

    @property
    def weights_folder(self) -> str | None:
        """Where values come from; None for random ones."""
        return self.weights if isinstance(self.weights, str) else self.name_or_path if self.weights else None

    def shape(self, vocab_size: int | None) -> LlamaShape:
        """Sizes of a decoder of ours whose data has `vocab_size` ids. Raises ValueError when the model knows fewer, or
        none."""
        vocab_size = check_vocabulary(self.vocab_size, vocab_size)
        given = {key: value for key in SIZES[self.kind] if (value := getattr(self, key)) is not None}
        return SHAPES[self.kind](**{"kv_heads": self.heads, **given, "vocab_size": vocab_size})


def check_vocabulary(model: int | None, data: int | None) -> int:
    """The model's vocabulary: its own, else the data's. Raises ValueError when ids of the data would be outside."""
    if model is None and data is None:
        raise ValueError("model.vocab_size is unset and the data names no vocabulary: set model.vocab_size")
    if model is not None and data is not None and model < data:
        raise ValueError(
            f"model.vocab_size={model}: the data has ids up to {data - 1}; take a vocabulary ≥ {data} "
            "or a tokenizer with fewer ids"
        )
    size = data if model is None else model
    assert size is not None
    return size
