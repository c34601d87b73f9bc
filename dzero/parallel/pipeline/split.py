"""Split of a model into pipeline stages, and the part of the model that a rank keeps.

    stage       first            others             last
    modules     those before     some blocks,       those after
                the blocks       as in all stages   the blocks

Blocks (parallel/blocks.py) are assigned in order, so that the most expensive stage costs as little as possible. With
several stages on a rank, stage i is on rank i modulo the ranks. A placeholder that returns its input replaces each
module on another rank. A stage's forward is thus the model's own, on hidden states instead of tokens, and every module
keeps its name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

from torch import Tensor, nn

from dzero.parallel.blocks import find_blocks
from dzero.parallel.divisibility import check_blocks


class MissingStage(nn.Module):
    """Placeholder for a module on another rank; returns its first input."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return `x`."""
        return x


@dataclass(frozen=True)
class PipelinePlan:
    """Names of the modules with parameters before and after the blocks, and the width of the hidden states."""

    first: tuple[str, ...]
    last: tuple[str, ...]
    width: int


@dataclass(frozen=True)
class ModelStage:
    """Pipeline stage `index`: the model with only its own modules `names`, and the number of blocks among them."""

    index: int
    module: nn.Module
    names: tuple[str, ...]
    blocks: int


@dataclass(frozen=True)
class ModelStages:
    """The part of a model that `split_pipeline` leaves on a rank of the pipeline.

    Attributes:
        count: Number of stages on all ranks.
        own: Stages on this rank, in order.
        names: Parameters of the whole model, each once.
        aliases: Name in `names` of a tied parameter, by its name on this rank if that differs.
        shared: Tied parameters that this rank shares with the other end of the pipeline.
        width: Features of the hidden states.
        removed: Modules on other ranks.
        empty: The model without the modules of any stage.
    """

    rank: int
    ranks: int
    count: int
    own: tuple[ModelStage, ...]
    names: tuple[str, ...]
    aliases: Mapping[str, str]
    shared: tuple[str, ...]
    width: int
    removed: tuple[nn.Module, ...]
    empty: nn.Module

    @property
    def has_first(self) -> bool:
        """Whether this rank has the first stage, which takes tokens."""
        return self.own[0].index == 0

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.own[-1].index == self.count - 1

    @property
    def blocks(self) -> int:
        """Number of blocks on this rank."""
        return sum(stage.blocks for stage in self.own)

    @property
    def own_modules(self) -> tuple[str, ...]:
        """Names of the modules that only this rank has."""
        return tuple(name for stage in self.own for name in stage.names)

    def forget(self) -> None:
        """Drop the values that tied parameters got in removed modules; call this after `shard`."""
        for module in self.removed:
            module.to("meta")


def split_pipeline(
    model: nn.Module,
    rank: int,
    ranks: int,
    *,
    stages_per_rank: int = 1,
    plan: PipelinePlan | None = None,
    tokens: int = 0,
) -> ModelStages:
    """Leave of `model`, in place, the stages of one rank; call this before `apply_blocks` and `shard`.

    Without a `plan` the model must be of a known kind. Attention over `tokens` per sequence costs as much as 2 *
    attention_width * tokens elements of matrices (`models.build.flops_per_token`), divided evenly among the blocks.

    Raises:
        ValueError: If the model is of an unknown kind, has fewer blocks than stages, or has parameters in no stage.
    """
    plan = plan or plan_for(model)
    count = ranks * stages_per_rank
    blocks = find_blocks(model)
    check_blocks(len(blocks), ranks, stages_per_rank)
    modules_of_model = dict(model.named_modules())
    if unknown := [name for name in (*plan.first, *plan.last) if name not in modules_of_model]:
        raise ValueError(f"mesh.pp: the plan names {unknown}, which {type(model).__name__} has not as modules")
    before, after = ([(name, model.get_submodule(name)) for name in names] for names in (plan.first, plan.last))
    names = {param: name for name, param in model.named_parameters()}
    attention = 2 * int(getattr(model, "attention_width", None) or 0) * tokens / len(blocks)
    costs = [_elems(block) + attention for _, block in blocks]
    spans = balanced(costs, count, last=sum(_elems(module) for _, module in after))
    modules = [blocks[span] for span in spans]
    modules[0], modules[-1] = [*before, *modules[0]], [*modules[-1], *after]
    tied = _tied(names, modules)
    mine = range(rank, count, ranks)
    owned = {index: dict.fromkeys(name for name, _ in modules[index]) for index in mine}
    here = {name for of_stage in owned.values() for name in of_stage}
    _check_trained(modules)
    removed = [(name, module) for of_stage in modules for name, module in of_stage if name not in here]
    for name, _ in removed:
        _replace(model, name)
    own = tuple(
        ModelStage(index, _view(model, here - names_of.keys()), tuple(names_of), len(blocks[spans[index]]))
        for index, names_of in owned.items()
    )
    left = dict(model.named_parameters())
    return ModelStages(
        rank=rank,
        ranks=ranks,
        count=count,
        own=own,
        names=tuple(names.values()),
        aliases={name: names[param] for name, param in left.items() if name != names[param]},
        shared=tuple(names[param] for param in left.values() if param in tied) if count > 1 else (),
        width=plan.width,
        removed=tuple(module for _, module in removed),
        empty=_view(model, here),
    )


def balanced(costs: Sequence[float], stages: int, *, last: float = 0.0) -> list[slice]:
    """Cut `costs` into `stages` non-empty slices so that the most expensive slice costs least.

    Of all such cuts it returns the most even one. Ties make early slices short, as early stages hold more microbatches.
    `last` is added to the cost of the last slice.
    """
    ratios = [cost.as_integer_ratio() for cost in (*costs, last)]
    unit = lcm(*(below for _, below in ratios))
    *exact, behind = (above * unit // below for above, below in ratios)  # integers, so that equal costs compare equal
    sums = [0, *accumulate(exact)]

    def least(with_part: Callable[[int, int], int | None]) -> tuple[int, tuple[int, ...]]:
        """Return the least figure of all cuts, and where its slices begin.

        `with_part` combines the figure of the first slices with the cost of one more; None forbids this.
        """
        found: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # by number of elements that are assigned
        for stage in range(stages):
            more = behind if stage == stages - 1 else 0
            further: dict[int, tuple[int, tuple[int, ...]]] = {}
            for at, (figure, begins) in found.items():
                for end in range(at + 1, len(sums)):
                    both = with_part(figure, sums[end] - sums[at] + more)
                    if both is not None and (end not in further or (both, (*begins, at)) < further[end]):
                        further[end] = both, (*begins, at)
            found = further
        return found[len(exact)]

    dearest, _ = least(max)
    _, begins = least(lambda squares, cost: squares + cost**2 if cost <= dearest else None)
    return [slice(*each) for each in pairwise((*begins, len(costs)))]


Named = tuple[str, nn.Module]


def _elems(module: nn.Module) -> float:
    """Return the matrix elements that a token is multiplied with; only those of the experts in use count."""
    return sum(
        float(getattr(each, "active_share", 1.0)) * param.numel()
        for each in module.modules()
        for param in each.parameters(recurse=False)
        if param.ndim > 1
    )


def _tied(names: Mapping[nn.Parameter, str], modules: Sequence[Sequence[Named]]) -> set[nn.Parameter]:
    """Return the parameters that both ends share; raise ValueError for other ties, and for parameters of no stage."""
    stages: dict[nn.Parameter, list[int]] = {param: [] for param in names}
    for index, of_stage in enumerate(modules):
        for param in {param for _, module in of_stage for param in module.parameters()}:
            stages[param].append(index)
    if left := [names[param] for param, of_param in stages.items() if not of_param]:
        raise ValueError(
            f"mesh.pp: no pipeline stage has {left}; name their modules in the plan's first or last (what the "
            "model itself holds goes into a module of its own)"
        )
    tied = {param: of_param for param, of_param in stages.items() if len(of_param) > 1}
    ends = [0, len(modules) - 1]
    if wrong := {names[param]: of_param for param, of_param in tied.items() if of_param != ends}:
        raise ValueError(f"mesh.pp: only the first stage and the last may share parameters, and stages share {wrong}")
    return set(tied)


def _check_trained(modules: Sequence[Sequence[Named]]) -> None:
    """Raise ValueError if all parameters of a stage are frozen: its rank would have nothing to update."""
    for index, of_stage in enumerate(modules):
        if not any(param.requires_grad for _, module in of_stage for param in module.parameters()):
            names = [name for name, _ in of_stage]
            raise ValueError(
                f"mesh.pp: every parameter of stage {index} of {len(modules)} is frozen ({names}), and backward goes "
                "through every stage; train a parameter of it, or take fewer ranks or stages"
            )


def _replace(model: nn.Module, name: str) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, MissingStage())


def _view(module: nn.Module, elsewhere: set[str], prefix: str = "") -> nn.Module:
    """Return a shallow copy of `module` without the modules `elsewhere`, or `module` itself if there are none."""
    if not elsewhere:
        return module
    view = copy.copy(module)
    view.__dict__ = {key: copy.copy(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
    for name, child in module.named_children():
        inside = {each for each in elsewhere if each.startswith(f"{prefix}{name}.")}
        if f"{prefix}{name}" in elsewhere:
            view.register_module(name, MissingStage())
        elif inside:
            view.register_module(name, _view(child, inside, f"{prefix}{name}."))
    return view


def plan_for(model: nn.Module) -> PipelinePlan:
    """Return the plan of a model of a known kind, or of a module around one; raise ValueError for others."""
    for prefix, module in model.named_modules():
        kind = type(module).__name__
        if kind in PLANS:
            first, last = ([f"{prefix}.{name}".removeprefix(".") for name in names] for names in PLANS[kind])
            sizes: Any = getattr(module, "shape", None) or getattr(module, "config", None)
            return PipelinePlan(tuple(first), tuple(last), int(sizes.hidden_size))
    kinds = dict.fromkeys(type(module).__name__ for module in model.modules() if module is model or _has_blocks(module))
    raise ValueError(
        f"mesh.pp: no pipeline stages are known for {' around '.join(kinds)}, only for {sorted(PLANS)}; take "
        "mesh.pp=1, or in a loop of your own pass ParallelConfig(pipeline_plan=dzero.PipelinePlan(...)), the names of "
        "the modules before its blocks and after them"
    )


def _has_blocks(module: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList | nn.Sequential) for child in module.children())


_HF = (("model.embed_tokens",), ("model.norm", "lm_head"))
PLANS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("Llama", "MoE"), (("embedding",), ("norm", "head"))),
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), _HF),
}
"""Modules before the blocks and after them, by class name."""
