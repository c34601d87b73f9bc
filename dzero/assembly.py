"""From a run's settings to its model on this rank, cut along every axis of the mesh, and how a loss is taken of it.

axis             what is cut                       before or after shard()
tp               matrices, logits                  before: FSDP2 cuts what is left (parallel/tensor.py)
ep               experts                           before: they are units of their own (parallel/experts.py)
replicate, shard states, by the table              zero/shard.py
cp               sequences, by each loss           after: it needs the ledger (parallel/context.py)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.profiler import record_function

from dzero.checkpoint.imports import blank, fill
from dzero.comm.ledger import Entry, Traffic
from dzero.config import RunConfig
from dzero.mesh import AXES, TENSOR, context_group, data_rank_of, make_mesh
from dzero.models.build import build, flops_per_token, weights_of
from dzero.models.materialise import Materialiser
from dzero.models.moe import MoE
from dzero.parallel.balance import Balance
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.context import ContextParallel
from dzero.parallel.experts import expected_experts, parallelize_experts
from dzero.parallel.tensor import parallelize
from dzero.zero.shard import shard
from dzero.zero.values import Materialise


class Assembled:
    """`sharded`: the model. flops_per_token: of forward and backward, None where unknown. experts: what its ranks share
    of a mixture, if they do. balance: of the experts that tokens choose, after every step.

    reader, readers: which sequences this rank reads, of so many; ranks that share them are one reader.
    """

    def __init__(self, config: RunConfig, device: torch.device, vocab_size: int) -> None:
        mesh, self.device, self._config = config.mesh, device, config
        ranks = mesh.data_ranks(dist.get_world_size())
        self.readers = mesh.readers(ranks)
        self.microbatches = config.train.microbatches(self.readers)
        replicate, degree = mesh.degrees(ranks, stage=config.zero.stage)
        self.mesh = make_mesh(device.type, replicate=replicate, shard=degree, tp=mesh.tp)
        data_rank = data_rank_of(self.mesh)
        self.reader = data_rank // mesh.cp
        torch.manual_seed(config.train.seed + data_rank)  # dropout; weights and data have seeds of their own

        model = build(config.model, vocab_size)
        self.flops_per_token = flops_per_token(model, config.train.sequence_tokens)
        # It fills modules by their names in the model as built, so it is made before any of them is cut.
        weights = weights_of(config.model, model)
        materialise: Materialise = Materialiser(
            model, seed=config.train.seed, device=device, weights=blank(model, weights)
        )
        self._tensor = parallelize(model, self.mesh[TENSOR]) if mesh.tp > 1 else None
        if self._tensor is not None:
            materialise = self._tensor.filling(materialise)
        self.experts = parallelize_experts(model, self.mesh, mesh.ep) if mesh.ep > 1 else None
        if self.experts is not None:
            materialise = self.experts.filling(materialise)
        block = config.block if mesh.ep == 1 else replace(config.block, compile=False)
        apply_blocks(model, block, device.type)
        self.sharded = shard(
            model,
            config.zero,
            precision=config.precision,
            offload=config.offload,
            mesh=self.mesh,
            microbatches=self.microbatches,
            materialise=materialise,
            experts=self.experts,
        )
        groups = {axis: self.sharded.mesh.get_group(axis) for axis in AXES}
        self.balance = Balance(self.sharded.model, groups, self.sharded.ledger)
        if weights:
            fill(self.sharded, weights)
        self._context = self._cut_sequences(config) if mesh.cp > 1 else None
        self._tiled = config.block.loss_tiles > 1

    def _cut_sequences(self, config: RunConfig) -> ContextParallel:
        return ContextParallel(
            self.sharded.model,
            context_group(self.mesh, config.mesh.cp),
            self.sharded.ledger,
            attention=config.mesh.cp_attention,
            exact=self.sharded.layout.exact,
        )

    def routed(self, steps: int) -> dict[Entry, Traffic]:
        """Calls and bytes that the run's `steps` should have sent from this rank to experts of others, by the ledger's
        entries, given the rows that tokens made of it."""
        model, config = self.sharded.model, self._config
        if self.experts is None or not isinstance(model, MoE):
            return {}
        recomputed = config.block.activation_checkpoint != "none"
        return expected_experts(
            ranks=config.mesh.ep,
            experts=model.shape.experts,
            calls=steps * self.microbatches * model.shape.layers,
            rows_moved=self.experts.rows_moved // (2 if recomputed else 1),
            row_elems=model.shape.hidden_size,
            dtype=self.sharded.layout.param.dtype,
            recomputed=recomputed,
        )

    def losses(self) -> AbstractContextManager[None]:
        """Around `loss` and its backward: logits may be cut along the vocabulary."""
        return nullcontext() if self._tensor is None else self._tensor.loss()

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy [nats, fp32 scalar] of int64 [sequences, tokens] against the tokens that follow; where
        sequences are cut, of this rank's part. With gradients also what a model adds to it to balance its experts."""
        if self._context is not None:
            tokens, targets = self._context.part(tokens), self._context.part(targets)
        tokens, targets = tokens.to(self.device), targets.to(self.device)
        with record_function("forward"):
            if self._tiled:
                loss: torch.Tensor = self.sharded.model(tokens, targets)
            else:
                logits = self.sharded.model(tokens)
                loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            added = self.sharded.model.balance_loss() if isinstance(self.sharded.model, MoE) else None
            return loss if added is None else loss + added
