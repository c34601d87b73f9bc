"""What model is trained: the group `model`.

    kind   built by                                             settings
    llama  `llama.Llama`, plain torch                           sizes; hidden_size, layers, heads, ffn_size are required
    moe    `moe.MoE`, the same with experts                     and those of experts; experts and top_k are required
    hf     any causal LM of transformers (extra `hf`), offline  name_or_path

and `weights`. A setting of the other kind would have no effect, so it is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dzero.models.shapes import LlamaShape, MoEShape

SHAPES: dict[str, type[LlamaShape]] = {"llama": LlamaShape, "moe": MoEShape}
SIZES = {kind: {field.name for field in fields(shape)} for kind, shape in SHAPES.items()}
SETTINGS = {"llama": SIZES["llama"] | {"weights"}, "moe": SIZES["moe"], "hf": {"name_or_path", "weights"}}
DENSE = ("hidden_size", "layers", "heads", "ffn_size")
REQUIRED = {"llama": DENSE, "moe": (*DENSE, "experts", "top_k"), "hf": ("name_or_path",)}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model's kind and sizes; unset sizes take the defaults of `LlamaShape` and `MoEShape`."""

    kind: str = "llama"
    """llama, moe (a mixture of experts), or hf (any causal LM of transformers)."""
    vocab_size: int | None = None
    """Ids that the model knows. null: those of the data."""
    hidden_size: int | None = None
    """Width of the hidden states."""
    layers: int | None = None
    """Number of blocks."""
    heads: int | None = None
    """Attention heads."""
    kv_heads: int | None = None
    """Heads of keys and values. null: as many as heads."""
    ffn_size: int | None = None
    """Width of the feed-forward part; in a mixture, of one expert."""
    max_tokens: int | None = None
    """Longest sequence that the model takes. null: any."""
    rope_theta: float | None = None
    """Base of the rotary positions. null: 10000."""
    norm_eps: float | None = None
    """Epsilon of the norms. null: 1e-5."""
    tied: bool | None = None
    """Embedding and head are one parameter."""
    experts: int | None = None
    """Experts of each layer (moe)."""
    top_k: int | None = None
    """Experts that a token uses (moe)."""
    shared_experts: int | None = None
    """Width of what all tokens use, in experts (moe)."""
    scores: str | None = None
    """Scores of experts: softmax over all, or sigmoid of each (moe)."""
    balance: str | None = None
    """How experts are kept in use: auxiliary-loss-free, loss or none (moe)."""
    balance_rate: float | None = None
    """Rate of the balance. null: 1e-3 for auxiliary-loss-free, 1e-2 for loss (moe)."""
    name_or_path: str | None = None
    """A local folder with config.json, or a model type such as gpt2 in its default sizes (hf)."""
    weights: bool | str = False
    """Folder of safetensors files to start from; true: that of name_or_path; false: random values."""

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


def check_vocabulary(model: int | None, data: int | None, *, key: str = "model.vocab_size") -> int:
    """Return the model's vocabulary: its own, else the data's. key: where the model's is set.

    Raises ValueError when ids of the data would be outside.
    """
    if model is None and data is None:
        raise ValueError("model.vocab_size is unset and the data names no vocabulary: set model.vocab_size")
    if model is not None and data is not None and model < data:
        raise ValueError(
            f"{key}={model}: the data has ids up to {data - 1}; take a vocabulary ≥ {data} "
            "or a tokenizer with fewer ids"
        )
    size = data if model is None else model
    assert size is not None
    return size
