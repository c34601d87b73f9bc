"""Checks for combinations of settings that do not work together, along the axes of the mesh."""

from __future__ import annotations

from dataclasses import dataclass

from dzero.mesh_config import MeshConfig
from dzero.models.config import ModelConfig
from dzero.parallel.config import BlockConfig
from dzero.parallel.divisibility import Sizes, check_blocks, check_heads
from dzero.utils.ranges import divisors
from dzero.zero.config import ZeroConfig
from dzero.zero.offload_config import OffloadConfig


@dataclass(frozen=True)
class CombinedSettings:
    """Settings that are checked together.

    Attributes:
        rule: Update rule of the optimizer.
    """

    mesh: MeshConfig
    model: ModelConfig
    block: BlockConfig
    zero: ZeroConfig
    offload: OffloadConfig
    rule: str


def check_together(run: CombinedSettings) -> None:
    """Check all combinations; raise ValueError that names the settings and an alternative."""
    mesh, model = run.mesh, run.model
    _check_sizes(mesh, model)
    for key in ("tiles", "loss_tiles") if mesh.tp > 1 else ():
        if getattr(run.block, key) > 1:
            raise ValueError(
                f"block.{key}={getattr(run.block, key)} with mesh.tp={mesh.tp}: tiles are cut out of whole "
                f"matrices; take block.{key}=1, since tensor parallelism makes operators smaller too"
            )
    for key in ("tiles", "loss_tiles") if run.zero.states_over == "all" else ():
        if getattr(run.block, key) > 1:
            raise ValueError(
                f"block.{key}={getattr(run.block, key)} with zero.states_over=all: the states of a tile are not "
                f"cut over copies; take block.{key}=1, or zero.states_over=shard"
            )
    if mesh.cp > 1 and model.kind == "hf":
        raise ValueError(
            f"mesh.cp={mesh.cp} with model.kind={model.kind}: only model.kind=llama and moe attend over sequences "
            "that are cut; take mesh.cp=1"
        )
    for key in ("tiles", "loss_tiles") if mesh.pp > 1 else ():
        if getattr(run.block, key) > 1:
            raise ValueError(
                f"block.{key}={getattr(run.block, key)} with mesh.pp={mesh.pp}: tiles and parts are not cut out "
                f"of one model yet; take block.{key}=1"
            )
    if mesh.pp_schedule == "zero_bubble":
        _check_zero_bubble(run)
    if mesh.pp > 1 and mesh.tp > 1 and model.kind == "hf":
        raise ValueError(
            f"mesh.pp={mesh.pp} x mesh.tp={mesh.tp} with model.kind={model.kind}: transformers counts positions by "
            "what comes into a part, which is cut; take mesh.pp=1, mesh.tp=1, or model.kind=llama"
        )
    _check_experts(run)
    if mesh.cp_attention == "ulysses" and model.heads is not None and model.heads % mesh.tp == 0:
        check_heads(model.heads // mesh.tp, (model.kv_heads or model.heads) // mesh.tp, mesh.cp)


def _check_sizes(mesh: MeshConfig, model: ModelConfig) -> None:
    """Check sizes that the settings contain; those of other models are checked when they are built."""
    if mesh.tp > 1 and model.heads is not None:
        dense = model.shared_experts or 0 if model.kind == "moe" else 1
        ffn_size = dense * (model.ffn_size or 0)
        Sizes(model.heads, model.kv_heads or model.heads, ffn_size, model.vocab_size or 0).check(mesh.tp, "mesh.tp")
    if mesh.pp > 1 and model.layers is not None:
        check_blocks(model.layers, mesh.pp, mesh.stages_per_rank)


def _check_zero_bubble(run: CombinedSettings) -> None:
    """Check settings for a backward in two parts, which excludes recomputation, compiled code, and other backwards."""
    refused = {
        f"block.activation_checkpoint={run.block.activation_checkpoint}": (
            run.block.activation_checkpoint != "none",
            "blocks would be computed again for every weight; take block.activation_checkpoint=none",
        ),
        "block.compile=true": (run.block.compile, "compiled code has one backward; leave compile unset"),
        "model.kind=moe": (
            run.model.kind == "moe",
            "the balance of experts has a backward of its own; take llama",
        ),
    }
    for setting, (is_set, why) in refused.items():
        if is_set:
            raise ValueError(f"{setting} with mesh.pp_schedule=zero_bubble: {why}, or another schedule")


def _check_experts(run: CombinedSettings) -> None:
    mesh, model, block = run.mesh, run.model, run.block
    if model.kind == "moe":
        if block.tiles > 1:
            raise ValueError(f"block.tiles={block.tiles} with model.kind=moe: it cuts no experts; take block.tiles=1")
        if run.rule == "muon":
            raise ValueError(
                "optim.rule=muon with model.kind=moe: experts' matrices are stacked in one, which would be "
                "orthogonalised as a whole; take optim.rule=adamw"
            )
        _check_experts_of_tensors(run)
    if mesh.ep == 1:
        return
    if model.kind != "moe" or model.experts is None:
        raise ValueError(
            f"mesh.ep={mesh.ep} with model.kind={model.kind}: only the experts of model.kind=moe (model=tiny_moe) "
            "are shared; take mesh.ep=1"
        )
    if model.experts % mesh.ep:
        allowed = divisors(model.experts)
        raise ValueError(f"mesh.ep={mesh.ep} does not divide model.experts={model.experts}; allowed: {allowed}")
    if block.activation_checkpoint == "selective":
        raise ValueError(
            f"block.activation_checkpoint=selective with mesh.ep={mesh.ep}: it cannot compute again what gathers "
            "experts inside a block; take activation_checkpoint=full or none"
        )
    if block.compile:
        raise ValueError(
            f"block.compile=true with mesh.ep={mesh.ep}: tokens leave a block for other ranks, which ends compiled "
            "code there; leave compile unset or take false"
        )
    if run.offload.activations != "device":
        raise ValueError(
            f"offload.activations={run.offload.activations} with mesh.ep={mesh.ep}: what blocks with experts keep "
            "was never tried off the device; take offload.activations=device"
        )


def _check_experts_of_tensors(run: CombinedSettings) -> None:
    mesh, experts = run.mesh, run.model.experts or 0
    if mesh.ep % mesh.tp:
        allowed = [each for each in divisors(experts) if each % mesh.tp == 0]
        raise ValueError(
            f"mesh.ep={mesh.ep} with mesh.tp={mesh.tp} and model.kind=moe: ranks of tp have tokens of their own "
            f"between blocks and share experts as others do, so mesh.ep counts them; of model.experts={experts} "
            f"allowed: mesh.ep in {allowed}, or mesh.tp=1"
        )
