"""Construction of this rank's model from the settings of a run, sharded along every axis of the mesh, and its loss.

axis              what is sharded           before or after shard()
ep                experts                   before: they are separate units (parallel/expert/dispatch.py)
tp                matrices, logits          before: FSDP2 shards the remainder (parallel/tensor/parallelize.py)
pp                layers, step's schedule   before: a rank has no other layers (parallel/pipeline/split.py, run.py)
replicate, shard  states, by the layout     zero/shard.py
cp                sequences, by each loss   after: it needs the ledger (parallel/context/parallelize.py)
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
from dzero.comm.dtensor_traffic import dtensor_traffic
from dzero.comm.ledger import Entry, Traffic
from dzero.config import RunConfig
from dzero.data.batch import IGNORED, Batch
from dzero.errors import RunError
from dzero.mesh import AXES, PIPELINE, TENSOR, data_rank_of, make_mesh
from dzero.models.adapters import add_adapters
from dzero.models.base_record import base_record
from dzero.models.build import build, flops_per_token, weights_of
from dzero.models.llama import Llama
from dzero.models.meta_init import MetaInitializer
from dzero.models.moe import MoE, added_of, with_added
from dzero.models.published import why_unpublished
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.expert.bias import BiasUpdate
from dzero.parallel.expert.dispatch import expected_experts
from dzero.parallel.parallelize import parallelize
from dzero.parallel.pipeline.run import Pipeline
from dzero.parallel.pipeline.schedule import HiddenStates
from dzero.parallel.tiling.loss import losses_of
from dzero.plan.run_layout import block_of, parallel_of, tile_loss_of
from dzero.zero.dtensors import local_of
from dzero.zero.init_params import Materialise
from dzero.zero.shard import shard
from dzero.zero.sharded import Sharded


class BuiltModel:
    """Model of a run on this rank.

    Attributes:
        sharded: Sharded model; with a pipeline, this rank's stages.
        flops_per_token: Model FLOPs of forward and backward of the whole model per token; None if unknown.
        experts: Expert parallelism; None if ranks share no experts.
        balance: Update of the experts' balance, to call after every step.
        reader: Index of the sequences that this rank reads; ranks that share sequences have the same.
        readers: Number of different readers.
        base: Record of the model that adapters belong to; None without adapters.
        parts: Number of parts of a step's microbatches: those of all readers, each cut by cp.
    """

    def __init__(self, config: RunConfig, device: torch.device, vocab_size: int) -> None:
        mesh, self.device, self._config = config.mesh, device, config
        ranks = mesh.data_ranks(dist.get_world_size())
        self.readers = mesh.readers(ranks)
        self.microbatches = config.train.microbatches(self.readers)
        self.parts = self.microbatches * self.readers * mesh.cp
        replicate, degree = mesh.degrees(ranks, stage=config.zero.stage)
        self.mesh = make_mesh(device.type, replicate=replicate, shard=degree, tp=mesh.tp, pp=mesh.pp)
        data_rank = data_rank_of(self.mesh)
        self.reader = data_rank // mesh.to_a_sequence
        torch.manual_seed(config.train.seed + data_rank)  # for dropout; weights and data have their own seeds

        model = build(config.model, vocab_size)
        weights = weights_of(config.model, model)
        adapters = add_adapters(model, config.adapter, config.model.weights_folder)
        if config.export.at_end and (reason := why_unpublished(model, merge=config.export.merge)):
            raise RunError(f"export.at_end=true: {reason}")
        kinds = config.precision.frozen, config.precision.param
        self.base = base_record(model, weights, *kinds) if config.adapter.kind != "none" else None
        weights = adapters.first_values(weights)
        self.flops_per_token = flops_per_token(model, config.train.sequence_tokens)
        # The initializer uses the names of modules in the model as built, so it is created before any is sharded.
        materialise: Materialise = MetaInitializer(
            model,
            seed=config.train.seed,
            device=device,
            weights=blank(model, weights),
            initializers=adapters.initializers,
        )
        tile_loss_of(config, model)
        self._parallel = parallelize(model, self.mesh, parallel_of(config))
        self.experts, stages = self._parallel.experts, self._parallel.stages
        block = replace(block_of(config), loss_tiles=1)
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
        self._share, self._positions = 1.0, list[Tensor | None]()
        self.hidden: HiddenStates | None = None
        self.pipeline: Pipeline | None = None
        if stages is not None:
            shape = config.train.microbatch_sequences, config.train.sequence_tokens // (mesh.cp * mesh.tp), stages.width
            self.hidden = HiddenStates(shape, self.sharded.layout.param.dtype)
            self.pipeline = self._pipeline(config, self.sharded, self.hidden)

    def _pipeline(self, config: RunConfig, sharded: Sharded, hidden: HiddenStates) -> Pipeline:
        assert sharded.stages is not None
        sharded.stages.forget()
        tokens = hidden.shape[1] * config.mesh.tp
        positions = torch.arange(tokens) if self._context is None else self._context.positions(tokens)
        counts = isinstance(sharded.model, Llama)  # other models derive positions from their input

        def run(part: nn.Module, x: Tensor) -> Tensor:
            with record_function("forward"):
                number = None if self.pipeline is None else self.pipeline.microbatch
                packed = None if number is None else self._positions[number]
                out: Tensor = part(x, positions=positions if packed is None else packed) if counts else part(x)
                return out

        def loss(part: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
            return with_added(losses_of(part, targets, lambda: run(part, x)) / self._share, part)

        return Pipeline(
            sharded.stages,
            self.mesh.get_group(PIPELINE),
            sharded.ledger,
            schedule=config.mesh.pp_schedule,
            microbatches=self.microbatches,
            hidden=hidden,
            device=self.device,
            hooks=sharded,
            run=run,
            loss=loss,
            added=added_of,
        )

    def routed(self, steps: int) -> dict[Entry, Traffic]:
        """Return the calls and bytes that this rank should have sent for experts in `steps` steps, by ledger entry.

        The bytes follow from the counted rows that tokens sent to other ranks.
        """
        model, stages, config = self.sharded.model, self.sharded.stages, self._config
        if self.experts is None or not isinstance(model, MoE):
            return {}
        recomputed = config.block.activation_checkpoint != "none"
        return expected_experts(
            ranks=config.mesh.ep,
            experts=model.shape.experts,
            calls=steps * self.microbatches * (model.shape.layers if stages is None else stages.blocks),
            rows_moved=self.experts.rows_moved // (2 if recomputed else 1),
            row_elems=model.shape.hidden_size,
            dtype=self.sharded.layout.param.dtype,
            recomputed=recomputed,
        )

    def losses(self) -> AbstractContextManager[None]:
        """Return a context for `loss` and its backward, because logits may be sharded along the vocabulary."""
        return self._parallel.loss()

    def counted(self) -> AbstractContextManager[object]:
        """Return a context in which the ledger counts the traffic of sharded matrices, if `counts_tensor`.

        The context inspects every operator. It does not cover compiled blocks.
        """
        if not self.counts_tensor:
            return nullcontext()
        return dtensor_traffic(self.mesh.get_group(TENSOR), TENSOR, self.sharded.ledger)

    def loss(self, batch: Batch, share: float) -> Tensor:
        """Return the loss of a microbatch on this rank, an fp32 scalar: the sum over its tokens in nats, by `share`.

        If gradients are enabled, the balancing loss of the experts is added.

        Args:
            batch: Microbatch of this rank's reader; where sequences are sharded, the rank takes its part of it.
            share: Number of the step's tokens that count, divided by `parts`.
        """
        batch = self._mine(batch)
        with record_function("forward"):
            return with_added(self._sum_of_losses(batch) / share, self.sharded.model)

    def _sum_of_losses(self, batch: Batch) -> Tensor:
        model = self.sharded.model
        packed = {} if batch.positions is None else {"positions": batch.positions}
        return losses_of(model, batch.targets, lambda: model(batch.tokens, **packed))

    def held_out(self, batch: Batch) -> Tensor:
        """Return the sum of losses of a held-out microbatch on this rank, and its tokens that count: fp64 [2].

        They are 0 if another rank of the pipeline computes them.
        """
        batch = self._mine(batch)
        if self.pipeline is None:
            total: Tensor | None = local_of(self._sum_of_losses(batch))
        else:
            self._share, self._positions = 1.0, [batch.positions]
            total = self.pipeline.evaluate(batch.tokens, batch.targets)
        if total is None:
            return torch.zeros(2, dtype=torch.float64, device=self.device)
        return torch.stack([total.double(), _counted(batch).double()])

    def pipelined(self, batches: Sequence[Batch], share: float, scale: Callable[[Tensor], Tensor]) -> Tensor:
        """Run forward and backward of a step's microbatches; return this rank's part of their mean loss.

        The result is an fp32 scalar. The last stage computes the loss; others only add their balancing loss. `share` is
        that of `loss`, and `scale` scales each loss before its backward.
        """
        assert self.pipeline is not None
        total = torch.zeros((), device=self.device)
        scale(total)  # the optimizer expects scaled gradients on ranks without a loss too

        def take(loss: Tensor) -> Tensor:
            mean = loss / len(batches)
            total.add_(mean.detach())
            return scale(mean)

        mine = [self._mine(batch) for batch in batches]
        self._share, self._positions = share, [batch.positions for batch in mine]
        with self.losses():
            self.pipeline.step([batch.tokens for batch in mine], [batch.targets for batch in mine], take)
        return total

    def _mine(self, batch: Batch) -> Batch:
        """Return this rank's part of the sequences, on its device; positions are those of whole sequences."""
        if self._context is not None:
            part = self._context.part
            batch = Batch(part(batch.tokens), part(batch.targets), batch.positions)
        return batch.map(lambda each: each.to(self.device))


def _counted(batch: Batch) -> Tensor:
    return (batch.targets != IGNORED).sum()
