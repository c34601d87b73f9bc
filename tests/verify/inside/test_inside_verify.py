"""`python -m dzero verify` finds nothing in what is right, and every planted fault where it was planted.

It looks inside, because faults are planted at named points of dzero in a worker, around a verification; all but noise
leave stage 0 as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from from_words import to_verify
from pool import Pool
from small_runs import SMALL, write_text
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dzero import AdamW, OffloadConfig
from dzero.comm.collectives import AverageReplicas, ReduceGrads, UnshardParams
from dzero.comm.context_exchange import ContextExchange
from dzero.optim.grad_accumulation import UnitGrads
from dzero.optim.pipeline_grads import PipelineGrads
from dzero.trainer import build as assembly
from dzero.trainer import trainer
from dzero.verify.config import VerifyRun
from dzero.verify.ladder import BASELINE, CONFIGURATION, ladder
from dzero.verify.report import VerifyReport, table, verdict
from dzero.verify.trace import GRAD, LOSS, MASTER, READ, Mark
from dzero.verify.verify import Verifier

STEPS = 3
SECONDS = 400.0  # of a crowded machine; an idle one takes a 20th
Planted = AbstractContextManager[Any]
SMALL_FAULT = "tests/verify/inside/test_inside_verify.py::test_a_fault_is_larger_than_a_tolerance"
WRONG = "tests/verify/inside/test_inside_verify.py::test_a_planted_fault_is_found_where_it_is"


def verified(rank: int, ranks: int, run: VerifyRun, folder: Path, fault: str = "none", *args: Any) -> VerifyReport:
    """The report of one rank, with `fault` planted in its process."""
    with FAULTS[fault](*args):
        return Verifier(run, folder, torch.device("cpu")).report()


def wrong_divisor(unit: str, factor: float = 2.0) -> Planted:
    """A unit's gradients are divided by too few ranks, half of them by default, or by too many."""

    def wrongly(self: ReduceGrads, **named: Any) -> None:
        rightly(self, **named)
        if self._unit == unit:
            named["output_tensor"].mul_(factor)

    rightly = ReduceGrads.__call__
    return patch.object(ReduceGrads, "__call__", wrongly)


def dropped_microbatch(unit: str) -> Planted:
    """On the host, nothing is added to a unit's gradients of the first microbatch."""

    def wrongly(self: UnitGrads, buffer: torch.Tensor, pieces: dict[str, torch.Tensor]) -> None:
        if self._unit.shape.name == unit:
            pieces = {name: piece for name, piece in pieces.items() if name not in self.views}
        rightly(self, buffer, pieces)

    rightly = UnitGrads._add_on_host
    return patch.object(UnitGrads, "_add_on_host", wrongly)


def skipped_data(stage: int) -> Planted:
    """A step's first microbatch of data is passed over."""

    def wrongly(self: trainer.Trainer) -> torch.Tensor:
        if self.config.zero.stage == stage:
            self.stream.next()
        return rightly(self)

    rightly = trainer.Trainer._microbatches
    return patch.object(trainer.Trainer, "_microbatches", wrongly)


def stale_parameter(unit: str, gather: int) -> Planted:
    """One gather of a unit, counted from 0 in each run, gives what the first one gave."""

    def wrongly(self: UnshardParams, **named: Any) -> Any:
        if self._unit == unit:
            seen = gathered.setdefault(self, [])
            seen.append(named["input_tensor"].clone())
            if len(seen) == gather + 1:
                named["input_tensor"] = seen[0]
        return rightly(self, **named)

    gathered: dict[UnshardParams, list[torch.Tensor]] = {}
    rightly = UnshardParams.__call__
    return patch.object(UnshardParams, "__call__", wrongly)


def not_updated(part: str, step: int | None = None) -> Planted:
    """Parameters with this part of a name are left out of one update, or of all."""

    def wrongly(self: AdamW, grads: dict[str, torch.Tensor], factor: float) -> Any:
        now = max(int(states["step"]) for states in self.state.values()) == (step or 0) - 1
        if step is None or (self._sharded.layout.shard > 1 and now):
            grads = {name: grad for name, grad in grads.items() if part not in name}
        return rightly(self, grads, factor)

    rightly = AdamW._plan
    return patch.object(AdamW, "_plan", wrongly)


def lonely_keys() -> Planted:
    """Keys and values get the gradients of their own rank's queries alone."""
    return patch.object(ContextExchange, "add", lambda self, parts: parts[self.rank].clone())


def wrong_copy(unit: str) -> Planted:
    """The last of several copies of a shard gets an average of a unit's gradients that is 15/16 of what it is."""

    def wrongly(self: AverageReplicas, grads: torch.Tensor) -> None:
        rightly(self, grads)
        group = self._exchange.group
        if (
            self._span.endswith(f" {unit}")
            and group.size() < dist.get_world_size()
            and group.rank() == group.size() - 1
        ):
            grads.mul_(15 / 16)

    rightly = AverageReplicas.__call__
    return patch.object(AverageReplicas, "__call__", wrongly)


def lonely_ends() -> Planted:
    """Both ends of a pipeline keep their own gradients of tied parameters."""
    return patch.object(PipelineGrads, "complete", lambda self: None)


def loud_rank(module: str) -> Planted:
    """Where matrices are cut, the first rank gives a 16th more of its part of a sum."""

    def wrongly(model: nn.Module, mesh: DeviceMesh, config: Any) -> Any:
        cut = rightly(model, mesh, config)
        if "tp" in (mesh.mesh_dim_names or ()) and mesh.get_local_rank("tp") == 0:
            model.get_submodule(module).register_forward_pre_hook(lambda _, args: (args[0] * 1.0625,))
        return cut

    rightly = assembly.parallelize
    return patch.object(assembly, "parallelize", wrongly)


@contextmanager
def noise(*planted: Any) -> Iterator[None]:
    """A block's output has noise in it, from a generator that nobody seeds; and another fault with its arguments."""

    def noisy(*args: Any) -> nn.Module:
        model = build(*args)
        model.get_submodule("layers.0.ffn").register_forward_hook(add)
        return model

    def add(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out + 1e-4 * torch.randn(out.shape, generator=unseeded).to(out.dtype)

    build, unseeded = assembly.build, torch.Generator()
    unseeded.seed()
    other = FAULTS[planted[0]](*planted[1:]) if planted else nullcontext()
    with patch.object(assembly, "build", noisy), other:
        yield


FAULTS: dict[str, Callable[..., Planted]] = {
    "none": nullcontext,
    "wrong divisor": wrong_divisor,
    "dropped microbatch": dropped_microbatch,
    "skipped data": skipped_data,
    "stale parameter": stale_parameter,
    "not updated": not_updated,
    "noise": noise,
    "lonely keys": lonely_keys,
    "wrong copy": wrong_copy,
    "lonely ends": lonely_ends,
    "loud rank": loud_rank,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "words.txt")


def small(data: Path, *settings: str) -> list[str]:
    own = [f"train.steps={STEPS}", f"verify.steps={STEPS}", "launch.workers=2", f"data.path={data}"]
    return [*SMALL.split(), *own, *settings]


def report_of(pool: Pool, data: Path, folder: Path, line: str, *fault: Any, ranks: int = 2) -> VerifyReport:
    """What all ranks found."""
    run = to_verify(*small(data, *line.split(), f"launch.workers={ranks}"))
    reports = pool.run(verified, ranks, run, folder, *fault, timeout_s=SECONDS)
    assert all(report == reports[0] for report in reports)
    assert list(folder.iterdir()) == []
    assert len(table(reports[0]).rows) == len(reports[0].findings)
    return reports[0]  # type: ignore[no-any-return]


# What is right


HOPS = "zero.stage=3 mesh.replicate=2"
CUT = "mesh.cp=2 zero.stage=3 precision=fp32"
TENSOR = "mesh.tp=2 model.kv_heads=2 zero.stage=3 precision=fp32"
PIPELINE = "mesh.pp=2 zero.stage=3 precision=fp32 train.accumulate=2"
EXPERTS = "model=tiny_moe mesh.ep=2 zero.stage=3 precision=fp32"


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("line", "rung", "ranks"),
    [
        ("zero.stage=3 offload=host_all precision=bf16_remainder train.accumulate=2", "", 2),
        ("zero.stage=2 block.tiles=3 block.activation_checkpoint=full", "", 2),
        ("zero.stage=3 offload=infinity offload.overlap=backward precision.moments=bf16", "", 2),
        ("zero.stage=3 offload=host offload.overlap=delayed offload.delay_warmup_steps=1", "", 2),
        ("zero.stage=1 train.accumulate=2 precision=fp16 scaler.init=1e9", "", 2),
        ("zero.stage=3 zero.unit_bytes=4000 offload=host_all block.activation_checkpoint=full", "", 2),
        ("zero.stage=3 zero.reduction=native train.accumulate=2", "", 2),
        (CUT, "over cut sequences", 2),
        (TENSOR, "over cut matrices", 2),
        (PIPELINE, "over a pipeline", 2),
        (EXPERTS, "over cut matrices", 2),
        ("mesh.cp=2 mesh.cp_attention=ulysses model.kv_heads=2 offload=host", "over cut sequences", 2),
        (f"{PIPELINE} mesh.pp_schedule=interleaved model.layers=4", "over a pipeline", 2),
        (f"{HOPS} zero.optimizer_shard_axes=[replicate,shard] offload=host", "stage 1 on the device", 4),
    ],
)
def test_what_is_right_agrees(pool: Pool, text: Path, tmp_path: Path, line: str, rung: str, ranks: int) -> None:
    """Where sums are added in another order, those of fp32 differ by some units in the last place, and masters by what
    Adam makes of it; above that rung placement changes nothing."""
    scratch = f" offload.disk.paths=[{text.parent}]" if "infinity" in line else ""
    report = report_of(pool, text, tmp_path, line + scratch, ranks=ranks)
    assert report.agrees, verdict(report)
    assert "\nAGREES" in "\n" + verdict(report)
    itself, *rungs, last = report.findings
    assert itself.gap.sizes == (0, 0, 0, 0)
    assert (last.rung.name, last.apart) == (CONFIGURATION, None)
    assert (last.allowed is None) == ("native" not in line)
    others = [finding for finding in rungs if rung and finding.rung.name.endswith(rung)]
    assert bool(others) == bool(rung)
    for other in others:
        assert other.allowed is not None
        if "precision=fp32" in line:
            assert 0 < other.gap.unit_norm < 1e-5
            assert 0 < other.gap.masters < 1e-3


# What is wrong


@pytest.mark.full(WRONG)
@pytest.mark.parametrize(
    ("line", "fault", "rung", "unit", "norm", "told"),
    [
        (PIPELINE, ("lonely ends",), 1, "root", None, "over a pipeline from stage 0 on the device: "),
        (TENSOR, ("loud rank", "layers.1.ffn.down"), 1, "layers.1", None, "over cut matrices from stage 0"),
        (CUT, ("lonely keys",), 1, None, None, "gradient norm of unit layers."),
        (f"{HOPS} precision=fp32", ("wrong copy", "layers.1"), 1, "layers.1", 1 / 32, "unit layers.1"),
        (
            *("zero.stage=0 block.tiles=3 precision=fp32", ("not updated", "ffn.tiles."), 1, None, None),
            "Expected: a tolerance, since tiles add partial sums",
        ),
    ],
)
def test_what_is_wrong_along_one_axis_is_found_where_it_begins(
    pool: Pool, text: Path, tmp_path: Path, line: str, fault: Any, rung: int, unit: str | None, norm: Any, told: str
) -> None:
    report = report_of(pool, text, tmp_path, line, *fault, ranks=4 if "replicate" in line else 2)
    found = report.findings[rung]
    assert [finding.agrees for finding in report.findings] == [at != rung for at in range(len(report.findings))]
    assert unit is None or (found.gap.unit, found.gap.step) == (unit, 1)
    assert norm is None or found.gap.unit_norm == pytest.approx(norm, rel=0.05)
    assert told in verdict(report)


HOST = "zero.stage=3 offload=host"
QUERY, NORM_OF = "attention.query.weight", "attention_norm.weight"


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("line", "fault", "mark", "param"),
    [
        ("zero.stage=2", ("wrong divisor", "layers.1"), Mark(1, GRAD, "layers.1"), NORM_OF),
        (f"{HOST} train.accumulate=2", ("dropped microbatch", "layers.0"), Mark(1, GRAD, "layers.0"), NORM_OF),
        ("zero.stage=3", ("skipped data", 3), Mark(1, LOSS), ""),
        # stage 3 gathers twice in a step
        ("zero.stage=3", ("stale parameter", "layers.1", 4), Mark(3, READ, "layers.1"), QUERY),
        (HOST, ("not updated", "layers.0.", 1), Mark(2, READ, "layers.0"), QUERY),
        ("zero.stage=1", ("not updated", "layers.1.", STEPS), Mark(STEPS, MASTER, "layers.1"), NORM_OF),
    ],
)
def test_a_planted_fault_is_found_where_it_is(
    pool: Pool, text: Path, tmp_path: Path, line: str, fault: tuple[Any, ...], mark: Mark, param: str
) -> None:
    report = report_of(pool, text, tmp_path, line, *fault)
    assert not report.agrees
    *others, last = report.findings
    assert all(finding.agrees for finding in others)
    assert last.apart is not None
    assert last.apart.mark == mark
    assert last.apart.param == (param and f"{mark.unit}.{param}")
    assert last.apart.largest > 0
    told = verdict(report)
    assert f"DIFFERS: {CONFIGURATION} from" in told
    assert f"step {mark.step}" in told
    assert param in told


ACCUMULATED = "zero.stage=2 train.accumulate=2"
NATIVE = "zero.stage=3 zero.reduction=native train.accumulate=2"


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("line", "fault", "told"),
    [
        (ACCUMULATED, ("wrong divisor", "layers.1"), "unit layers.1 in step 1 1.0e+00 where 1.0e-02 is allowed. Exp"),
        (ACCUMULATED, ("not updated", "layers.1.", 1), "is allowed, most in layers.1."),
        (NATIVE, ("wrong divisor", "layers.1", 15 / 16), "gradient norm of unit layers.1 in step 1 6."),
    ],
)
def test_a_fault_is_larger_than_a_tolerance(
    pool: Pool, text: Path, tmp_path: Path, line: str, fault: tuple[Any, ...], told: str
) -> None:
    """There are no bits to be compared with. That a divisor is off by one of 16 the loss hardly shows."""
    report = report_of(pool, text, tmp_path, line, *fault)
    assert not report.agrees
    assert report.findings[-1].apart is None
    assert told in verdict(report)


@pytest.mark.full(SMALL_FAULT)
@pytest.mark.parametrize("settings", ["train.accumulate=2", "precision=fp32", "precision=fp16 block.tiles=3"])
def test_native_reductions_agree_until_one_units_divisor_is_off_by_one(
    pool: Pool, text: Path, tmp_path: Path, settings: str
) -> None:
    """The loss hardly shows it, and the gradient norm of all units the less the more there are."""
    line = f"zero.stage=3 zero.reduction=native {settings}"
    right = report_of(pool, text, tmp_path, line)
    assert right.agrees, verdict(right)
    assert right.findings[-1].gap.unit_norm < 2e-3
    wrong = report_of(pool, text, tmp_path, line, "wrong divisor", "layers.1", 15 / 16)
    assert not wrong.agrees
    last = wrong.findings[-1]
    assert (last.apart, last.gap.unit, last.gap.step) == (None, "layers.1", 1)
    assert last.gap.unit_norm == pytest.approx(1 / 16, rel=0.05)
    assert f"DIFFERS: {CONFIGURATION} from" in verdict(wrong)
    assert "gradient norm of unit layers.1 in step 1 6." in verdict(wrong)


@pytest.mark.full(SMALL_FAULT)
def test_a_model_with_noise_differs_from_itself_by_its_spread(pool: Pool, text: Path, tmp_path: Path) -> None:
    noisy = report_of(pool, text, tmp_path, "zero.stage=3 precision=fp32", "noise")
    assert noisy.agrees, verdict(noisy)
    itself, finding = noisy.findings
    assert itself.apart is not None
    assert itself.apart.mark.step == 1
    assert finding.allowed is not None
    assert verdict(noisy).startswith("the baseline differs from itself: step 1")
    wrong = report_of(pool, text, tmp_path, "zero.stage=3 precision=fp32", "noise", "wrong divisor", "layers.1")
    assert not wrong.agrees, verdict(wrong)
    assert verdict(wrong).startswith("the baseline differs from itself: step 1")


# What is compared with what


STAGE_1, STAGE_2, TILES = "stage 1 on the device", "stage 2 on the device", f"{BASELINE} with its tiles"
DELAYED = "zero.stage=2 offload=host offload.overlap=delayed"
SEQUENCES, MATRICES, PIPE = (f"{BASELINE} over {what}" for what in ("cut sequences", "cut matrices", "a pipeline"))


@pytest.mark.product(keep=6)
@pytest.mark.parametrize(
    ("line", "ranks", "names", "is_exact"),
    [
        ("zero.stage=0", 2, None, True),
        ("zero.stage=2 train.accumulate=4", 2, [], False),
        ("zero.stage=3 train.accumulate=4", 2, [STAGE_2], True),
        ("zero.stage=0 block.tiles=2", 2, [], False),
        (f"{HOPS} train.accumulate=2 block.tiles=2 offload=host", 4, [TILES, STAGE_2], True),
        (DELAYED, 2, [], True),
        (f"{DELAYED} offload.delay_warmup_steps=2", 2, ["updates a step late"], True),
        ("zero.stage=2 precision.moments=int8", 2, [STAGE_1], True),
        ("zero.stage=3 offload=host_all precision.fetch=fp8", 1, [], False),
        ("zero.stage=3 offload=host_all precision.gather=int8 precision.fetch=fp8", 2, [STAGE_1], False),
        ("zero.stage=2 precision.reduce=int4 zero.node_ranks=2", 4, [STAGE_1], True),
        ("zero.stage=2 optim.rule=Adafactor offload=host", 2, [], True),
        ("zero.stage=3 mesh.dp=2 mesh.cp=2 train.accumulate=2 block.tiles=2", 4, [TILES, SEQUENCES, STAGE_2], True),
        (
            *("zero.stage=3 mesh.dp=2 mesh.replicate=2 mesh.cp=2 mesh.tp=2 mesh.pp=2 train.accumulate=2", 16),
            *([SEQUENCES, MATRICES, PIPE, STAGE_2], True),
        ),
    ],
)
def test_every_order_of_additions_is_a_rung(line: str, ranks: int, names: list[str] | None, is_exact: bool) -> None:
    """What is compared, within tolerances, below the configuration, of which the same bits are expected or not."""
    run = to_verify(*line.split(), f"launch.workers={ranks}")
    found = [(rung.name, rung.allowed is None) for rung in ladder(run, ranks)[1:]]
    expected = [] if names is None else [*((name, False) for name in names), (CONFIGURATION, is_exact)]
    assert found == expected


def test_ranks_that_share_something_do_all_of_it_below_and_a_step_stays_the_same() -> None:
    line = "zero.stage=0 mesh.dp=2 mesh.cp=2 mesh.tp=2 mesh.pp=2 mesh.pp_schedule=gpipe train.accumulate=2"
    run = to_verify(*line.split(), "train.microbatch_sequences=2", "launch.workers=16")
    meshes = [rung.config.mesh for rung in ladder(run, 16)]
    degrees = [(mesh.dp, mesh.cp, mesh.tp, mesh.pp, mesh.pp_schedule) for mesh in meshes]
    assert degrees == [(None, 1, 1, 1, "1f1b"), (None, 2, 1, 1, "1f1b"), (None, 2, 2, 1, "1f1b"), (2, 2, 2, 2, "gpipe")]
    for rung, mesh in zip(ladder(run, 16), meshes, strict=True):
        assert mesh.readers(mesh.data_ranks(16)) == 2
        assert rung.config.train == run.train


def test_the_baseline_keeps_all_but_what_places_shards_and_tiles() -> None:
    line = "zero.stage=3 mesh.replicate=2 offload=host block.tiles=2 precision=fp16 precision.reduce=fp32 train.seed=7"
    run = to_verify(*line.split(), "launch.workers=4", "block.activation_checkpoint=full")
    base = ladder(run, 4)[0].config
    assert (base.zero.stage, base.mesh.replicate, base.block.tiles) == (0, 1, 1)
    assert base.offload == OffloadConfig()
    assert (base.precision.param, base.precision.reduce, base.precision.grad) == ("fp16", "fp32", "fp32")
    assert (base.train, base.data, base.optim, base.scaler) == (run.train, run.data, run.optim, run.scaler)
    assert base.block.activation_checkpoint == "full"
