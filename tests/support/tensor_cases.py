"""Tensor-parallel runs for the pool's workers, and the same in the oracle."""

from __future__ import annotations

import gc
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from parity_cells import master_of, whole
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dzero import (
    AdamW,
    CheckpointConfig,
    Checkpointer,
    OffloadConfig,
    PrecisionConfig,
    Sharded,
    ZeroConfig,
    describe,
    make_mesh,
    parallelize,
    shard,
)
from dzero.mesh import data_rank_of
from dzero.models.config import LlamaShape
from dzero.models.hf import HFDecoder
from dzero.models.llama import Llama
from dzero.models.meta_init import MetaInitializer
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig
from dzero.parallel.tensor.parallelize import TensorParallel, parallelize_tensor
from dzero.zero.dtensors import local_of

STEPS, LR, CLIP = 20, 3e-3, 0.5
SHAPE = LlamaShape(vocab_size=64, hidden_size=32, layers=2, heads=4, kv_heads=4, ffn_size=48)
WIDE = LlamaShape(vocab_size=512, hidden_size=128, layers=3, heads=4, kv_heads=4, ffn_size=256)


BATCH = (2, 13)
Made = tuple[Sharded, AdamW, TensorParallel | None]


@dataclass(frozen=True, kw_only=True)
class Run:
    """`dp` x `tp` ranks; `replicate` copies, of stages 1 to 3. offload: of gradients, masters and moments."""

    dp: int
    tp: int
    stage: int
    microbatches: int = 1
    replicate: int = 1
    optimizer_shard_axes: tuple[str, ...] = ("shard",)
    offload: str = "device"
    recompute: str = "none"
    tied: bool = False
    wide: bool = False
    gpt2: bool = False
    steps: int = STEPS
    node_ranks: int | None = None
    precision: dict[str, Any] = field(default_factory=lambda: {"param": "fp32"})

    @property
    def ranks(self) -> int:
        return self.dp * self.tp


def model_of(run: Run) -> nn.Module:
    if run.gpt2:
        return gpt2(wide=run.wide)
    with torch.device("meta"):
        return Llama(replace(WIDE if run.wide else SHAPE, tied=run.tied))


def build(run: Run) -> Made:
    model = model_of(run)
    fill: Any = MetaInitializer(model, seed=0, device="cpu")
    mesh = make_mesh("cpu", replicate=run.dp if run.stage == 0 else run.replicate, tp=run.tp)
    cut = parallelize(model, mesh)
    apply_blocks(model, BlockConfig(activation_checkpoint=run.recompute), "cpu")
    sharded = shard(
        cut,
        ZeroConfig(stage=run.stage, optimizer_shard_axes=[*run.optimizer_shard_axes], node_ranks=run.node_ranks),
        precision=PrecisionConfig(**run.precision),
        offload=OffloadConfig(grad=run.offload, master=run.offload, moments=run.offload),
        microbatches=run.microbatches,
        init=fill,
    )
    return sharded, AdamW(sharded, lr=LR, max_norm=CLIP), cut.tensor


def batches(steps: int, ranks: int, microbatches: int) -> list[list[list[Tensor]]]:
    """`[step][rank][microbatch]`: int64 [2, 13]."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(SHAPE.vocab_size, (steps, ranks, microbatches, *BATCH), generator=generator)
    return [[list(of_rank) for of_rank in of_step] for of_step in drawn]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def cut_logits(tensor: TensorParallel | None) -> AbstractContextManager[None]:
    return nullcontext() if tensor is None else tensor.loss()


def steps_of(run: Run, made: Made, steps: int) -> tuple[list[float], list[float]]:
    """This rank's losses, and the norms."""
    sharded, optim, _ = made
    losses, norms = [], []
    own = data_rank_of(sharded.mesh)
    for of_step in batches(STEPS, run.dp, run.microbatches)[:steps]:
        losses.append(one_step(run, made, of_step[own]))
        assert optim.last_decision is not None
        norms.append(optim.last_decision.norm)
    return losses, norms


def one_step(run: Run, made: Made, microbatches: list[Tensor]) -> float:
    """The mean loss of this rank."""
    sharded, optim, tensor = made
    total = 0.0
    for index, batch in enumerate(microbatches):
        with sharded.microbatch(is_last=index == run.microbatches - 1), cut_logits(tensor):
            loss = loss_of(sharded.model, batch) / run.microbatches
            loss.backward()  # type: ignore[no-untyped-call]
        total += float(local_of(loss.detach()))
        del loss
    optim.step()
    return total


def trained(rank: int, ranks: int, run: Run) -> dict[str, Any]:
    """Losses of this rank, norms, and whole parameters after the steps."""
    made = build(run)
    losses, norms = steps_of(run, made, run.steps)
    made[1].synchronize()
    params = {name: whole(param).clone() for name, param in made[0].named_params().items()}
    return {"losses": losses, "norms": norms, "params": params if rank == 0 else None}


@cache
def oracle(dp: int, microbatches: int, tied: bool, gpt2: bool = False, *, steps: int = STEPS) -> reference.History:
    """In one process, with plain tensors."""

    def fresh() -> nn.Module:
        model = model_of(Run(dp=1, tp=1, stage=0, tied=tied, gpt2=gpt2))
        MetaInitializer(model, seed=0, device="cpu")(model)
        return model

    return reference.train(fresh, batches(STEPS, dp, microbatches)[:steps], loss_of, lrs=[LR] * steps, clip=CLIP)


def saved(rank: int, ranks: int, run: Run, folder: Path) -> dict[str, Tensor]:
    """Train a little, save; whole parameters and states by name."""
    made = build(run)
    steps_of(run, made, 2)
    with Checkpointer(CheckpointConfig(folder=str(folder), every=1), made[0], made[1]) as checkpoints:
        checkpoints.save(2, {"model": describe(model_of(run))})
        checkpoints.finish()
    return states(*made[:2])


def loaded(rank: int, ranks: int, run: Run, folder: Path) -> dict[str, Tensor]:
    made = build(run)
    with Checkpointer(CheckpointConfig(folder=str(folder), every=1), made[0], made[1]) as checkpoints:
        checkpoints.resume("auto")
    return states(*made[:2])


def states(sharded: Sharded, optim: AdamW) -> dict[str, Tensor]:
    found = {}
    for name, param in sharded.named_params().items():
        of_param = optim.state[param]
        found |= {f"param {name}": whole(param).clone(), f"master {name}": master_of(param, of_param).clone()}
        found |= {f"{key} {name}": whole(of_param[key]).clone() for key in ("exp_avg", "exp_avg_sq", "step")}
    fused = ("attn.c_attn.weight", "attn.c_attn.bias")  # of GPT-2, whose ranks of tp view it otherwise
    return {
        key: each.flatten(-2) if key.endswith(fused) and key[:4] != "step" and each.shape[-2:-1] == (3,) else each
        for key, each in found.items()
    }


def gpt2(*, wide: bool = False) -> HFDecoder:
    """A small one of transformers, on meta."""
    import transformers

    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    sizes |= {"vocab_size": 512, "n_embd": 128, "n_layer": 3} if wide else {}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with torch.device("meta"):
        return HFDecoder(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def hf_model(kind: str) -> HFDecoder:
    """A small model of transformers, with values, the same on every rank."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.AutoConfig.for_model(kind, **sizes, **heads, head_dim=8)
    torch.manual_seed(3)
    return HFDecoder(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def hf_trained(rank: int, ranks: int, kind: str, stage: int) -> tuple[list[float], dict[str, Tensor] | None]:
    """Two ranks of tp for each of the others; losses of this rank, and whole parameters."""
    run = Run(dp=ranks // 2, tp=2, stage=stage)
    model = hf_model(kind)
    mesh = make_mesh("cpu", replicate=run.dp if stage == 0 else 1, tp=2)
    tensor = parallelize_tensor(model, mesh["tp"])
    sharded = shard(model, ZeroConfig(stage=stage), precision=PrecisionConfig(**run.precision), mesh=mesh)
    optim = AdamW(sharded, lr=LR, max_norm=CLIP)
    losses, _ = steps_of(run, (sharded, optim, tensor), 5)
    params = {name: whole(param).clone() for name, param in sharded.named_params().items()}
    return losses, params if rank == 0 else None


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Mlp(nn.Module):
    """Of its own kind: x [batch, 8] -> the same, a norm between a widening and a narrowing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.RMSNorm(8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x).unflatten(-1, (-1, 8))
        out: Tensor = self.down(self.norm(wide).flatten(-2))
        return out


def misled(rank: int, ranks: int) -> str:
    """The norm sees a part of what the widening made, and the plan's author says that it does not."""
    torch.manual_seed(0)
    model, mesh = Mlp(), make_mesh("cpu", tp=2)
    parallelize_tensor(model, mesh["tp"], PLAN, alike=["norm.*"])
    sharded = shard(model, ZeroConfig(), precision=PrecisionConfig(param="fp32"), mesh=mesh)
    optim = AdamW(sharded)
    sharded.model(torch.randn(4, 8)).square().sum().backward()
    with pytest.raises(RuntimeError) as told:
        optim.step()
    return str(told.value)


def of_its_own(rank: int, ranks: int) -> dict[str, Tensor]:
    """A model that every rank draws by itself, as sharded; its parameters and buffers whole."""
    torch.manual_seed(rank)
    model, mesh = Mlp(), make_mesh("cpu", tp=2)
    model.shift = nn.Parameter(torch.rand(2))
    model.register_buffer("scale", torch.rand(3))
    parallelize_tensor(model, mesh["tp"], PLAN, alike=["norm.*", "shift"])
    sharded = shard(model, ZeroConfig(), precision=PrecisionConfig(param="fp32"), mesh=mesh)
    return {name: whole(param) for name, param in sharded.named_params().items()} | dict(sharded.model.named_buffers())


def without_its_mesh(rank: int, ranks: int) -> str:
    model = Mlp()
    parallelize_tensor(model, make_mesh("cpu", tp=2)["tp"], PLAN, alike=["*"])
    with pytest.raises(ValueError, match="tp") as told:
        shard(model, ZeroConfig(), mesh=make_mesh("cpu", shard=2))
    return str(told.value)


def hf_oracle(kind: str, dp: int) -> reference.History:
    return reference.train(lambda: hf_model(kind), batches(STEPS, dp, 1)[:5], loss_of, lrs=[LR] * 5, clip=CLIP)


def kept_whole(rank: int, ranks: int) -> int:
    """Of a model with values: parameters that are whole and still alive once it is cut."""
    model = Mlp()
    whole = [weakref.ref(model.up.weight), weakref.ref(model.down.weight)]
    tensor = parallelize_tensor(model, make_mesh("cpu", tp=2)["tp"], PLAN, alike=["norm.*"])
    gc.collect()
    assert tensor.loss() is not None
    return sum(each() is not None for each in whole)
