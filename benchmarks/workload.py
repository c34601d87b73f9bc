"""The model and the batches that every side trains: the same weights and the same tokens for all.

Tokens are the bytes of the running Python's standard library, so nothing is downloaded and the loss falls.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn

from dzero.models.config import ModelConfig, MoEShape
from dzero.models.llama import Llama
from dzero.models.moe import MoE

CONF = Path(__file__).parent.parent / "conf" / "model"
TEXT_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`model`: a bench_*.yaml of conf/model. A step of one rank is `samples` sequences of `tokens` tokens."""

    model: str = "21m"
    samples: int = 4
    tokens: int = 256
    seed: int = 0
    heads: int | None = None
    """Other than the model's, for ranks that must divide them."""

    @property
    def step_tokens(self) -> int:
        """Tokens of one rank's step."""
        return self.samples * self.tokens

    def build(self) -> nn.Module:
        """The model in fp32 on the CPU, with the same values in every process."""
        values = OmegaConf.to_container(OmegaConf.load(CONF / f"bench_{self.model}.yaml"))
        assert isinstance(values, dict)
        config = ModelConfig(**{str(key): value for key, value in values.items()})
        if self.heads is not None:
            config = replace(config, heads=self.heads, kv_heads=self.heads)
        shape = config.shape(vocab_size=256)
        torch.manual_seed(self.seed)
        return MoE(shape) if isinstance(shape, MoEShape) else Llama(shape)


class Batches:
    """int64 [samples, tokens + 1] for (step, rank); random windows of the text."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._text = workload, library_bytes()

    def get(self, step: int, rank: int) -> Tensor:
        w = self._workload
        generator = torch.Generator().manual_seed((w.seed << 40) + (step << 16) + rank)
        starts = torch.randint(self._text.numel() - w.tokens - 1, (w.samples, 1), generator=generator)
        return self._text[starts + torch.arange(w.tokens + 1)].long()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean next-token cross entropy in fp32, in nats."""
    logits: Tensor = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def library_bytes() -> Tensor:
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)
