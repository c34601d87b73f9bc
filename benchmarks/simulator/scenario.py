"""A run as a plan needs it: what the configuration says of model, ranks and memory, without data and schedule."""

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
from dzero.parallel.tensor.parallelize import cross_entropy
from dzero.zero.config import PrecisionConfig, ZeroConfig, is_exact
from dzero.zero.layout import Layout
from dzero.zero.offload_config import OffloadConfig


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run. `accumulate`: microbatches per step, each of `sequences` of `tokens` on every data-parallel rank; `ranks`:
    all of them.

    device_type: what the run computes on, cpu or cuda. vocab_size: ids of the data.
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
        """(replicate, shard)."""
        return self.mesh.degrees(self.mesh.data_ranks(self.ranks), stage=self.zero.stage)

    def layout(self) -> Layout:
        """The table. Raises ValueError for settings that do not go together."""
        replicate, degree = self.degrees
        return Layout.of(
            self.zero,
            self.precision,
            self.offload,
            replicate=replicate,
            shard=degree,
            microbatches=self.accumulate,
            exact=is_exact(self.zero.reduction, self.device_type),
            model_ranks=self.mesh.tp,
            pipeline_ranks=self.mesh.pp,
        )

    def build(self) -> nn.Module:
        """The model on meta, its blocks as they will run, but not compiled."""
        # Where a part's tokens stand cannot be asked of fake ones.
        model = build(replace(self.model, max_tokens=None) if self.mesh.pp > 1 else self.model, self.vocab_size)
        apply_blocks(model, replace(self.block, compile=False), "cpu")
        return model

    def cut(self, model: nn.Module, mesh: DeviceMesh, part: int = 0) -> ParallelModel:
        """Cut `model`, on meta, as the ranks of `mesh` with that part of the pipeline have it."""
        config = ParallelConfig(ep=self.mesh.ep, tokens=self.tokens)
        return parallelize(model, mesh, config, pipeline=(part, self.mesh.pp))

    def order(self, part: int) -> list[tuple[str, int]]:
        """Of forwards and backwards, by microbatch."""
        return order_of(self.mesh.pp_schedule, self.accumulate, part, self.mesh.pp)

    def hidden(self, parts: ModelStages) -> HiddenStates:
        """What comes into a part that is not the first."""
        tokens = self.tokens // (self.mesh.tp * self.mesh.cp)
        return HiddenStates((self.sequences, tokens, parts.width), self.layout().param.dtype)

    def loss_of(
        self, model: nn.Module, parts: ModelStages | None = None
    ) -> Callable[[torch.Tensor | None], torch.Tensor]:
        """The trainer's loss of one microbatch [scalar], forward included, on tokens that are all 0; of a part, on the
        hidden states that come in, and where it is not the last those that go out."""

        def loss(hidden: torch.Tensor | None = None) -> torch.Tensor:
            tokens, targets = (torch.zeros(self.sequences, self.tokens, dtype=torch.int64) for _ in range(2))
            x = tokens if hidden is None else hidden
            if self.block.loss_tiles > 1:
                tiled: torch.Tensor = model(x, targets)
                return with_added(tiled, model)
            out: torch.Tensor = model(x) if parts is None else model(x, torch.arange(self.tokens))
            if parts is not None and not parts.has_last:
                return out
            return with_added(cross_entropy(out, targets), model)

        return loss
