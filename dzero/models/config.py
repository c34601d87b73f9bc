"""Settings of the model: the config group `model`.

    kind   implementation                                       settings
    llama  `llama.Llama`, plain PyTorch                         sizes; hidden_size, layers, heads, ffn_size are required
    moe    `moe.MoE`, llama with a mixture of experts           also those of experts; experts and top_k are required
    hf     any causal LM of transformers (extra `hf`), offline  name_or_path

`llama` and `hf` also take `weights`. A setting that has no effect on the chosen kind is an error.
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
    """Kind and sizes of the model. Unset sizes take the defaults of `LlamaShape` and `MoEShape`."""

    kind: str = "llama"
    """Kind of model: llama, moe (a mixture of experts), or hf (any causal LM of transformers)."""
    vocab_size: int | None = None
    """Vocabulary size. null: that of the data."""
    hidden_size: int | None = None
    """Width of the hidden states."""
    layers: int | None = None
    """Number of transformer blocks."""
    heads: int | None = None
    """Number of attention heads."""
    kv_heads: int | None = None
    """Number of key and value heads. null: same as heads."""
    ffn_size: int | None = None
    """Width of the feed-forward layer. moe: of one expert."""
    max_tokens: int | None = None
    """Longest sequence that the model accepts. null: any."""
    rope_theta: float | None = None
    """Base of the rotary position embedding. null: 10000."""
    norm_eps: float | None = None
    """Epsilon of the RMSNorm layers. null: 1e-5."""
    tied: bool | None = None
    """Share one parameter between embedding and head."""
    experts: int | None = None
    """Experts per layer (moe)."""
    top_k: int | None = None
    """Experts that each token uses (moe)."""
    shared_experts: int | None = None
    """Width of the feed-forward layer that all tokens use, in experts (moe)."""
    scores: str | None = None
    """Scores of experts: softmax over all, or sigmoid of each (moe)."""
    balance: str | None = None
    """Load balancing of experts: auxiliary-loss-free, loss or none (moe)."""
    balance_rate: float | None = None
    """Rate of the load balancing. null: 1e-3 for auxiliary-loss-free, 1e-2 for loss (moe)."""
    name_or_path: str | None = None
    """Local folder with config.json, or a model type such as gpt2 with its default sizes (hf)."""
    weights: bool | str = False
    """Folder of safetensors files to start from. true: that of name_or_path. false: random values."""

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
        """Folder of the initial weights; None for random values."""
        return self.weights if isinstance(self.weights, str) else self.name_or_path if self.weights else None

    def shape(self, vocab_size: int | None) -> LlamaShape:
        """Return the sizes of a llama or moe decoder for data with `vocab_size` ids.

        Raises:
            ValueError: If the model has fewer ids than the data, or neither has a vocabulary size.
        """
        vocab_size = check_vocabulary(self.vocab_size, vocab_size)
        given = {key: value for key in SIZES[self.kind] if (value := getattr(self, key)) is not None}
        return SHAPES[self.kind](**{"kv_heads": self.heads, **given, "vocab_size": vocab_size})


def check_vocabulary(model: int | None, data: int | None, *, key: str = "model.vocab_size") -> int:
    """Return the vocabulary size of the model: its own if set, else that of the data.

    Args:
        model: Vocabulary size that the model sets, or None.
        data: Vocabulary size of the data, or None.
        key: Name of the model's setting, for messages.

    Raises:
        ValueError: If the data has ids outside the model's vocabulary, or both sizes are None.
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
