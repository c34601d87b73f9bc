"""`dzero.weights`: whole tensors on every rank, those of `save_pretrained`, with no effect on training."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import own_models
import pytest
import torch
import torch.distributed as dist
from live_tensors import live_bytes, live_tensors
from pool import Pool
from small_mixtures import mixture
from test_export_hf import VOCAB, model_of, tensors, tokens
from torch import Tensor, nn
from training_loops import snapshot, unequal

import dzero

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

HOST = {"grad": "host", "master": "host", "moments": "host"}
ON_DISK = dict.fromkeys(("param", *HOST), "disk")


def cut(model: nn.Module, how: dict[str, Any], folder: Path) -> dzero.Sharded:
    """Shard a model with the settings of a case, of which some are states on tiers."""
    tiers = dict(how.get("offload", {}))
    if "disk" in tiers.values():
        tiers["disk"] = dzero.DiskConfig(paths=[str(folder)])
    return dzero.shard(model, **how | {"offload": dzero.OffloadConfig(**tiers)})


def adapted(**sizes: int) -> nn.Module:
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: nn.Module = peft.get_peft_model(model_of("llama", **sizes), settings)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(param)
    return model


def own(**degrees: int) -> Any:
    """The project's llama, cut along tp or pp."""
    return dzero.parallelize(own_models.llama(VOCAB + 3), dzero.make_mesh("cpu", **degrees))


def own_mixture(ranks: int) -> Any:
    """The project's Mixtral, whose experts the ranks share."""
    return dzero.parallelize(own_models.mixture(VOCAB), dzero.make_mesh("cpu"), dzero.ParallelConfig(ep=ranks))


MODELS: dict[str, Callable[[int], Any]] = {
    "llama": lambda ranks: model_of("llama"),
    "gpt2, tied": lambda ranks: model_of("gpt2"),
    "mixtral": lambda ranks: mixture("mixtral"),
    "adapters": lambda ranks: adapted(),
    "adapters, wide": lambda ranks: adapted(hidden_size=64),
    "own mixture, ep": own_mixture,
    "own, pp": lambda ranks: own(pp=2),
    "own, tp, dp": lambda ranks: own(tp=2, shard=2),
}


def got(rank: int, ranks: int, model: str, folder: Path, how: dict[str, Any]) -> dict[str, Tensor]:
    """Return what every rank is given, after it has seen the same in files."""
    torch.manual_seed(0)
    merge = how.pop("merge", True)
    sharded = cut(MODELS[model](ranks), how, folder.parent)
    found = dict(dzero.weights(sharded, merge=merge))
    dzero.save_pretrained(sharded, folder, merge=merge and "adapters" in model, shard_bytes=20_000)
    dist.barrier()
    assert unequal(tensors(folder), found) == []
    assert all(value.is_contiguous() and not value.requires_grad for value in found.values())
    storages = [value.untyped_storage().data_ptr() for value in found.values() if value.numel()]
    assert len({*storages}) == len(storages) or "mix" in model
    return found


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, {"stage": 0, "precision": "fp32"}),
    ("llama", 2, {"stage": 3, "precision": "bf16", "offload": HOST | {"param": "host"}}),
    ("gpt2, tied", 2, {"stage": 3, "precision": "fp32", "offload": ON_DISK}),
    ("adapters", 2, {"stage": 3, "precision": "bf16"}),
    ("mixtral", 2, {"stage": 3, "precision": "bf16"}),
    ("adapters, wide", 2, {"stage": 2, "precision": dzero.PrecisionConfig(frozen="int8")}),
    ("adapters", 2, {"stage": 3, "merge": False}),
    ("own mixture, ep", 2, {"stage": 3}),
    ("own, pp", 2, {"stage": 1}),
    ("own, tp, dp", 4, {"stage": 3}),
]


@pytest.mark.product(keep=3)
@pytest.mark.parametrize(("model", "ranks", "how"), CASES, ids=lambda value: str(value))
def test_every_rank_gets_what_save_pretrained_writes(
    pool: Pool, tmp_path: Path, model: str, ranks: int, how: dict[str, Any]
) -> None:
    first, *others = pool.run(got, ranks, model, tmp_path / "out", how)
    assert all(unequal(first, other) == [] for other in others)
    assert all(".lora_" in name for name in first) == (how.get("merge") is False)


def trained(rank: int, cell: dict[str, Any], folder: Path, *, takes: bool) -> dict[str, Tensor]:
    """All states after three steps, before each of which some or all weights may be taken and spoilt."""
    sharded = cut(model_of("gpt2"), cell, folder)
    optim, seen = dzero.AdamW(sharded, lr=1e-2), list[dict[str, Tensor]]()
    for step in range(3):
        sharded.model(tokens() + rank, labels=tokens()).loss.backward()
        optim.step()
        optim.synchronize()  # also sends what overlap=delayed holds back, as weights() does
        if takes:
            seen.append({name: tensor.clone() for name, tensor in dzero.weights(sharded)})
            for index, (_, tensor) in enumerate(dzero.weights(sharded)):
                tensor.fill_(7.0)
                if index == 2 + step:
                    break
    if takes:
        assert all(unequal(a, b) != [] for a, b in pairwise(seen))
        dzero.save_pretrained(sharded, folder / "saved")
        dist.barrier()
        assert unequal(tensors(folder / "saved"), seen[-1]) == []
    return snapshot(sharded, optim)


def with_and_without(rank: int, ranks: int, cell: dict[str, Any], folder: Path) -> list[str]:
    return unequal(*(trained(rank, cell, folder, takes=takes) for takes in (False, True)))


CELLS: list[dict[str, Any]] = [
    {"stage": 3, "precision": "bf16", "offload": HOST | {"overlap": "delayed", "delay_warmup_steps": 1}},
    {"stage": 0, "precision": "bf16"},
    {"stage": 2, "precision": "fp32", "offload": HOST},
    {"stage": 3, "precision": "bf16", "offload": ON_DISK},
]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_training_goes_on_with_the_same_bits_whatever_is_done_to_the_tensors(
    pool: Pool, tmp_path: Path, cell: dict[str, Any]
) -> None:
    assert pool.run(with_and_without, 2, cell, tmp_path) == [[], []]


def peak(rank: int, ranks: int, kind: str) -> tuple[int, int, int]:
    """The most bytes of tensors that an iteration adds, at any transfer, and those of the largest tensor and unit."""
    sharded = dzero.shard(MODELS[kind](ranks), stage=3, precision="fp32")
    each = dzero.weights(sharded)
    gc.collect()
    others = live_tensors()  # kept, so that none of them goes while this counts
    before, held, largest = live_bytes(), [], 0
    broadcast = dist.broadcast

    def measured(*args: Any) -> None:
        held.append(live_bytes() - before)
        broadcast(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", measured)
        for _, tensor in each:
            largest = max(largest, tensor.nbytes)
    units = [sum(param.elems for param in unit.params) * 4 for unit in sharded.shapes]
    known = {each.untyped_storage().data_ptr() for each in others}
    until_s = time.monotonic() + 10  # gloo's thread may hold a tensor a moment longer than its collective
    while live_bytes() - before > tensor.nbytes and time.monotonic() < until_s:
        gc.collect()
    new = [tuple(each.shape) for each in live_tensors() if each.untyped_storage().data_ptr() not in known]
    assert live_bytes() - before <= tensor.nbytes, f"more than the last one is left: {new}"
    del others
    return max(held), largest, max(units)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_memory_is_bounded_by_a_unit(pool: Pool, kind: str) -> None:
    for used, largest, unit in pool.run(peak, 2, kind):
        assert largest <= used <= unit


def told(call: Callable[[], object]) -> str:
    """What is said of a call that is refused."""
    with pytest.raises((RuntimeError, ValueError)) as refused:
        call()
    return str(refused.value)


def refusals(rank: int, ranks: int, folder: Path) -> list[str]:
    sharded = dzero.shard(model_of("llama"), stage=3)
    optim, each = dzero.AdamW(sharded), dzero.weights(sharded)
    next(each)
    sharded.model(tokens(), labels=tokens()).loss.backward()
    optim.step()
    changed, each = told(lambda: next(each)), dzero.weights(sharded)
    next(each)
    sharded.park()
    parked = [told(lambda: next(each)), told(lambda: dzero.weights(sharded))]
    parked.append(told(lambda: dzero.save_pretrained(sharded, folder / "saved")))
    sharded.unpark()
    model = adapted()
    model.peft_config["default"].init_lora_weights = "pissa"
    return [changed, *parked, told(lambda: dzero.weights(dzero.shard(model), merge=False))]


def test_what_cannot_be_right_is_refused(pool: Pool, tmp_path: Path) -> None:
    for changed, *parked, unsaved in pool.run(refusals, 2, tmp_path):
        assert changed.startswith("weights changed since weights() was called")
        assert all("call sharded.unpark() first" in each for each in parked)
        assert "init_lora_weights='pissa' changed the model's own weights" in unsaved
    assert [*tmp_path.iterdir()] == []


def on_some_ranks(rank: int, ranks: int) -> str:
    mesh = dist.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    if rank == 2:
        return ""
    sharded = dzero.shard(model_of("llama"), stage=3, mesh=dzero.take_mesh(mesh, {"shard": "dp"}))
    return told(lambda: dzero.weights(sharded))


def test_a_model_on_some_of_the_ranks_is_refused(pool: Pool) -> None:
    for said in pool.run(on_some_ranks, 3)[:2]:
        assert said.startswith("weights() of a model on 2 of the 3 ranks of the process group")


def plain(rank: int, ranks: int) -> list[list[str]]:
    """What differs from the whole parameters of a model that is nobody's, as it is and compiled as a whole."""
    torch.manual_seed(0)
    found = []
    for wrap in (lambda model: model, partial(torch.compile, backend="eager")):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        want = {name: value.clone() for name, value in model.state_dict().items()}
        sharded: Any = dzero.shard(wrap(model), stage=3, precision="fp32")
        found.append(unequal(want, dict(dzero.weights(sharded))))
    return found


def test_a_model_of_ones_own_has_its_own_names(pool: Pool) -> None:
    assert pool.run(plain, 2) == [[[], []]] * 2


def merging(rank: int, ranks: int) -> list[int]:
    """Sizes of the merged weights that are still there when the next one is merged."""
    sharded, last, kept = dzero.shard(adapted(), stage=3), list[weakref.ref[Tensor]](), list[int]()
    merge = peft.tuners.lora.Linear.merge

    def measured(layer: Any, **options: Any) -> None:
        if layer.base_layer.weight.is_meta:  # a trial, without values
            merge(layer, **options)
            return
        kept.extend(each.nbytes for of in last if (each := of()) is not None)
        merge(layer, **options)
        last.append(weakref.ref(layer.base_layer.weight))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.tuners.lora.Linear, "merge", measured)
        for _, tensor in dzero.weights(sharded):
            del tensor
    assert len(last) == 4
    return kept


def test_one_merged_weight_is_held_at_a_time(pool: Pool) -> None:
    assert pool.run(merging, 2) == [[], []]
