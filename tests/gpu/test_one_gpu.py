"""One CUDA device, a group of one rank: streams, compiled flat_update, checkpointing. Run with `pytest -m gpu`."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decoders
import offload_lanes
import pytest
import recorded
import small_decoders
import torch
from recorded import Run, off
from torch import nn
from training_loops import masters_of, params_of, step, whole

from dzero import (
    AdamW,
    CheckpointConfig,
    Checkpointer,
    DiskConfig,
    OffloadConfig,
    Sharded,
    ZeroConfig,
    make_mesh,
    shard,
    tile,
    weights,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]
STEPS = 10
EVERYTHING = OffloadConfig(**off("host"))
STATES_ON_HOST = off("host", "grad", "master", "moments")
Trained = tuple[dict[str, torch.Tensor], list[float | None]]


def train(
    stage: int,
    *,
    device: str = "cuda",
    net: str = "uneven",
    microbatches: int = 1,
    samples: int = 2,
    zero: dict[str, Any] | None = None,
    offload: dict[str, Any] | None = None,
    change: Callable[[nn.Module], object] | None = None,
    **precision: Any,
) -> Trained:
    """Masters on the CPU and norms after STEPS steps of a small net; delays before an offload's actions."""
    given = {"precision": precision, "zero": zero or {}, "offload": offload or {}, "scale": {}}
    run, chance = Run(stage, net, 1, microbatches=microbatches, steps=STEPS, **given), random.Random(0)  # type: ignore[arg-type]
    sharded, optim = recorded.made(run, offload=OffloadConfig(**run.offload), device=device, change=change)
    offload_lanes.before(optim, lambda _: time.sleep(chance.choice([0.0, 0.001, 0.01])))
    drawn = small_decoders.batches(net, steps=STEPS, ranks=1, microbatches=microbatches, samples=samples)
    norms = [step(sharded, optim, of_step[0])[1] for of_step in drawn]
    optim.synchronize()
    assert optim.offload.memory_pool.pinned == bool(optim.offload.schedule.slots)
    return on_cpu(masters_of(sharded, optim)), norms


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def unlike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def follows(got: Trained, want: Trained, rel: float) -> None:
    """Where sums have another order, in rounded gradients: AdamW may turn 1e-6 of one near zero into a part of a step
    of lr=3e-3, and 10 steps have been seen to make 1e-4 of it."""
    assert got[1] == pytest.approx(want[1], rel=rel)
    for name, master in want[0].items():
        torch.testing.assert_close(got[0][name], master, rtol=0, atol=2e-3)


@pytest.mark.filterwarnings("ignore:zero.unit_bytes")
@pytest.mark.parametrize("param", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_stages_reductions_and_forms_agree_to_the_bit_on_one_gpu(param: str, microbatches: int) -> None:
    """Forms: units in parts, and masters as remainders of bf16."""
    rows: list[Any] = [(stage, {"reduction": "native"}, {}) for stage in (1, 2, 3)]
    rows += [(3, {"reduction": "exact"}, {}), (3, {"unit_bytes": 1}, {})]
    if param == "bf16":
        rows.append((3, {}, {"master": "remainder"}))
    first, norms = train(0, microbatches=microbatches, param=param)
    for stage, zero, form in rows:
        other, other_norms = train(stage, microbatches=microbatches, zero=zero, param=param, **form)
        assert other_norms == norms, (stage, zero, form)
        assert unlike(first, other) == [], (stage, zero, form)


def test_an_embedding_in_tiles_trains_as_a_whole_one_on_one_gpu() -> None:
    first, norms = train(3, param="fp32")
    tiled, norms_in_tiles = train(3, change=lambda model: tile(model.embed, 3), param="fp32")
    assert norms_in_tiles == pytest.approx(norms, rel=1e-6)
    rows = torch.cat([tiled.pop(name) for name in [*tiled] if name.startswith("embed.")])
    for name, value in first.items():
        torch.testing.assert_close(tiled.get(name, rows), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compute", ["fp8_tensorwise", "fp8_rowwise"])
def test_products_in_8_bits_agree_at_every_stage_and_follow_their_emulation(compute: str) -> None:
    if torch.cuda.get_device_capability() < ((8, 9) if torch.version.hip is None else (9, 4)):
        pytest.skip("this GPU has no units for 8-bit floats")
    first, norms = train(0, net="even", samples=4, compute=compute)
    for stage in (1, 2, 3):
        other, other_norms = train(stage, net="even", samples=4, compute=compute)
        assert other_norms == norms
        assert unlike(first, other) == []
    _, emulated = train(0, device="cpu", net="even", samples=4, compute=compute)
    assert norms == pytest.approx(emulated, rel=5e-2)


@pytest.mark.parametrize("param", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_overlap_modes_agree_to_the_bit_and_follow_the_resident_run(param: str, microbatches: int, stage: int) -> None:
    def run(**offload: str) -> Trained:
        return train(stage, microbatches=microbatches, offload=offload, param=param)

    states = {"master": "host", "moments": "host"}
    first, norms = run(**states, grad="host", overlap="step")
    modes = [("forward", "host", "device"), ("backward", "host", "device"), ("forward", "device", "device")]
    if stage == 3:
        modes += [("step", "host", "host"), ("forward", "host", "host"), ("backward", "host", "host")]
    for overlap, grad, kept in modes:
        other, other_norms = run(**states, overlap=overlap, grad=grad, param=kept)
        assert other_norms == pytest.approx(norms, rel=1e-12)  # sums of squares on the host or on the device
        if grad == "host":
            assert unlike(first, other) == []
    follows((first, norms), train(stage, microbatches=microbatches, param=param), rel=1e-2)


@pytest.mark.parametrize("param", ["bf16", "fp16"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_states_on_disk_give_the_bits_of_states_on_the_host(tmp_path: Path, param: str, microbatches: int) -> None:
    (states := tmp_path / "states").mkdir()
    on_disk = off("disk", disk=DiskConfig(paths=[str(states)], block_bytes=8192))
    first, norms = train(3, microbatches=microbatches, offload=off("host", overlap="step"), param=param)
    for overlap in ("step", "forward", "backward"):
        other, other_norms = train(3, microbatches=microbatches, offload=on_disk | {"overlap": overlap}, param=param)
        assert other_norms == norms
        assert unlike(first, other) == []
    gc.collect()  # an optimizer is part of a cycle, and its folder goes with it
    assert list(states.iterdir()) == []


@pytest.mark.parametrize("overlap", ["step", "forward", "delayed"])
def test_a_run_resumed_with_states_on_the_host_has_the_bits_of_one_never_stopped(tmp_path: Path, overlap: str) -> None:
    warmup = {"delay_warmup_steps": 1} if overlap == "delayed" else {}
    offload = STATES_ON_HOST | {"overlap": overlap} | warmup
    of_run = Run(3, "uneven", 1, microbatches=2, steps=STEPS, offload=offload)

    def run(first: int, last: int, folder: Path, which: str | None) -> dict[str, torch.Tensor]:
        """Steps [first, last) from a checkpoint, and one at their end; masters on the CPU."""
        sharded, optim = recorded.made(of_run, device="cuda")
        with Checkpointer(CheckpointConfig(every=1, folder=str(folder)), sharded, optim) as checkpoints:
            if which is not None:
                assert checkpoints.resume(which) is not None
            for of_step in recorded.batches_of(of_run)[first:last]:
                step(sharded, optim, of_step[0])
            checkpoints.save(last, {})
            checkpoints.finish()
        optim.synchronize()
        return on_cpu(masters_of(sharded, optim))

    never_stopped = run(0, STEPS, tmp_path / "whole", None)
    run(0, STEPS // 2, tmp_path / "cut", None)
    assert unlike(never_stopped, run(STEPS // 2, STEPS, tmp_path / "cut", "auto")) == []


def test_parameters_on_the_host_leave_the_gpu_and_come_back_through_state_dicts() -> None:
    layers, width = 8, 1024
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sharded = shard(model, ZeroConfig(stage=3), offload=EVERYTHING, mesh=make_mesh("cuda"))
    optim = AdamW(sharded, lr=1e-4)
    assert torch.cuda.memory_allocated() - before < 2 * width * width  # less than one layer of bf16
    batch = torch.randn(16, width, device="cuda", dtype=torch.bfloat16)

    def one_step() -> float:
        loss = sharded.model(batch).float().square().mean()
        loss.backward()
        optim.step()
        return float(loss)

    first = one_step()
    start = {name: value.clone() for name, value in sharded.model.state_dict().items()}
    assert all(value.device.type == "cpu" for value in start.values())
    second = [one_step() for _ in range(3)]
    assert second[-1] < first
    sharded.model.load_state_dict(start)
    assert unlike({name: whole(value) for name, value in start.items()}, on_cpu(params_of(sharded))) == []
    with torch.no_grad():
        again = float(sharded.model(batch).float().square().mean())
    assert again == second[0]
    # A layer gathered and its gradient, one layer that comes ahead, activations: not eight layers.
    assert torch.cuda.max_memory_allocated() - before < layers * 2 * width * width
    optim.synchronize()


def recompute(model: nn.Module) -> None:
    decoders.in_blocks(model, device="cuda", activation_checkpoint="full", compile=False)


@pytest.mark.parametrize("tiers", [{}, STATES_ON_HOST], ids=["alone", "with"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_activations_on_the_host_change_no_bit(stage: int, microbatches: int, tiers: dict[str, str]) -> None:
    (resident, norms), (hosted, hosted_norms) = (
        train(stage, microbatches=microbatches, samples=16, offload={**tiers, "activations": each}, change=recompute)
        for each in ("device", "host")
    )
    assert hosted_norms == norms
    assert unlike(resident, hosted) == []


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
        recompute(model)
        offload = OffloadConfig(activations=activations)
        sharded = shard(model, ZeroConfig(stage=3), offload=offload, mesh=make_mesh("cuda"), microbatches=1)
        optim = AdamW(sharded)
        offload_lanes.slow(optim, slow, seconds=0.01)
        for block in model:  # every copy has ended when the next block begins
            block.register_forward_pre_hook(lambda *_: optim.synchronize())
        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3):
            x.grad = None
            loss = sharded.model(x).float().square().mean()
            kept_bytes = torch.cuda.memory_allocated() - before
            loss.backward()
            optim.step()
        assert x.grad is not None
        return kept_bytes, x.grad.clone()

    resident_bytes, want = run("device")
    torch.cuda.empty_cache()
    hosted_bytes, got = run("host")
    assert torch.equal(want, got)
    assert resident_bytes - hosted_bytes >= (layers - 2) * block_bytes  # the newest stays, and x is the test's own


def test_gpu_follows_the_cpu_in_fp32() -> None:
    follows(train(3, param="fp32"), train(3, device="cpu", param="fp32"), rel=1e-3)  # other kernels of products


def test_overflow_skips_and_names_the_parameter() -> None:
    sharded, optim = recorded.made(Run(3, ranks=1), device="cuda")
    before = params_of(sharded)
    batch = small_decoders.batches("even", steps=1, ranks=1, microbatches=1)[0][0][0].cuda()
    (small_decoders.loss_fn(sharded.model, batch) * float("inf")).backward()
    optim.step()
    assert not optim.last_decision.finite
    assert optim.last_decision.nonfinite_params
    assert unlike(before, params_of(sharded)) == []


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_parked_states_leave_the_gpu_and_training_goes_on(tmp_path: Path, where: str, moments: str) -> None:
    run, folder = Run(3, ranks=1, steps=4, precision={"moments": moments}), str(tmp_path) if where == "disk" else None

    def masters(park: Callable[[Sharded, Any], None] | None) -> dict[str, torch.Tensor]:
        sharded, optim = recorded.made(run, device="cuda")
        for of_step in recorded.batches_of(run):
            step(sharded, optim, of_step[0])
            if park is not None:
                park(sharded, optim)
        return on_cpu(masters_of(sharded, optim))

    def twice(sharded: Sharded, optim: Any) -> None:
        sharded.park(where, folder)  # drops tables of addresses too
        sharded.unpark()
        rest = sum(optim.state_bytes().values())
        before, allocated = requested_bytes(), torch.cuda.memory_allocated()
        freed = sharded.park(where, folder)
        assert freed == rest == before - requested_bytes()
        assert allocated - torch.cuda.memory_allocated() >= freed
        assert sum(optim.state_bytes().values()) == 0
        sharded.unpark()
        assert requested_bytes() == before

    assert unlike(masters(None), masters(twice)) == []


def test_weights_come_on_the_gpu_in_the_dtype_of_training() -> None:
    sharded, _ = recorded.made(Run(3, ranks=1), device="cuda")
    got = dict(weights(sharded))
    assert unlike(params_of(sharded), got) == []
    assert all(each.is_cuda for each in got.values())


def requested_bytes() -> int:
    """Bytes of all tensors on the device, as they were asked for."""
    gc.collect()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])
