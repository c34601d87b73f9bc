"""The update's kernels against plain torch operations: the same bits for every dtype, length and cut, in few calls."""

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
from pool import Pool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dzero import AdamW, PrecisionConfig, ZeroConfig, shard
from dzero.optim import adamw, adamw_math, cpu_kernels
from dzero.optim import flat_update as update_module
from dzero.optim.adamw_math import Coefficients
from dzero.optim.flat_update import AdamWUpdater, CpuUpdateTable, ParamStates, ParamUpdate
from dzero.optim.quantized_moments import BLOCK_ELEMS, QuantizedMoment
from dzero.zero.rounding import join, split, to_working

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
C = Coefficients.of(step=3, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, scale=0.37)
KINDS = ["fp32", "bf16 + fp32", "bf16 + remainder", "fp16 + fp32"]


def states(kind: str, moments: torch.dtype, elems: int, seed: int = 0) -> ParamStates:
    """One parameter's states with values over several binades; m, v after some updates."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(elems, generator=generator)

    master = normal() * normal().exp()
    m, v = (normal() * 0.1).to(moments), (normal().square() * 0.01).to(moments)
    if kind == "fp32":
        return ParamStates("w", 1000, master, master, None, m, v)
    if kind == "bf16 + remainder":
        work, remainder = split(master)
        return ParamStates("w", 1000, work, None, remainder, m, v)
    return ParamStates("w", 1000, to_working(master, BF16 if "bf16" in kind else FP16), master, None, m, v)


def copy(s: ParamStates) -> ParamStates:
    work = s.work.clone()
    master = work if s.master is s.work else None if s.master is None else s.master.clone()
    return ParamStates(
        s.name, s.first, work, master, None if s.remainder is None else s.remainder.clone(), s.m.clone(), s.v.clone()
    )


def plain(s: ParamStates, grad: Tensor, step: int) -> None:
    """The update by `adamw_math.adamw` on whole tensors, stored as `s` stores."""
    master = join(s.work, s.remainder) if s.remainder is not None else s.master
    assert master is not None
    m, v = s.m.float(), s.v.float()
    adamw_math.adamw(grad.float(), master, m, v, C)
    if s.m.dtype == BF16:
        noise = adamw_math.rounding_noise(s.first, m.numel(), adamw_math.noise_seed(s.name, step), m.device)
        m, v = adamw_math.stochastic_bf16(m, noise & 0xFFFF), adamw_math.stochastic_bf16(v, noise >> 16)
    s.m.copy_(m)
    s.v.copy_(v)
    if s.remainder is not None:
        s.work.copy_(split(master)[0])
        s.remainder.copy_(split(master)[1])
    elif s.master is not s.work:
        s.work.copy_(to_working(master, s.work.dtype))


def apply(update: ParamUpdate) -> None:
    AdamWUpdater(1).run([update])


def same(a: ParamStates, b: ParamStates) -> bool:
    pairs = [(a.work, b.work), (a.m, b.m), (a.v, b.v)]
    if a.master is not None and b.master is not None:
        pairs.append((a.master, b.master))
    if a.remainder is not None and b.remainder is not None:
        pairs.append((a.remainder, b.remainder))
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_has_the_bits_of_separate_fp32_operations(kind: str) -> None:
    for moments, grad_dtype, elems in itertools.product((FP32, BF16), (FP32, BF16, FP16), (1, 3, 17, 1000, 4099)):
        before = states(kind, moments, elems)
        grad = torch.randn(elems, generator=torch.Generator().manual_seed(1)).to(grad_dtype)
        ours, want = copy(before), copy(before)
        apply(ParamUpdate(ours, grad, C, 3))
        plain(want, grad, 3)
        assert same(ours, want), (kind, moments, grad_dtype, elems)


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(("kind", "moments"), [*zip(KINDS, itertools.cycle((BF16, FP32)))])
def test_slices_threads_and_chunks_do_not_change_bits(
    monkeypatch: pytest.MonkeyPatch, kind: str, moments: torch.dtype
) -> None:
    monkeypatch.setattr(cpu_kernels, "CHUNK_ELEMS", 100)
    monkeypatch.setattr(update_module, "ALONE_ELEMS", 100)
    elems, cuts = 1013, [0, 1, 14, 15, 500, 1012, 1013]
    before = states(kind, moments, elems)
    grad = torch.randn(elems, generator=torch.Generator().manual_seed(2)).to(BF16)
    want, one, three, pieces = (copy(before) for _ in range(4))
    plain(want, grad, 5)
    AdamWUpdater(1).run([ParamUpdate(one, grad, C, 5)])
    AdamWUpdater(3).run([ParamUpdate(three, grad, C, 5)])
    for start, end in itertools.pairwise(cuts):
        apply(ParamUpdate(pieces.slice(start, end - start), grad[start:end], C, 5))
    assert [same(each, want) for each in (one, three, pieces)] == [True] * 3


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("kind", "moments"), [*itertools.product(KINDS[::-1], (BF16, FP32))])
def test_an_update_out_of_place_has_the_bits_of_one_in_place_and_keeps_what_it_reads(
    monkeypatch: pytest.MonkeyPatch, kind: str, moments: torch.dtype
) -> None:
    """In pieces of any length, to aligned memory and other; the last of four pieces is not updated, as told."""
    monkeypatch.setattr(cpu_kernels, "CHUNK_ELEMS", 601)
    monkeypatch.setattr(update_module, "ALONE_ELEMS", 100)
    monkeypatch.setattr(update_module, "PIECES", 1)
    elems, asked = 2404, list[bool]()
    before = states(kind, moments, elems)
    grad = torch.randn(elems, generator=torch.Generator().manual_seed(4))
    held = (before.work, before.master, before.remainder, before.m, before.v)
    for offset in (0, 1):
        after, want = copy(before), copy(before)
        after.targets = tuple(
            None
            if state is None or (at == 0 and kind == "fp32")
            else torch.zeros(elems + offset, dtype=state.dtype)[offset:]
            for at, state in enumerate(held)
        )

        def goes_on() -> bool:
            asked.append(len(asked) % 4 < 3)
            return asked[-1]

        AdamWUpdater(1).run([ParamUpdate(after, grad, C, 5)], goes_on)
        AdamWUpdater(1).run([ParamUpdate(want, grad, C, 5)])
        updated = (want.work, want.master, want.remainder, want.m, want.v)
        kept = (after.work, after.master, after.remainder, after.m, after.v)
        for target, new, old, now in zip(after.targets, updated, held, kept, strict=True):
            if target is not None and new is not None and old is not None and now is not None:
                assert torch.equal(target[:1803], new[:1803])
                assert not target[1803:].any()
                assert torch.equal(now, old)
    assert asked == 2 * [True, True, True, False]


def test_the_rule_is_adamw_to_fp32_accuracy() -> None:
    """Against torch.optim.AdamW in fp64 over 50 steps: relative error below 50 steps of a few fp32 roundings each."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(500, generator=generator)
    peer = torch.nn.Parameter(start.double())
    optim = torch.optim.AdamW([peer], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    master, m, v = start.clone(), torch.zeros(500), torch.zeros(500)
    for step in range(1, 51):
        grad = torch.randn(500, generator=generator)
        peer.grad = grad.double()
        optim.step()
        c = Coefficients.of(step=step, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, scale=1.0)
        adamw_math.adamw(grad, master, m, v, c)
    assert (master.double() - peer.detach()).abs().max() < 50 * 4 * 2.0**-24


def test_exact_sqrt_is_correctly_rounded() -> None:
    x = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert np.array_equal(adamw_math.exact_sqrt(x).numpy(), np.sqrt(x.numpy()))


def test_stochastic_rounding_is_unbiased_and_goes_to_a_neighbour() -> None:
    value = torch.tensor([1.0 + 2.0**-7 * 0.3, -3.14159, 1e-3, 2.0**-130, 1.0])
    noise = torch.arange(1 << 16)
    for x in value:
        rounded = adamw_math.stochastic_bf16(x.expand(1 << 16).contiguous(), noise).double()
        low, high = rounded.min(), rounded.max()
        assert low <= x.double() <= high
        assert len(rounded.unique()) <= 2
        # Over all 2^16 noises the mean is the value itself, exactly: each of the low half's values counts once.
        assert math.isclose(rounded.mean().item(), x.item(), rel_tol=1e-12)


def test_rounding_noise_is_uniform_and_keyed_by_parameter_step_and_index() -> None:
    n = 1 << 16
    seeds = {adamw_math.noise_seed(name, step) for name in ("a", "b") for step in (1, 2, 3)}
    assert len(seeds) == 6
    noise = adamw_math.rounding_noise(0, n, adamw_math.noise_seed("a", 1), torch.device("cpu"))
    assert torch.equal(
        noise[777:], adamw_math.rounding_noise(777, n - 777, adamw_math.noise_seed("a", 1), torch.device("cpu"))
    )
    for half in (noise & 0xFFFF, noise >> 16):
        # the mean of n uniform values has a standard deviation of 2^16 / sqrt(12 n) = 74; six of them
        assert abs(half.double().mean().item() - 32767.5) < 6 * 2**16 / math.sqrt(12 * n)
    low, high = ((half.double() - 32767.5) for half in (noise & 0xFFFF, noise >> 16))
    assert abs(torch.corrcoef(torch.stack([low, high]))[0, 1].item()) < 6 / math.sqrt(n)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_sum_squares_is_the_fp64_sum(dtype: torch.dtype) -> None:
    for elems in (0, 1, 255, 256, 257, 10_001):
        x = torch.randn(elems, generator=torch.Generator().manual_seed(elems)).to(dtype)
        exact = math.fsum(value * value for value in x.double().tolist())
        assert math.isclose(cpu_kernels.sum_squares([x]).item(), exact, rel_tol=1e-13, abs_tol=0)
    assert math.isnan(cpu_kernels.sum_squares([torch.tensor([1.0, math.nan], dtype=dtype)]).item())
    assert cpu_kernels.sum_squares([torch.tensor([1.0, -math.inf], dtype=dtype)]).item() == math.inf
    if dtype == FP32:  # the square of a large fp32 is finite in fp64
        assert cpu_kernels.sum_squares([torch.tensor([3e38])]).item() == torch.tensor(3e38).double().square().item()


def test_accumulate_adds_in_place_and_returns_the_sum_of_squares() -> None:
    for dtype, elems in itertools.product((FP32, BF16, FP16), (1, 256, 4099)):
        generator = torch.Generator().manual_seed(elems)
        acc, grad = (torch.randn(elems, generator=generator).to(dtype) for _ in range(2))
        want = acc + grad
        assert cpu_kernels.accumulate([acc], [grad]).item() == cpu_kernels.sum_squares([want]).item()
        assert torch.equal(acc, want)


def test_eight_bit_states_keep_their_length_and_relative_size() -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    eight = QuantizedMoment.zeros(1000, 1003, signed=True, device=value.device)
    assert torch.equal(eight.load(), torch.zeros(1000))
    eight.store(value)
    largest = torch.nn.functional.pad(value, (0, 24)).view(-1, BLOCK_ELEMS).abs().amax(1)
    # neighbouring codes are at most 1/64 of the block's largest value apart
    assert ((eight.load() - value).abs() <= largest.repeat_interleave(BLOCK_ELEMS)[:1000] / 64).all()
    assert {key: tuple(t.shape) for key, t in eight.tensors.items()} == {"codes": (1024,), "scale": (4,)}


BLOCKS, WIDTH = 3, 8


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """As many matrices as asked for, one after the other."""

    def __init__(self, matrices: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(matrices))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] -> the same."""
        for weight in self.weights:
            x = x + x @ weight
        return x


def calls_of_a_step(rank: int, ranks: int, matrices: int, moments: str) -> tuple[dict[str, int], dict[str, int]]:
    """Of the third step: torch's operators in `step()`, and calls of the CPU's kernels in all of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(matrices) for _ in range(BLOCKS)))
    precision = PrecisionConfig(param="bf16", moments=moments)
    sharded = shard(model, ZeroConfig(stage=2), precision=precision)
    optim = AdamW(sharded, threads=1)
    kernels: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            kernels[name] += 1
            return function(*args, **kwargs)

        return run

    x = torch.randn(4, WIDTH).bfloat16()
    for _ in range(3):
        kernels.clear()
        with (
            patch.object(cpu_kernels, "sum_squares", counted("sum_squares", cpu_kernels.sum_squares)),
            patch.object(CpuUpdateTable, "update", counted("update", CpuUpdateTable.update)),
        ):
            sharded.model(x).float().square().mean().backward()
            with Calls() as calls:
                optim.step()
        optim.zero_grad()
    assert optim.last_decision.finite
    return dict(calls.counts), dict(kernels)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("ranks", "moments"), [(2, "bf16"), (2, "fp32"), (1, "bf16"), (1, "fp32")])
def test_a_step_makes_as_many_calls_whatever_the_number_of_parameters(pool: Pool, ranks: int, moments: str) -> None:
    """Sums of squares: one call for each unit (the root has no parameters). The update: one for all."""
    few, many = (pool.run(calls_of_a_step, ranks, matrices, moments)[0] for matrices in (1, 6))
    assert few == many
    assert few[1] == {"sum_squares": BLOCKS, "update": 1}


def decoded(rank: int, ranks: int, elems: int) -> tuple[list[int], list[float]]:
    """Elements whose 8-bit moments are decoded at a time, when `elems` may be; and the parameters after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    sharded = shard(model, ZeroConfig(stage=3), precision=PrecisionConfig(param="bf16", moments="int8"))
    optim, at_once = AdamW(sharded, threads=1), []
    run = AdamWUpdater.run

    def watched(self: AdamWUpdater, updates: Sequence[ParamUpdate], before_piece: object) -> None:
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
