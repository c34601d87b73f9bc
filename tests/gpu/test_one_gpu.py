"""One CUDA device, a group of one rank: streams, compiled flat_update, checkpointing. Run with `pytest -m gpu`."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import decoders
import pytest
import small_decoders
import torch
import torch.distributed as dist
from parity_cells import master_of, whole
from pool_worker import forget_meshes
from torch import nn

from dzero import (
    AdamW,
    CheckpointConfig,
    Checkpointer,
    DiskConfig,
    OffloadConfig,
    PrecisionConfig,
    ZeroConfig,
    make_mesh,
    shard,
    tile,
    weights,
)

pytestmark = pytest.mark.gpu
STEPS = 10
STATES = ("param", "grad", "master", "moments")


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: `pytest -m gpu` asks for one")
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{tmp_path}/rendezvous",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", 0),
    )
    yield
    dist.destroy_process_group()
    forget_meshes()


def train(
    device_type: str,
    stage: int,
    *,
    precision: PrecisionConfig,
    microbatches: int = 1,
    reduction: str = "auto",
    offload: OffloadConfig | None = None,
    keep: str = "none",
    samples: int = 2,
    net: str = "uneven",
    unit_bytes: int | None = None,
    embedding_tiles: int = 1,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Masters on the CPU and norms after STEPS steps of a small net; delays before an offload's actions."""
    model = small_decoders.build(net)
    if embedding_tiles > 1:
        tile(model.embed, embedding_tiles)
    decoders.in_blocks(model, device=device_type, activation_checkpoint=keep, compile=False)
    sharded = shard(
        model,
        ZeroConfig(stage=stage, reduction=reduction, unit_bytes=unit_bytes),
        precision=precision,
        offload=offload,
        mesh=make_mesh(device_type, replicate=1),
        microbatches=microbatches,
    )
    optim, norms = AdamW(sharded, lr=3e-3, max_norm=0.5), []
    chance = random.Random(0)
    optim.offload.executor.before = lambda _: time.sleep(chance.choice([0.0, 0.001, 0.01]))
    for of_step in small_decoders.batches(net, steps=STEPS, ranks=1, microbatches=microbatches, samples=samples):
        for index, batch in enumerate(of_step[0]):
            with sharded.microbatch(is_last=index == microbatches - 1):
                loss = small_decoders.loss_fn(sharded.model, batch.to(device_type)) / microbatches
                optim.scale_loss(loss).backward()
        optim.step()
        assert optim.last_decision is not None
        norms.append(optim.last_decision.norm)
    optim.synchronize()
    assert optim.offload.memory_pool.pinned == bool(optim.offload.schedule.slots)
    masters = {name: master_of(p, optim.state[p]) for name, p in sharded.named_params().items()}
    return {name: whole(master).cpu() for name, master in masters.items()}, norms


@pytest.mark.parametrize("param", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_stages_and_reductions_agree_to_the_bit_on_one_gpu(param: str, microbatches: int) -> None:
    precision = PrecisionConfig(param=param)
    first, norms = train("cuda", 0, precision=precision, microbatches=microbatches)
    for stage, reduction in ((1, "native"), (2, "native"), (3, "native"), (3, "exact")):
        other, other_norms = train("cuda", stage, precision=precision, microbatches=microbatches, reduction=reduction)
        assert other_norms == norms
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.filterwarnings("ignore:zero.unit_bytes")
@pytest.mark.parametrize("microbatches", [1, 4])
def test_parts_of_units_agree_to_the_bit_on_one_gpu(microbatches: int) -> None:
    how = {"precision": PrecisionConfig(param="bf16"), "microbatches": microbatches}
    first, norms = train("cuda", 3, **how)
    parts, norms_of_parts = train("cuda", 3, unit_bytes=1, **how)
    assert norms_of_parts == norms
    assert all(torch.equal(first[name], parts[name]) for name in first)


def test_an_embedding_in_tiles_trains_as_a_whole_one_on_one_gpu() -> None:
    how = {"precision": PrecisionConfig(param="fp32")}
    first, norms = train("cuda", 3, **how)
    tiled, norms_in_tiles = train("cuda", 3, embedding_tiles=3, **how)
    assert norms_in_tiles == pytest.approx(norms, rel=1e-6)
    rows = torch.cat([tiled.pop(name) for name in [*tiled] if name.startswith("embed.")])
    for name, value in first.items():
        torch.testing.assert_close(tiled.get(name, rows), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compute", ["fp8_tensorwise", "fp8_rowwise"])
def test_products_in_8_bits_agree_at_every_stage_and_follow_their_emulation(compute: str) -> None:
    if torch.cuda.get_device_capability() < ((8, 9) if torch.version.hip is None else (9, 4)):
        pytest.skip("this GPU has no units for 8-bit floats")
    precision = PrecisionConfig(compute=compute)
    first, norms = train("cuda", 0, precision=precision, net="even", samples=4)
    for stage in (1, 2, 3):
        other, other_norms = train("cuda", stage, precision=precision, net="even", samples=4)
        assert other_norms == norms
        assert all(torch.equal(first[name], other[name]) for name in first)
    _, emulated = train("cpu", 0, precision=precision, net="even", samples=4)
    assert norms == pytest.approx(emulated, rel=5e-2)


@pytest.mark.parametrize("param", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_overlap_modes_agree_to_the_bit_and_follow_the_resident_run(param: str, microbatches: int, stage: int) -> None:
    precision = PrecisionConfig(param=param)

    def run(overlap: str, **tiers: str) -> tuple[dict[str, torch.Tensor], list[float]]:
        offload = OffloadConfig(master="host", moments="host", overlap=overlap, **tiers)  # type: ignore[arg-type]
        return train("cuda", stage, precision=precision, microbatches=microbatches, offload=offload)

    first, norms = run("step", grad="host")
    modes = [("forward", "host", "device"), ("backward", "host", "device"), ("forward", "device", "device")]
    if stage == 3:
        modes += [("step", "host", "host"), ("forward", "host", "host"), ("backward", "host", "host")]
    for overlap, grad, kept in modes:
        other, other_norms = run(overlap, grad=grad, param=kept)
        assert other_norms == pytest.approx(norms, rel=1e-12)  # sums of squares on the host or on the device
        if grad == "host":
            assert all(torch.equal(first[name], other[name]) for name in first)
    resident, resident_norms = train("cuda", stage, precision=precision, microbatches=microbatches)
    assert norms == pytest.approx(resident_norms, rel=1e-2)
    for name, master in resident.items():
        torch.testing.assert_close(first[name], master, rtol=0, atol=2e-3)


@pytest.mark.parametrize("param", ["bf16", "fp16"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_states_on_disk_give_the_bits_of_states_on_the_host(tmp_path: Path, param: str, microbatches: int) -> None:
    precision = PrecisionConfig(param=param)
    states = tmp_path / "states"
    states.mkdir()
    disk = DiskConfig(paths=[str(states)], block_bytes=8192)

    def run(tier: str, overlap: str) -> tuple[dict[str, torch.Tensor], list[float]]:
        more = {"disk": disk} if tier == "disk" else {}
        offload = OffloadConfig(**dict.fromkeys(STATES, tier), overlap=overlap, **more)  # type: ignore[arg-type]
        return train("cuda", 3, precision=precision, microbatches=microbatches, offload=offload)

    first, norms = run("host", "step")
    for overlap in ("step", "forward", "backward"):
        other, other_norms = run("disk", overlap)
        assert other_norms == norms
        assert all(torch.equal(first[name], other[name]) for name in first)
    gc.collect()  # an optimizer is part of a cycle, and its folder goes with it
    assert list(states.iterdir()) == []


@pytest.mark.parametrize("overlap", ["step", "forward", "delayed"])
def test_a_run_resumed_with_states_on_the_host_has_the_bits_of_one_never_stopped(tmp_path: Path, overlap: str) -> None:
    warmup = {"delay_warmup_steps": 1} if overlap == "delayed" else {}
    offload = OffloadConfig(grad="host", master="host", moments="host", overlap=overlap, **warmup)
    drawn = small_decoders.batches("uneven", steps=STEPS, ranks=1, microbatches=2)

    def run(first: int, last: int, folder: Path, which: str | None) -> dict[str, torch.Tensor]:
        """Steps [first, last) from a checkpoint, and one at their end; masters on the CPU."""
        sharded = shard(small_decoders.build("uneven"), ZeroConfig(stage=3), offload=offload, microbatches=2)
        optim = AdamW(sharded, lr=3e-3, max_norm=0.5)
        with Checkpointer(CheckpointConfig(every=1, folder=str(folder)), sharded, optim) as checkpoints:
            if which is not None:
                assert checkpoints.resume(which) is not None
            for of_step in drawn[first:last]:
                for index, batch in enumerate(of_step[0]):
                    with sharded.microbatch(is_last=index == 1):
                        (small_decoders.loss_fn(sharded.model, batch.cuda()) / 2).backward()
                optim.step()
            checkpoints.save(last, {})
            checkpoints.finish()
        optim.synchronize()
        return {name: whole(master_of(p, optim.state[p])).cpu() for name, p in sharded.named_params().items()}

    never_stopped = run(0, STEPS, tmp_path / "whole", None)
    run(0, STEPS // 2, tmp_path / "cut", None)
    resumed = run(STEPS // 2, STEPS, tmp_path / "cut", "auto")
    assert [name for name, want in never_stopped.items() if not torch.equal(want, resumed[name])] == []


def test_parameters_on_the_host_leave_the_gpu_and_come_back_through_state_dicts() -> None:
    layers, width = 8, 1024
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    everything = OffloadConfig(param="host", grad="host", master="host", moments="host")
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sharded = shard(model, ZeroConfig(stage=3), offload=everything, mesh=make_mesh("cuda"))
    optim = AdamW(sharded, lr=1e-4)
    assert torch.cuda.memory_allocated() - before < 2 * width * width  # less than one layer of bf16
    batch = torch.randn(16, width, device="cuda", dtype=torch.bfloat16)

    def step() -> float:
        loss = sharded.model(batch).float().square().mean()
        loss.backward()
        optim.step()
        return float(loss)

    first = step()
    start = {name: value.clone() for name, value in sharded.model.state_dict().items()}
    assert all(value.device.type == "cpu" for value in start.values())
    second = [step() for _ in range(3)]
    assert second[-1] < first
    sharded.model.load_state_dict(start)
    assert all(torch.equal(whole(start[n]), whole(p).cpu()) for n, p in sharded.named_params().items())
    with torch.no_grad():
        again = float(sharded.model(batch).float().square().mean())
    assert again == second[0]
    # A layer gathered and its gradient, one layer that comes ahead, activations: not eight layers.
    assert torch.cuda.max_memory_allocated() - before < layers * 2 * width * width
    optim.synchronize()


@pytest.mark.parametrize("tiers", [{}, {"grad": "host", "master": "host", "moments": "host"}], ids=["alone", "with"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_activations_on_the_host_change_no_bit(stage: int, microbatches: int, tiers: dict[str, str]) -> None:
    def run(activations: str) -> tuple[dict[str, torch.Tensor], list[float]]:
        offload = OffloadConfig(activations=activations, **tiers)  # type: ignore[arg-type]
        how = {"precision": PrecisionConfig(), "microbatches": microbatches, "samples": 16}
        return train("cuda", stage, offload=offload, keep="full", **how)  # type: ignore[arg-type]

    resident, norms = run("device")
    hosted, hosted_norms = run("host")
    assert hosted_norms == norms
    assert all(torch.equal(resident[name], hosted[name]) for name in resident)


@pytest.mark.parametrize("slow", ["EVICT", "FETCH"])
def test_inputs_free_their_device_memory_and_come_back_whole(slow: str) -> None:
    """8 blocks whose inputs have 16 MiB each; the recomputed work of a block needs no more than some of them."""
    layers, rows, width = 8, 8192, 1024
    block_bytes = rows * width * 2

    def run(activations: str) -> tuple[int, torch.Tensor]:
        gc.collect()  # of the run before nothing is left that could go while this one counts
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
        decoders.in_blocks(model, device="cuda", activation_checkpoint="full", compile=False)
        offload = OffloadConfig(activations=activations)
        sharded = shard(model, ZeroConfig(stage=3), offload=offload, mesh=make_mesh("cuda"), microbatches=1)
        optim = AdamW(sharded)
        optim.offload.executor.before = lambda key: time.sleep(0.01 if key.kind == slow else 0.0)
        for block in model:  # every copy has ended when the next block begins
            block.register_forward_pre_hook(lambda *_: optim.synchronize())
        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3):
            x.grad = None
            loss = sharded.model(x).float().square().mean()
            kept_bytes = torch.cuda.memory_allocated() - before
            loss.backward()  # type: ignore[no-untyped-call]
            optim.step()
        assert x.grad is not None
        return kept_bytes, x.grad.clone()

    resident_bytes, want = run("device")
    torch.cuda.empty_cache()
    hosted_bytes, got = run("host")
    assert torch.equal(want, got)
    assert resident_bytes - hosted_bytes >= (layers - 2) * block_bytes  # the newest stays, and x is the test's own


def test_gpu_follows_the_cpu_in_fp32() -> None:
    precision = PrecisionConfig(param="fp32")
    ours, norms = train("cuda", 3, precision=precision)
    cpu, cpu_norms = train("cpu", 3, precision=precision)
    # Other matrix kernels, other order of additions: 10 steps of AdamW at lr 3e-3 amplify 1e-6 to some 1e-4.
    assert norms == pytest.approx(cpu_norms, rel=1e-3)
    for name, master in cpu.items():
        torch.testing.assert_close(ours[name], master, rtol=0, atol=2e-3)


def test_remainder_masters_equal_fp32_masters_to_the_bit() -> None:
    plain, norms = train("cuda", 3, precision=PrecisionConfig())
    remainder, other_norms = train("cuda", 3, precision=PrecisionConfig(master="remainder"))
    assert norms == other_norms
    assert all(torch.equal(plain[name], remainder[name]) for name in plain)


def test_overflow_skips_and_names_the_parameter() -> None:
    sharded = shard(small_decoders.build("even"), ZeroConfig(stage=3), mesh=make_mesh("cuda"))
    optim = AdamW(sharded)
    before = {name: whole(p).clone() for name, p in sharded.named_params().items()}
    batch = small_decoders.batches("even", steps=1, ranks=1, microbatches=1)[0][0][0].cuda()
    (small_decoders.loss_fn(sharded.model, batch) * float("inf")).backward()
    optim.step()
    assert optim.last_decision is not None
    assert not optim.last_decision.finite
    assert optim.last_decision.nonfinite_params
    assert all(torch.equal(before[name], whole(p)) for name, p in sharded.named_params().items())


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_parked_states_leave_the_gpu_and_training_goes_on(tmp_path: Path, where: str, moments: str) -> None:
    precision = PrecisionConfig(param="bf16", moments=moments)
    batches = small_decoders.batches("even", steps=4, ranks=1, microbatches=1)

    def run(*, parks: bool) -> dict[str, torch.Tensor]:
        sharded = shard(small_decoders.build("even"), ZeroConfig(stage=3), precision=precision)
        optim = AdamW(sharded, lr=3e-3)
        for of_step in batches:
            small_decoders.loss_fn(sharded.model, of_step[0][0].cuda()).backward()
            optim.step()
            if parks:
                sharded.park(where, str(tmp_path) if where == "disk" else None)  # drops tables of addresses too
                sharded.unpark()
                rest = sum(optim.state_bytes().values())
                before, allocated = requested_bytes(), torch.cuda.memory_allocated()
                freed = sharded.park(where, str(tmp_path) if where == "disk" else None)
                assert freed == rest == before - requested_bytes()
                assert allocated - torch.cuda.memory_allocated() >= freed
                assert sum(optim.state_bytes().values()) == 0
                sharded.unpark()
                assert requested_bytes() == before
        return {name: whole(master_of(p, optim.state[p])).cpu() for name, p in sharded.named_params().items()}

    want, got = run(parks=False), run(parks=True)
    assert [name for name in want if not torch.equal(want[name], got[name])] == []


def test_weights_come_on_the_gpu_in_the_dtype_of_training() -> None:
    sharded = shard(small_decoders.build("even"), ZeroConfig(stage=3), precision="bf16")
    want = {name: whole(param) for name, param in sharded.named_params().items()}
    got = dict(weights(sharded))
    assert got.keys() == want.keys()
    assert all(got[name].is_cuda and torch.equal(got[name], want[name]) for name in want)


def requested_bytes() -> int:
    """Bytes of all tensors on the device, as they were asked for."""
    gc.collect()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])
