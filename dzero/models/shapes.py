"""Validated sizes of the decoders. Validation builds no model."""

from __future__ import annotations

from dataclasses import dataclass

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

    Attributes:
        experts: Experts per layer.
        top_k: Experts that each token uses.
        shared_experts: Width of the SwiGLU that all tokens use, in multiples of `ffn_size`.
        scores: `softmax` over all experts, or `sigmoid` of each expert's logit.
        balance: Load balancing method; see the note in `models/moe.py`.
        balance_rate: Rate of the balancing. None: the default in `RATES`.
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
