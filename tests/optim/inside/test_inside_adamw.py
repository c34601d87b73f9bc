"""The update's kernels for the CPU against plain torch operations: the same bits however they are cut, in few calls."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from adamw_cases import KINDS, Param, by_operations, coefficients, differences, params
from operator_calls import Calls
from pool import Pool
from sums_cases import DTYPES, LONG, SIZES, by_numpy, gradients, same_bits
from torch import nn

from dzero import AdamW, PrecisionConfig, ZeroConfig, shard
from dzero.optim import adamw, adamw_math, cpu_kernels
from dzero.optim import flat_update as update_module
from dzero.optim.flat_update import AdamWUpdater, CpuUpdateTable, ParamStates, ParamUpdate

CPU = torch.device("cpu")
STEP = 5


def update_of(p: Param) -> ParamUpdate:
    states = ParamStates(p.name, p.first, p.work, p.master, p.remainder, p.m, p.v, p.follows)
    return ParamUpdate(states, p.grad, coefficients(STEP)[p.row], STEP)


def updated(before: Sequence[Param]) -> list[Param]:
    """Copies after an update by torch's operations."""
    after = [each.to(CPU) for each in before]
    for each in after:
        by_operations(each, STEP)
    return after


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_has_the_bits_of_separate_fp32_operations(kind: str) -> None:
    before = [*params(kind)]
    ours = [each.to(CPU) for each in before]
    AdamWUpdater(1).run([update_of(each) for each in ours])
    assert differences(ours, updated(before)) == []


def of_length(kind: str, elems: int) -> list[Param]:
    """One parameter of bf16 gradients for either dtype of moments."""
    chosen = params(kind, follows=[False])
    return [each for each in chosen if each.grad.dtype == torch.bfloat16 and each.grad.numel() == elems]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("kind", KINDS)
def test_slices_threads_and_chunks_do_not_change_bits(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(cpu_kernels, "CHUNK_ELEMS", 100)
    monkeypatch.setattr(update_module, "ALONE_ELEMS", 100)
    before = of_length(kind, 1024)
    want = updated(before)
    for threads in (1, 3):
        ours = [each.to(CPU) for each in before]
        AdamWUpdater(threads).run([update_of(each) for each in ours])
        assert differences(ours, want) == []
    pieces = [each.to(CPU) for each in before]
    for states, grad, *rest in map(update_of, pieces):
        for start, end in itertools.pairwise((0, 1, 14, 15, 500, 1023, 1024)):
            AdamWUpdater(1).run([ParamUpdate(states.slice(start, end - start), grad[start:end], *rest)])
    assert differences(pieces, want) == []


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("kind", KINDS[::-1])
def test_an_update_out_of_place_has_the_bits_of_one_in_place_and_keeps_what_it_reads(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In pieces of any length, to aligned memory and other; the last of four pieces is not updated, as told."""
    monkeypatch.setattr(cpu_kernels, "CHUNK_ELEMS", 1250)
    monkeypatch.setattr(update_module, "ALONE_ELEMS", 100)
    monkeypatch.setattr(update_module, "PIECES", 1)
    asked = list[bool]()

    def goes_on() -> bool:
        asked.append(len(asked) % 4 < 3)
        return asked[-1]

    for before, offset in itertools.product(of_length(kind, 5000), (0, 1)):
        (want,), read = updated([before]), before.to(CPU)
        update = update_of(read)
        written = {name: torch.zeros(5000 + offset, dtype=t.dtype)[offset:] for name, t in read.states().items()}
        if kind == "fp32":
            del written["work"]  # which is the master
        update.states.targets = tuple(written.get(name) for name in ("work", "master", "remainder", "m", "v"))
        AdamWUpdater(1).run([update], goes_on)
        assert differences([read], [before]) == []
        for name, target in written.items():
            assert torch.equal(target[:3750], want.states()[name][:3750])
            assert not target[3750:].any()
    assert asked == 4 * [True, True, True, False]


def test_exact_sqrt_is_correctly_rounded() -> None:
    x = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert np.array_equal(adamw_math.exact_sqrt(x).numpy(), np.sqrt(x.numpy()))


def test_stochastic_rounding_is_unbiased_and_goes_to_a_neighbour() -> None:
    value = torch.tensor([1.0 + 2.0**-7 * 0.3, -3.14159, 1e-3, 2.0**-130, 1.0])
    noise = torch.arange(1 << 16)
    for x in value:
        rounded = adamw_math.stochastic_bf16(x.expand(1 << 16).contiguous(), noise).double()
        assert rounded.min() <= x.double() <= rounded.max()
        assert len(rounded.unique()) <= 2
        # Over all 2^16 noises the mean is the value itself, exactly: each of the low half's values counts once.
        assert math.isclose(rounded.mean().item(), x.item(), rel_tol=1e-12)


def test_rounding_noise_is_uniform_and_keyed_by_parameter_step_and_index() -> None:
    n = 1 << 16
    seeds = {adamw_math.noise_seed(name, step) for name in ("a", "b") for step in (1, 2, 3)}
    assert len(seeds) == 6
    seed = adamw_math.noise_seed("a", 1)
    noise = adamw_math.rounding_noise(0, n, seed, CPU)
    assert torch.equal(noise[777:], adamw_math.rounding_noise(777, n - 777, seed, CPU))
    low, high = (half.double() - 32767.5 for half in (noise & 0xFFFF, noise >> 16))
    for half in (low, high):
        # the mean of n uniform values has a standard deviation of 2^16 / sqrt(12 n) = 74; six of them
        assert abs(half.mean().item()) < 6 * 2**16 / math.sqrt(12 * n)
    assert abs(torch.corrcoef(torch.stack([low, high]))[0, 1].item()) < 6 / math.sqrt(n)


def test_a_master_halfway_between_two_bf16_values_goes_up_and_stays_whole() -> None:
    """Bits that end in 0x8000: the working copy is the next of larger magnitude, and the remainder -0x8000."""
    bits = torch.arange(0x3F80, 0x3FC0, dtype=torch.int32)
    bits = torch.cat([bits, bits - 0x8000])  # of either sign
    work, remainder = (bits + 1).to(torch.int16).view(torch.bfloat16), torch.full_like(bits, -0x8000, dtype=torch.int16)
    moments = torch.zeros(2, len(bits))
    ours = ParamStates("w", 0, work.clone(), None, remainder.clone(), *moments)
    still = adamw_math.Coefficients.of(step=1, lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, scale=1.0)
    AdamWUpdater(1).run([ParamUpdate(ours, torch.ones(len(bits)), still, 1)])
    assert ours.remainder is not None
    assert torch.equal(ours.work, work)
    assert torch.equal(ours.remainder, remainder)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares_have_the_bits_of_the_order_of_the_contract(dtype: torch.dtype) -> None:
    grads = gradients(dtype, (*SIZES, *LONG))
    sums = cpu_kernels.sum_squares(grads)
    assert same_bits(sums, torch.tensor([by_numpy(grad) for grad in grads], dtype=torch.float64))
    assert sums[-3:].isfinite().tolist() == [False] * 3  # infinities and a NaN
    assert cpu_kernels.sum_squares([torch.tensor([3e38])]).item() == torch.tensor(3e38).double().square().item()


BLOCKS, WIDTH = 3, 8


def calls_of_a_step(rank: int, ranks: int, matrices: int, moments: str) -> tuple[Counter[str], int, int]:
    """Of the third step: torch's operators in `step()`, and calls of the CPU's kernels in all of it."""
    torch.manual_seed(0)
    blocks = [[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(matrices)] for _ in range(BLOCKS)]
    model = nn.Sequential(*(nn.Sequential(*block) for block in blocks))
    sharded = shard(model, ZeroConfig(stage=2), precision=PrecisionConfig(moments=moments))
    optim = AdamW(sharded, threads=1)
    x = torch.randn(4, WIDTH).bfloat16()
    for _ in range(3):
        with (
            patch.object(cpu_kernels, "sum_squares", wraps=cpu_kernels.sum_squares) as sums,
            patch.object(CpuUpdateTable, "update", autospec=True, side_effect=CpuUpdateTable.update) as updates,
        ):
            sharded.model(x).float().square().mean().backward()
            with Calls() as counted:
                optim.step()
        optim.zero_grad()
    return counted.calls, sums.call_count, updates.call_count


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("ranks", "moments"), [(2, "bf16"), (1, "fp32")])
def test_a_step_makes_as_many_calls_whatever_the_number_of_parameters(pool: Pool, ranks: int, moments: str) -> None:
    """Sums of squares: one call for each unit (the root has no parameters). The update: one for all."""
    few, many = (pool.run(calls_of_a_step, ranks, matrices, moments)[0] for matrices in (1, 6))
    assert few == many
    assert few[1:] == (BLOCKS, 1)


def decoded(rank: int, ranks: int, elems: int) -> tuple[list[int], list[float]]:
    """Elements whose 8-bit moments are decoded at a time, when `elems` may be; and the parameters after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    sharded = shard(model, ZeroConfig(stage=3), precision=PrecisionConfig(param="bf16", moments="int8"))
    optim, at_once = AdamW(sharded, threads=1), []
    run = AdamWUpdater.run

    def watched(self: AdamWUpdater, updates: Sequence[ParamUpdate], before_piece: Any) -> None:
        at_once.append(sum(update.states.m.numel() for update in updates))
        run(self, updates)

    with patch.object(adamw, "DECODED_ELEMS", elems), patch.object(AdamWUpdater, "run", watched):
        for _ in range(2):
            sharded.model(torch.ones(2, WIDTH).bfloat16()).float().square().mean().backward()
            optim.step()
            optim.zero_grad()
    whole = [param.full_tensor().float().flatten() for param in sharded.model.parameters()]
    return at_once, torch.cat(whole).tolist()


def test_few_moments_of_8_bits_are_decoded_at_a_time(pool: Pool) -> None:
    """Else a step would hold all moments in fp32, four times what they take between steps."""
    size = WIDTH * WIDTH
    two, two_params = pool.run(decoded, 1, 2 * size)[0]
    every, every_params = pool.run(decoded, 1, 4 * size)[0]
    assert (two, every) == ([2 * size] * 4, [4 * size] * 2)
    assert two_params == every_params
