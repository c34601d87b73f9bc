"""From a run's settings to its model on this rank, cut along every axis of the mesh, and how a loss is taken of it.

axis             what is cut                       before or after shard()
ep               experts                           before: they are units of their own (parallel/expert/dispatch.py)
tp               matrices, logits                  before: FSDP2 cuts what is left (parallel/tensor/parallelize.py)
pp               layers, the step's schedule       before: a rank has no others (parallel/pipeline/split.py, run.py)
replicate, shard states, by the table              zero/shard.py
cp               sequences, by each loss           after: it needs the ledger (parallel/context/parallelize.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from dzero.checkpoint.import_hf import blank, fill
from dzero.comm.dtensor_traffic import CountDTensorTraffic
from dzero.comm.ledger import Entry, Traffic
from dzero.config import RunConfig
from dzero.mesh import AXES, PIPELINE, TENSOR, data_rank_of, make_mesh
from dzero.models.build import build, flops_per_token, weights_of
from dzero.models.llama import Llama
from dzero.models.meta_init import MetaInitializer
from dzero.models.moe import MoE, added_of, with_added
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.expert.bias import BiasUpdate
from dzero.parallel.expert.dispatch import expected_experts
from dzero.parallel.parallelize import parallelize
from dzero.parallel.pipeline.run import Pipeline
from dzero.parallel.pipeline.schedule import HiddenStates
from dzero.parallel.pipeline.split import ModelStages
from dzero.parallel.tensor.parallelize import cross_entropy
from dzero.plan.run_layout import parallel_of
from dzero.zero.init_params import Materialise
from dzero.zero.shard import Sharded, shard


class BuiltModel:
    """`sharded`: the model, or of a pipeline this rank's parts of it. flops_per_token: of forward and backward of the
    whole, None where unknown. experts: what ranks share of a mixture, if they do. balance: of the experts that tokens
    choose, after every step.

    reader, readers: which sequences this rank reads, of so many; ranks that share them are one reader.
    """

    def __init__(self, config: RunConfig, device: torch.device, vocab_size: int) -> None:
        mesh, self.device, self._config = config.mesh, device, config
        ranks = mesh.data_ranks(dist.get_world_size())
        self.readers = mesh.readers(ranks)
        self.microbatches = config.train.microbatches(self.readers)
        replicate, degree = mesh.degrees(ranks, stage=config.zero.stage)
        self.mesh = make_mesh(device.type, replicate=replicate, shard=degree, tp=mesh.tp, pp=mesh.pp)
        data_rank = data_rank_of(self.mesh)
        self.reader = data_rank // mesh.to_a_sequence
        torch.manual_seed(config.train.seed + data_rank)  # dropout; weights and data have seeds of their own

        model = build(config.model, vocab_size)
        self.flops_per_token = flops_per_token(model, config.train.sequence_tokens)
        # It fills modules by their names in the model as built, so it is made before any of them is cut.
        weights = weights_of(config.model, model)
        materialise: Materialise = MetaInitializer(
            model, seed=config.train.seed, device=device, weights=blank(model, weights)
        )
        self._parallel = parallelize(model, self.mesh, parallel_of(config))
        self.experts, parts = self._parallel.experts, self._parallel.stages
        compiles = mesh.ep == 1 and mesh.pp_schedule != "zero_bubble"
        block = config.block if compiles else replace(config.block, compile=False)
        apply_blocks(model, block, device.type)
        self.counts_tensor = mesh.tp > 1 and not block.compiles(device.type)
        self.sharded = shard(
            self._parallel,
            config.zero,
            precision=config.precision,
            offload=config.offload,
            microbatches=self.microbatches,
            init=materialise,
        )
        groups = {axis: self.sharded.mesh.get_group(axis) for axis in AXES}
        groups |= {axis: group for axis, group in self.sharded.model_groups.items() if axis == TENSOR}
        self.balance = BiasUpdate(self.sharded.model, groups, self.sharded.ledger)
        if weights:
            fill(self.sharded, weights)
        self._context = self.sharded.context
        self._tiled = config.block.loss_tiles > 1
        self.hidden = None if parts is None else self._hidden(config, parts)
        self.pipeline = None if self.hidden is None else self._pipeline(config, self.sharded, self.hidden)

    def _hidden(self, config: RunConfig, parts: ModelStages) -> HiddenStates:
        train, mesh = config.train, config.mesh
        tokens = train.sequence_tokens // (mesh.cp * mesh.tp)
        return HiddenStates((train.microbatch_sequences, tokens, parts.width), self.sharded.layout.param.dtype)

    def _pipeline(self, config: RunConfig, sharded: Sharded, hidden: HiddenStates) -> Pipeline:
        assert sharded.parts is not None
        sharded.parts.forget()
        tokens = hidden.shape[1] * config.mesh.tp
        positions = torch.arange(tokens) if self._context is None else self._context.positions(tokens)
        counts = isinstance(sharded.model, Llama)  # others count what comes in

        def run(part: nn.Module, x: Tensor) -> Tensor:
            with record_function("forward"):
                out: Tensor = part(x, positions) if counts else part(x)
                return out

        return Pipeline(
            sharded.parts,
            self.mesh.get_group(PIPELINE),
            sharded.ledger,
            schedule=config.mesh.pp_schedule,
            microbatches=self.microbatches,
            hidden=hidden,
            device=self.device,
            cadence=sharded,
            run=run,
            loss=lambda part, x, targets: with_added(cross_entropy(run(part, x), targets), part),
            added=added_of,
        )

    def routed(self, steps: int) -> dict[Entry, Traffic]:
        """Calls and bytes that the run's `steps` should have sent from this rank to experts of others, by the ledger's
        entries, given the rows that tokens made of it."""
        model, parts, config = self.sharded.model, self.sharded.parts, self._config
        if self.experts is None or not isinstance(model, MoE):
            return {}
        recomputed = config.block.activation_checkpoint != "none"
        return expected_experts(
            ranks=config.mesh.ep,
            experts=model.shape.experts,
            calls=steps * self.microbatches * (model.shape.layers if parts is None else parts.blocks),
            rows_moved=self.experts.rows_moved // (2 if recomputed else 1),
            row_elems=model.shape.hidden_size,
            dtype=self.sharded.layout.param.dtype,
            recomputed=recomputed,
        )

    def losses(self) -> AbstractContextManager[None]:
        """Around `loss` and its backward: logits may be cut along the vocabulary."""
        return self._parallel.loss()

    def counted(self) -> AbstractContextManager[object]:
        """Inside, the ledger counts what cut matrices exchange, if `counts_tensor`: into compiled blocks it cannot
        see. It takes a look at every operator."""
        if not self.counts_tensor:
            return nullcontext()
        return CountDTensorTraffic(self.mesh.get_group(TENSOR), TENSOR, self.sharded.ledger)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy [nats, fp32 scalar] of int64 [sequences, tokens] against the tokens that follow; where
        sequences are cut, of this rank's part. With gradients also what a model adds to it to balance its experts."""
        tokens, targets = self._mine(tokens), self._mine(targets)
        with record_function("forward"):
            if self._tiled:
                loss: Tensor = self.sharded.model(tokens, targets)
            else:
                loss = cross_entropy(self.sharded.model(tokens), targets)
            return with_added(loss, self.sharded.model)

    def held_out_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As `loss`, without backward; 0 where another rank of the pipeline has it."""
        if self.pipeline is None:
            return self.loss(tokens, targets)
        loss = self.pipeline.evaluate(self._mine(tokens), self._mine(targets))
        return torch.zeros((), device=self.device) if loss is None else loss

    def pipelined(self, batches: Sequence[tuple[Tensor, Tensor]], scale: Callable[[Tensor], Tensor]) -> Tensor:
        """Forward and backward of a step's microbatches, of tokens and targets each; of the mean of their losses, fp32
        scalar, what this rank's parts make: the last all but what others add. scale: of each, before its backward."""
        assert self.pipeline is not None
        total = torch.zeros((), device=self.device)
        scale(total)  # gradients come scaled, also where no loss is

        def take(loss: Tensor) -> Tensor:
            mean = loss / len(batches)
            total.add_(mean.detach())
            return scale(mean)

        with self.losses():
            tokens, targets = ([self._mine(batch[which]) for batch in batches] for which in (0, 1))
            self.pipeline.step(tokens, targets, take)
        return total

    def _mine(self, tokens: Tensor) -> Tensor:
        """What this rank sees of sequences, on its device."""
        return (tokens if self._context is None else self._context.part(tokens)).to(self.device)
