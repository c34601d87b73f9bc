"""A model cut along the axes that cut the model itself, in the one order in which the cuts compose.

    axis   what is cut        when
    ep     experts            first: they become units of their own        expert/dispatch.py
    tp     matrices, logits   then, of what is left                        tensor/parallelize.py
    pp     layers             then: a rank keeps only its stages           pipeline/split.py
    cp     sequences          after `shard`, whose ledger counts what      context/parallelize.py
                              attention moves

The trainer, the planner and a loop of one's own cut models by this function alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dzero.comm.ledger import Ledger
from dzero.mesh import PIPELINE, TENSOR, context_group
from dzero.models.published import refuse_lost_adapter
from dzero.parallel.context.parallelize import ContextParallel
from dzero.parallel.expert.dispatch import ExpertParallel, parallelize_experts
from dzero.parallel.pipeline.split import ModelStages, PipelinePlan, split_pipeline
from dzero.parallel.tensor.parallelize import Plan, TensorParallel, parallelize_tensor
from dzero.utils.param_attributes import kept_attributes
from dzero.utils.torch_internals import hooked_param


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Settings by which a model is cut over a mesh; its axes `tp` and `pp` say how far matrices and layers are cut.

    Attributes:
        ep: Number of neighbouring ranks that share the experts.
        is_experts: Predicate of the modules that hold experts; None: those of a class named Experts.
        tensor_plan: torch's parallel styles by module name; None: the plan of a known kind of model.
        replicated: Names of parameters, wildcards allowed, that the plan leaves whole, and that all ranks of tp use on
            the same inputs.
        stages_per_rank: Number of pipeline stages on each rank; 2 or more for interleaved schedules.
        pipeline_plan: Names of the modules before and after the blocks; None: those of a known kind of model.
        tokens: Length of the sequences, by which stages are balanced; 0: by parameters alone.
        cp: Number of neighbouring data-parallel ranks that share every sequence.
        cp_attention: `all_gather`, `ulysses` or `ring`.
    """

    ep: int = 1
    is_experts: Callable[[nn.Module], bool] | None = None
    tensor_plan: Plan | None = None
    replicated: Sequence[str] = ()
    stages_per_rank: int = 1
    pipeline_plan: PipelinePlan | None = None
    tokens: int = 0
    cp: int = 1
    cp_attention: str = "all_gather"


class ParallelModel:
    """A model after `parallelize`, which `shard` takes in place of the model.

    Attributes:
        model: The model, cut in place.
        mesh: The mesh it was cut over; None for layers alone.
        config: How it was cut.
        experts: The experts that ranks share; None where they share none.
        tensor: The matrices that are cut; None where none are.
        stages: This rank's pipeline stages; None where it has all layers.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh | None,
        config: ParallelConfig,
        experts: ExpertParallel | None,
        tensor: TensorParallel | None,
        stages: ModelStages | None,
    ) -> None:
        self.model, self.mesh, self.config = model, mesh, config
        self.experts, self.tensor, self.stages = experts, tensor, stages

    def loss(self) -> AbstractContextManager[None]:
        """Return a context for the loss and its backward, where logits may be cut along the vocabulary."""
        return nullcontext() if self.tensor is None else self.tensor.loss()

    def filling(self, materialise: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        """Return `materialise` for the cut model: it fills whole parameters, of which this rank then keeps its part."""
        for cut in (self.experts, self.tensor):
            materialise = materialise if cut is None else cut.filling(materialise)
        return materialise

    def cut_sequences(self, ledger: Ledger, *, exact: bool, group: dist.ProcessGroup | None = None) -> ContextParallel:
        """Let attention run over sequences that the ranks of cp share. All ranks call this.

        Args:
            ledger: Counts what attention moves.
            exact: Move pairwise instead of by the backend's collectives (`Layout.exact`).
            group: The ranks that share a sequence; None: `config.cp` neighbours of the mesh.

        Raises:
            ValueError: `config.cp` does not divide the data-parallel ranks, or the model lacks the methods that are
                replaced.
        """
        if group is None:
            assert self.mesh is not None
            group = context_group(self.mesh, self.config.cp)
        return ContextParallel(self.model, group, ledger, attention=self.config.cp_attention, exact=exact)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None,
    config: ParallelConfig | None = None,
    *,
    pipeline: tuple[int, int] | None = None,
) -> ParallelModel:
    """Cut `model` in place over `mesh`, before `shard`. All ranks of the mesh call this.

    Args:
        model: On the mesh's device, the CPU, or meta. Ranks get the values that the first rank of an axis has.
        mesh: From `make_mesh`; its axes tp and pp cut matrices and layers. None: no axis cuts anything but layers.
        config: Everything else; None: the defaults.
        pipeline: This rank's index in the pipeline and the number of its ranks; None: those of the mesh's axis pp.

    Returns:
        What `shard` takes in place of the model.

    Raises:
        ValueError: A degree does not divide what it cuts, no plan is known for this kind of model, or a parameter of
            a model that tp or ep cut has a hook; or an adapter could not be saved after training.
    """
    refuse_lost_adapter(model)
    config, experts, tensor = config or ParallelConfig(), None, None
    axes = () if mesh is None else mesh.mesh_dim_names or ()
    if (config.ep > 1 or TENSOR in axes) and (hooked := hooked_param(dict(model.named_parameters()))) is not None:
        raise ValueError(
            f"{hooked} has a hook of its own, which would see gradients of parts where tp or ep cut the model: set it "
            "aside (handle.remove()), or train without these axes"
        )
    with kept_attributes(model):
        if mesh is not None and config.ep > 1:
            experts = parallelize_experts(model, mesh, config.ep, config.is_experts)
        if mesh is not None and TENSOR in axes:
            tensor = parallelize_tensor(model, mesh[TENSOR], config.tensor_plan, alike=config.replicated)
    if mesh is not None and PIPELINE in axes and pipeline is None:
        pipeline = mesh.get_local_rank(PIPELINE), mesh[PIPELINE].size()
    stages = None
    if pipeline is not None and pipeline[1] > 1:
        stages = split_pipeline(
            model,
            *pipeline,
            stages_per_rank=config.stages_per_rank,
            plan=config.pipeline_plan,
            tokens=config.tokens,
        )
    return ParallelModel(model, mesh, config, experts, tensor, stages)
