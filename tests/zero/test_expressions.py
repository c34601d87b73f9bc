"""Expressions on sharded weights have the values and gradients of plain torch, or are refused; a page lists them."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dzero import OffloadConfig, ParallelConfig, ZeroConfig, make_mesh, parallelize, shard

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "expressions.md"
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
ALONE, TOGETHER, REFUSED = "alone", "all ranks", "refused"
ROW = re.compile(rf"^\| `(?P<code>.+?)` \| (?P<way>{ALONE}|{TOGETHER}|{REFUSED}) \|$", re.MULTILINE)
CASES = [(row["code"], row["way"]) for row in ROW.finditer(PAGE.read_text())]
NOTICED = "tests/zero/test_expressions.py::test_expressions_on_weights_mean_what_they_mean_in_plain_torch"
ALWAYS = (
    "F.binary_cross_entropy(w.sigmoid(), t.sigmoid())",
    "F.soft_margin_loss(w, t.sign())",
    "w.norm(dim=0).sum()",
    "(w > 0).any(0).sum()",
    "r.max()",
    "w[0].fill_(1)",
    "w[0, 0] = 3",
    "w.view(-1)[0] = 3",
    "w @ w.T",
    "w.T[0]",
    "w.t().mul_(2)",
    "w.view(torch.int32).zero_()",
    "nn.init.xavier_uniform_(w)",
    "w.add_(torch.randn_like(w))",
)
"""Rows that every run of the test takes: each of another kind."""
WRITE = re.compile(r" [-+*/]?= |_\(.*\)$|out=")


class Weights(nn.Module):
    """Rows that two and three ranks cannot share evenly (w, u: 5x4; a square s), or that some ranks lack (r: 1x4)."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"w": (5, 4), "u": (5, 4), "s": (3, 3), "r": (1, 4)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self) -> Tensor:
        out: Tensor = self.w.sum()
        return out


@dataclass
class Outcome:
    """What a rank has after an expression.

    Whole `values`; this rank's `parts` of gradients, or of the weights after a write, which are whole in plain torch;
    weights whose gradients are `misplaced`; whether the expression itself needed other ranks; what was raised.
    """

    values: list[Tensor] = field(default_factory=list)
    parts: dict[str, Tensor] = field(default_factory=dict)
    misplaced: list[str] = field(default_factory=list)
    sent: bool = False
    error: str = ""


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def part(value: Tensor) -> Tensor:
    return (value.detach().to_local() if isinstance(value, DTensor) else value.detach()).clone()


def collectives(params: dict[str, Any]) -> int:
    """How many collectives the ranks have run."""
    if not isinstance(params["w"], DTensor):
        return 0
    mesh = params["w"].device_mesh
    return sum(mesh.get_group(axis)._get_sequence_number_for_group() for axis in range(mesh.ndim))


def outcome(code: str, params: dict[str, Any]) -> Outcome:
    """What an expression gives, or a statement, after which the weights are as before."""
    names = {"F": F, "torch": torch, "nn": nn, "t": params["u"].detach(), **params}
    before = {name: part(param) for name, param in params.items()} if WRITE.search(code) else {}
    found, count = Outcome(), collectives(params)
    torch.manual_seed(3)
    try:
        if before:
            with torch.no_grad():
                exec(code, names)  # noqa: S102  # text of our own page
            found.parts = {name: part(param) for name, param in params.items()}
        results = None if before else eval(code, names)  # text of our own page
        found.sent = collectives(params) > count
        if not before:
            _differentiate(results, params, found)
    except Exception as error:  # the test looks at what is said
        found.error = f"{type(error).__name__}: {error}"
    for name, param in params.items():
        param.grad = None
        if before:
            local = param.detach().to_local() if isinstance(param, DTensor) else param.detach()
            local.copy_(before[name])
    return found


def _differentiate(results: Any, params: dict[str, Any], found: Outcome) -> None:
    wholes = [whole(each) for each in (results if isinstance(results, (list, tuple)) else [results])]
    found.values = [torch.as_tensor(each).detach().clone() for each in wholes]
    differentiable = [each for each in wholes if isinstance(each, Tensor) and each.requires_grad]
    if not differentiable:
        return
    scaled = [(each * torch.arange(1, each.numel() + 1).view(each.shape).sin()).sum() for each in differentiable]
    torch.stack(scaled).sum().backward()
    for name, param in params.items():
        if (grad := param.grad) is not None:
            found.parts[name] = part(grad)
            found.misplaced += [name] if getattr(grad, "placements", 0) != getattr(param, "placements", 0) else []


def outcomes(rank: int, ranks: int, stage: int, cases: list[str], host: bool) -> list[Outcome]:
    """The outcomes of expressions on a sharded model, on the device or in host memory."""
    mesh = make_mesh("cpu", replicate=ranks if stage == 0 else 1)
    offload = OffloadConfig(param="host", grad="host", master="host", moments="host") if host else None
    sharded = shard(Weights(), ZeroConfig(stage=stage), mesh=mesh, precision="fp32", offload=offload)
    params = dict(sharded.model.named_parameters())
    return [outcome(code, params) for code in cases]


OLDER = {("F.leaky_relu(w, 0.1)", (2, 11))}
"""What an older torch does not mark as element by element, so that it is computed on whole weights there."""


def differences(found: Outcome, plain: Outcome, rank: int, shards: int) -> list[str]:
    """In what a rank's outcome differs from that of plain torch."""
    wrong = [f"{name}.grad is placed otherwise than {name}" for name in found.misplaced]
    if len(found.values) != len(plain.values):
        return [*wrong, f"{len(found.values)} values for {len(plain.values)}"]
    pairs = {str(index): pair for index, pair in enumerate(zip(found.values, plain.values, strict=True))}
    for name in found.parts.keys() | plain.parts.keys():
        like = plain.parts.get(name, getattr(Weights(), name).detach() * 0)
        pieces = like.chunk(shards)
        piece = pieces[rank % shards] if rank % shards < len(pieces) else like[:0]
        pairs[name] = (found.parts.get(name, torch.zeros_like(piece)), piece)
    for name, (ours, right) in pairs.items():
        is_alike = (ours.shape, ours.dtype) == (right.shape, right.dtype)
        if not is_alike or not torch.allclose(ours, right, rtol=1e-5, atol=1e-5, equal_nan=True):
            wrong.append(f"{name}: {ours.tolist()} for {right.tolist()}")
    return wrong


def is_of_dzero(error: str) -> bool:
    """Whether an error is one line of dzero's own."""
    says = ("of a sharded tensor", "of a DTensor whose ranks have different parts")
    return error.startswith("RuntimeError: ") and "\n" not in error and any(text in error for text in says)


def check(pool: Pool, ranks: int, stage: int, cases: list[tuple[str, str]], *, host: bool = False) -> dict[Any, Any]:
    """Expressions that differ from plain torch or from the page, by text and rank, with what differs."""
    params = dict(Weights().named_parameters())
    expected = [outcome(code, params) for code, _ in cases]
    assert [plain.error for plain in expected if plain.error] == []
    found = pool.run(outcomes, ranks, stage, [code for code, _ in cases], host)
    is_cut = ranks > 1 and stage > 0
    wrong: dict[Any, Any] = {}
    for (code, way), plain, *ours in zip(cases, expected, *found, strict=True):
        said = {each.error for each in ours}
        if said != {""}:
            if len(said) > 1 or not all(map(is_of_dzero, said)) or (way != REFUSED):
                wrong[code] = said
            continue
        for rank, each in enumerate(ours):
            if gaps := differences(each, plain, rank, ranks if stage else 1):
                wrong[code, rank] = gaps
            elif is_cut and way != (TOGETHER if each.sent else ALONE) and (code, RELEASE) not in OLDER:
                wrong[code, rank] = f"the page says {way}"
    return wrong


def test_the_page_lists_many_kinds_of_expressions() -> None:
    text = PAGE.read_text()
    assert len(CASES) == text.count("\n| `") >= 200
    assert len({code for code, _ in CASES}) == len(CASES)


@pytest.mark.parametrize(("ranks", "stage", "first"), [(3, 3, 0), (2, 1, 12)])
def test_expressions_on_weights_mean_what_they_mean_in_plain_torch(
    pool: Pool, ranks: int, stage: int, first: int
) -> None:
    """Some of the page; each of the runs takes others."""
    assert len(always()) == len(ALWAYS)
    assert check(pool, ranks, stage, [*always(), *CASES[first::18]]) == {}


def always() -> list[tuple[str, str]]:
    return [(code, way) for code, way in CASES if code in ALWAYS]


def test_expressions_on_weights_in_host_memory_mean_what_they_mean_in_plain_torch(pool: Pool) -> None:
    assert check(pool, 2, 3, always(), host=True) == {}


@pytest.mark.full(NOTICED)
@pytest.mark.parametrize(
    ("ranks", "stage", "host"),
    [(2, 3, True), *((ranks, stage, False) for ranks, stage in ((1, 3), (2, 0), (2, 2), (3, 1), (3, 3)))],
)
def test_all_expressions_of_the_page_mean_what_they_mean_in_plain_torch(
    pool: Pool, ranks: int, stage: int, host: bool
) -> None:
    for start in range(0, len(CASES), 100):
        assert check(pool, ranks, stage, CASES[start : start + 100], host=host) == {}


class Mlp(nn.Module):
    """Two matrices, which tensor parallelism cuts along rows and along columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


OF_ONE: dict[str, Any] = {
    "mse": lambda w: F.mse_loss(w, w.detach() * 0.5),
    "norms of columns": lambda w: w.norm(dim=0).sum(),
    "norms of rows": lambda w: w.norm(dim=1).max(),
    "largest": lambda w: w.max(),
    "largest size": lambda w: w.norm(float("inf")),
    "mean": lambda w: w.mean(),
    "any": lambda w: (w > 0.1).any(0).sum(),
    "a row": lambda w: w[0].square().sum(),
    "a flat view": lambda w: w.view(-1)[3:7].square().sum(),
    "a product": lambda w: (w @ w.T).square().sum(),
    "softmax": lambda w: w.softmax(0).square().sum(),
    "sums of columns": lambda w: (w - 1).abs().sum(0).max(),
    "numbers": lambda w: torch.stack([w.norm(), w.sum()]).sum(),
    "gathered": lambda w: w.flip(0).detach().sub(w).square().sum(),
}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("axis", ["tp", "replicate"])
@on_ranks(4)
def test_expressions_on_weights_that_two_axes_cut_or_copy(rank: int, ranks: int, axis: str) -> list[str]:
    """Expressions whose value or gradient is not that of plain torch, on a mesh of two axes."""
    torch.manual_seed(0)
    plain = Mlp()
    mesh, model = make_mesh("cpu", **{axis: 2}), copy.deepcopy(plain)
    plan = ParallelConfig(tensor_plan={"up": ColwiseParallel(), "down": RowwiseParallel()}) if axis == "tp" else None
    cut = model if plan is None else parallelize(model, mesh, plan)
    sharded = shard(cut, ZeroConfig(stage=3), mesh=mesh, precision="fp32")
    wrong = []
    for name, right in plain.named_parameters():
        weight: Any = sharded.model.get_parameter(name)
        for title, expression in OF_ONE.items() if right.dim() > 1 else ():
            weight.grad = right.grad = None
            ours, theirs = expression(weight), expression(right)
            if (title, axis, name, RELEASE) == ("a product", "tp", "up.weight", (2, 11)):
                with pytest.raises((RuntimeError, ValueError)):  # of torch's, as docs/reference/limits.md says
                    ours.backward()
                continue
            is_right = torch.allclose(whole(ours).detach().float(), theirs.detach().float(), atol=1e-5)
            if theirs.requires_grad:
                ours.backward(), theirs.backward()
                is_right &= weight.grad.placements == weight.placements
                is_right &= torch.allclose(whole(weight.grad), right.grad, atol=1e-5)
            wrong += [] if is_right else [f"{title} of {name}"]
    return wrong


@on_ranks(2)
def test_expressions_wait_for_an_update_in_flight(rank: int, ranks: int) -> list[str]:
    """Expressions that read a weight without waiting for an update in flight."""
    sharded = shard(Weights(), ZeroConfig(stage=3), precision="fp32")
    w: Any = sharded.model.get_parameter("w")
    (unit,) = sharded.units
    missed = []
    for code in ("w.max()", "w.mean()", "w.norm()", "w.norm(float('inf'))", "w.sum()", "w.std()", "w * 2", "w[0]"):
        done: list[bool] = []
        unit.pending = partial(done.append, True)
        with torch.no_grad():
            eval(code, {"w": w})
        missed += [] if done else [code]
        unit.pending = None
    return missed


def refusals(rank: int, ranks: int) -> list[str]:
    """What is said of ordinary tensors that are not the same on all ranks."""
    w: Any = shard(Weights(), ZeroConfig(stage=3), precision="fp32").model.get_parameter("w")
    said = []
    for expression in (lambda: w - torch.full((5, 4), float(rank)), lambda: w[torch.tensor([rank])]):
        with pytest.raises(RuntimeError) as error:
            expression()
        said.append(str(error.value))
    return said


def test_an_ordinary_tensor_that_differs_between_ranks_is_refused_on_all_of_them(pool: Pool) -> None:
    first, second = pool.run(refusals, 2)
    assert first == second
    assert all("an ordinary tensor of shape" in each and "that differs between ranks" in each for each in first)
