"""Run to be simulated: model, ranks and memory settings of a configuration, without data and learning rate schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dzero.mesh_config import MeshConfig
from dzero.models.build import build
from dzero.models.config import ModelConfig
from dzero.models.moe import with_added
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig
from dzero.parallel.parallelize import ParallelConfig, ParallelModel, parallelize
from dzero.parallel.pipeline.schedule import HiddenStates, order_of
from dzero.parallel.pipeline.split import ModelStages
from dzero.parallel.tiling.loss import losses_of
from dzero.zero.config import PrecisionConfig, ZeroConfig, sums_exactly
from dzero.zero.layout import Layout
from dzero.zero.offload_config import OffloadConfig


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Settings of a simulated run.

    Attributes:
        ranks: All ranks.
        sequences: Sequences per microbatch and data-parallel rank.
        tokens: Tokens per sequence.
        accumulate: Microbatches per step.
        device_type: Device that the run would use, cpu or cuda.
        vocab_size: Vocabulary size of the data.
    """

    model: ModelConfig
    ranks: int
    sequences: int
    tokens: int
    accumulate: int = 1
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    block: BlockConfig = field(default_factory=BlockConfig)
    max_norm: float | None = 1.0
    device_type: str = "cuda"
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for key in ("ranks", "sequences", "tokens", "accumulate"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: must be a whole number ≥ 1")
        if self.offload.activations != "device":
            raise ValueError(
                f"offload.activations={self.offload.activations}: what waits off the device between forward and "
                "backward is not simulated; take offload.activations=device"
            )

    @property
    def degrees(self) -> tuple[int, int]:
        """Mesh degrees (replicate, shard)."""
        return self.mesh.degrees(self.mesh.data_ranks(self.ranks), stage=self.zero.stage)

    def layout(self) -> Layout:
        """Return the ZeRO table; raises ValueError for settings that contradict each other."""
        replicate, degree = self.degrees
        return Layout.of(
            self.zero,
            self.precision,
            self.offload,
            replicate=replicate,
            shard=degree,
            microbatches=self.accumulate,
            exact=sums_exactly(self.zero, self.precision, self.device_type),
            model_ranks=self.mesh.tp,
            pipeline_ranks=self.mesh.pp,
        )

    def build(self) -> nn.Module:
        """Return the model on meta with its blocks as they run, but not compiled."""
        # Positions of a pipeline stage's fake tokens cannot be checked against max_tokens.
        model = build(replace(self.model, max_tokens=None) if self.mesh.pp > 1 else self.model, self.vocab_size)
        apply_blocks(model, replace(self.block, compile=False), "cpu")
        return model

    def cut(self, model: nn.Module, mesh: DeviceMesh, part: int = 0) -> ParallelModel:
        """Cut `model`, on meta, to a pipeline stage over the ranks of `mesh`."""
        config = ParallelConfig(ep=self.mesh.ep, tokens=self.tokens)
        return parallelize(model, mesh, config, pipeline=(part, self.mesh.pp))

    def order(self, part: int) -> list[tuple[str, int]]:
        """Return the order of forwards and backwards of a pipeline stage, by microbatch."""
        return order_of(self.mesh.pp_schedule, self.accumulate, part, self.mesh.pp)

    def hidden(self, parts: ModelStages) -> HiddenStates:
        """Return the hidden states that a pipeline stage other than the first receives."""
        tokens = self.tokens // (self.mesh.tp * self.mesh.cp)
        return HiddenStates((self.sequences, tokens, parts.width), self.layout().param.dtype)

    def loss_of(
        self, model: nn.Module, parts: ModelStages | None = None
    ) -> Callable[[torch.Tensor | None], torch.Tensor]:
        """Return a function that runs forward on tokens that are all 0 and returns the trainer's scalar loss.

        For a pipeline stage the function takes the received hidden states. Unless the stage is the last, it returns the
        hidden states to send.
        """

        def loss(hidden: torch.Tensor | None = None) -> torch.Tensor:
            tokens, targets = (torch.zeros(self.sequences, self.tokens, dtype=torch.int64) for _ in range(2))
            x = tokens if hidden is None else hidden

            def run() -> torch.Tensor:
                out: torch.Tensor = model(x) if parts is None else model(x, torch.arange(self.tokens))
                return out

            if parts is not None and not parts.has_last:
                return run()
            return with_added(losses_of(model, targets, run), model)

        return loss
