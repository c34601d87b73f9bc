"""Settings of the model, the config group `model`, and the validated sizes that follow from it; no model is built.

    kind   implementation                                       settings
    llama  `llama.Llama`, plain PyTorch                         sizes; hidden_size, layers, heads, ffn_size are required
    moe    `moe.MoE`, llama with a mixture of experts           also those of experts; experts and top_k are required
    hf     any causal LM of transformers (extra `hf`), offline  name_or_path

All take `weights`, of which `moe` reads those of Mixtral. A setting that has no effect on the chosen kind is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dzero.compatibility import check_compatible
from dzero.utils.ranges import check, divisors, positive, whole
from dzero.utils.rules import Settings

SCORES = ("softmax", "sigmoid")
BALANCES = ("auxiliary-loss-free", "loss", "none")
MOST_WIDTH, MOST_LAYERS, MOST_EXPERTS, MOST_IDS = 2**26, 10_000, 2**16, 2**31
MOST_THETA, MOST_BALANCE_RATE = 1e18, 1e6
RATES = {"auxiliary-loss-free": 1e-3, "loss": 1e-2, "none": 0.0}


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of the dense decoder.

    A head has hidden_size / heads dims. With grouped-query attention, heads / kv_heads heads share keys and values.

    Attributes:
        max_tokens: Longest sequence that the model accepts. None: any length.
        tied: Whether embedding and head share one parameter.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    ffn_size: int
    max_tokens: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        width = whole(1, MOST_WIDTH)
        check("model", self, vocab_size=whole(1, MOST_IDS), layers=whole(1, MOST_LAYERS), max_tokens=whole())
        check("model", self, hidden_size=width, heads=width, kv_heads=width, ffn_size=width)
        check("model", self, rope_theta=positive(MOST_THETA), norm_eps=positive(1.0))
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"model.heads={self.heads} with model.hidden_size={self.hidden_size}: hidden_size / heads must be an "
                f"even whole number (rotary turns pairs of dims); allowed heads: {divisors(self.hidden_size // 2)}"
                if self.hidden_size % 2 == 0
                else f"model.hidden_size={self.hidden_size}: must be even (rotary turns pairs of dims); "
                f"take {self.hidden_size + 1}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; "
                f"allowed: {divisors(self.heads)}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.heads

    @property
    def params(self) -> int:
        """Number of parameters of the whole model."""
        attention = 2 * self.hidden_size * (self.hidden_size + self.kv_heads * self.head_dim)
        block = attention + self._ffn_params + 2 * self.hidden_size
        return self.layers * block + (1 if self.tied else 2) * self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def _ffn_params(self) -> int:
        return 3 * self.hidden_size * self.ffn_size


@dataclass(frozen=True, kw_only=True)
class MoEShape(LlamaShape):
    """Sizes of the mixture of experts; `ffn_size` is the width of one expert.

    `ModelConfig` tells what the settings mean, and a note in `models/moe.py` the methods of balancing.
    """

    experts: int
    top_k: int
    shared_experts: int = 0
    scores: str = "softmax"
    balance: str = "auxiliary-loss-free"
    balance_rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        most = MOST_EXPERTS
        check("model", self, experts=whole(1, most), top_k=whole(1, most), shared_experts=whole(0, most))
        check("model", self, balance_rate=positive(MOST_BALANCE_RATE))
        if self.top_k > self.experts:
            raise ValueError(
                f"model.top_k={self.top_k} of model.experts={self.experts}: a token cannot use more experts than there "
                f"are; take model.top_k ≤ {self.experts}"
            )
        for key, allowed in (("scores", SCORES), ("balance", BALANCES)):
            if getattr(self, key) not in allowed:
                raise ValueError(f"model.{key}={getattr(self, key)!r}: choose one of {[*allowed]}")
        check_compatible(Settings.of(model=self))

    @property
    def _ffn_params(self) -> int:
        return (self.experts + self.shared_experts) * super()._ffn_params + self.experts * self.hidden_size

    @property
    def rate(self) -> float:
        """Rate of the balancing: `balance_rate`, or its default."""
        return RATES[self.balance] if self.balance_rate is None else self.balance_rate


SHAPES: dict[str, type[LlamaShape]] = {"llama": LlamaShape, "moe": MoEShape}
SIZES = {kind: {field.name for field in fields(shape)} for kind, shape in SHAPES.items()}
SETTINGS = {"llama": SIZES["llama"] | {"weights"}, "moe": SIZES["moe"] | {"weights"}, "hf": {"name_or_path", "weights"}}
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
    """Local folder with config.json, org/name in Hugging Face's local cache, or a type such as gpt2 (hf)."""
    weights: bool | str = False
    """Folder, or org/name in the cache, of safetensors files to start from. true: name_or_path. false: random."""

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
                    f"model.weights=true: model.kind={self.kind} has no folder of its own; name one, or take false"
                )

    @property
    def weights_folder(self) -> str | None:
        """Folder of the initial weights; None for random values."""
        return self.weights if isinstance(self.weights, str) else self.name_or_path if self.weights else None

    def shape(self, vocab_size: int | None) -> LlamaShape:
        """Return the sizes of a llama or moe decoder for data with `vocab_size` ids; raise as `check_vocabulary`."""
        vocab_size = check_vocabulary(self.vocab_size, vocab_size)
        given = {key: value for key in SIZES[self.kind] if (value := getattr(self, key)) is not None}
        return SHAPES[self.kind](**{"kv_heads": self.heads, **given, "vocab_size": vocab_size})


def check_vocabulary(
    model: int | None, data: int | None, *, key: str = "model.vocab_size", more: str = "a model.vocab_size ≥ {}"
) -> int:
    """Return the vocabulary size of the model: its own if set, else that of the data.

    Raise ValueError, which names the model's setting `key`, if the data has ids outside of it, or neither has a size.
    `more` says how the model gets a size, `{}`.
    """
    if model is None and data is None:
        raise ValueError("model.vocab_size is unset and the data names no vocabulary: set model.vocab_size")
    if model is not None and data is not None and model < data:
        raise ValueError(
            f"{key}={model}: the tokenizer or the data has ids up to {data - 1}, for which the model has no embedding; "
            f"take a tokenizer with fewer ids, or {more.format(data)}"
        )
    size = data if model is None else model
    assert size is not None
    return size
