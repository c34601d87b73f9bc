"""What dzero does in a torch that lacks a private name: it trains on with a warning, or refuses in one line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool
from torch import nn
from torch.distributed.tensor import DTensor
from training_loops import sharded_net
from typed_commands import in_a_process

import dzero
from dzero import AdamW
from dzero.parallel.context import ring
from dzero.utils import torch_internals
from dzero.utils.torch_internals import FAKE_GROUPS, FAKE_TENSORS, TIMEOUTS, VERSIONS, Seam
from dzero.zero import fsdp_internals
from dzero.zero.fsdp_internals import CHANGES, FIRST_CALLS

CONF = Path(__file__).parents[3] / "conf"
TRAINING = (*torch_internals.SEAMS, *fsdp_internals.SEAMS)
FALLBACKS = [seam for seam in (*TRAINING, TIMEOUTS) if seam.without is not None]
REFUSED = [seam for seam in (*TRAINING, *ring.SEAMS, FAKE_TENSORS, FAKE_GROUPS) if seam.without is None]
PRIVATE = (
    "torch.distributed.fsdp._common_utils",
    "torch.distributed.fsdp._fully_shard._fsdp_param",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed.fsdp._fully_shard._fsdp_state",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.experimental._context_parallel",
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.testing._internal.distributed.fake_pg",
)
"""Modules that are gone in the subprocess, after torch itself has imported what it needs of them."""
GONE = ("torch._foreach_add_", "torch.distributed.distributed_c10d._set_pg_timeout")


EVERY = (*TRAINING, *ring.SEAMS, TIMEOUTS, FAKE_TENSORS, FAKE_GROUPS)


@contextmanager
def lacking(name: str | None) -> Iterator[None]:
    """Let torch lack a name of a table, and its alternatives: not found, but still there for torch itself."""
    gone, exists = set((name or "").split(" or ")), torch_internals._exists
    _forget()
    with patch.object(torch_internals, "_exists", lambda each: each not in gone and exists(each)):
        yield
    _forget()


def _forget() -> None:
    torch_internals.check.cache_clear()
    for each in EVERY:
        each.__dict__.pop("missing", None)


def trained(_: int, __: int) -> list[tuple[list[Any], dict[str, torch.Tensor], list[str]]]:
    """Losses, parameters and warnings of two steps with all names, and of two without each that has a fallback."""
    found = []
    for name in (None, *(seam.names[-1] for seam in FALLBACKS)):
        with lacking(name), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            layers = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4))
            sharded = dzero.shard(layers, stage=2)
            optim, losses = AdamW(sharded, max_norm=1.0), []
            for _ in range(2):
                loss = sharded.model(torch.arange(8)).float().square().sum()
                loss.backward()
                optim.step()
                losses.append(loss.item())
            told = [str(each.message) for each in said if "which dzero needs" in str(each.message)]
        params = {name: param.full_tensor() for name, param in sharded.named_params().items()}  # type: ignore[attr-defined]
        found.append((losses, params, told))
    return found


def test_training_falls_back_with_the_same_bits(pool: Pool) -> None:
    (plain, params, said), *others = pool.run(trained, 2)[0]
    assert said == []
    for seam, (losses, found, told) in zip(FALLBACKS, others, strict=True):
        assert losses == plain, seam
        assert all(torch.equal(found[each], params[each]) for each in params), seam
        assert told == [
            f"torch {torch.__version__} has no {seam.names[-1]}, which dzero needs for {seam.used_for}: "
            f"{seam.without}. {VERSIONS} has it"
        ]


@pytest.mark.parametrize(("release", "warns"), [(torch_internals.NEWEST, False), ((3, 0), True)])
def test_a_newer_torch_that_has_all_names_is_warned_of(
    release: tuple[int, int], warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_internals, "RELEASE", release)
    torch_internals._warn_of_newer.cache_clear()
    for _ in range(2):  # features have seams of their own
        torch_internals.check.__wrapped__(torch_internals.SEAMS)
    assert caplog.text.count(f"is newer than those that dzero is tested with, {VERSIONS}") == warns


def refusals(_: int, __: int) -> dict[str, str]:
    """What is said about each name without a fallback."""
    uses: dict[Seam, Any] = dict.fromkeys(TRAINING, partial(sharded_net, stage=2))
    uses |= {FAKE_TENSORS: torch_internals.fake_tensors, FAKE_GROUPS: torch_internals.fake_store}
    said = {}
    for seam in REFUSED:
        for name in seam.names:
            with lacking(name), pytest.raises(RuntimeError) as error:
                uses.get(seam, partial(ring.Ring, None))()
            said[name] = str(error.value)
    return said


def test_what_cannot_do_without_is_refused_in_one_line(pool: Pool) -> None:
    (said,) = pool.run(refusals, 1)
    uses = {name: seam.used_for for seam in REFUSED for name in seam.names}
    assert said == {
        name: f"torch {torch.__version__} has no {name}, which dzero needs for {used_for}: install {VERSIONS}"
        for name, used_for in uses.items()
    }


def unchecked(_: int, __: int) -> str:
    """A backward that is not refused, and FSDP2's own error."""
    with lacking(CHANGES.names[0]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharded = sharded_net(stage=2)
        loss = sharded.model(torch.zeros(1, 4, dtype=torch.int64)).float().sum()
        for param in sharded.named_params().values():
            with torch.no_grad():
                param.mul_(2)
        loss.backward()
    with lacking(FIRST_CALLS.names[0]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
        dzero.shard(model, dzero.ZeroConfig(stage=3, units=["Embedding"]))
        model[0](torch.zeros(1, 1, dtype=torch.int64))
        with pytest.raises(RuntimeError) as error:
            model(torch.zeros(1, 1, dtype=torch.int64))
    return str(error.value)


def test_without_a_check_torchs_own_behaviour_is_left(pool: Pool) -> None:
    for said in pool.run(unchecked, 2):
        assert "FSDP" in said


def with_handlers(rank: int, ranks: int) -> set[str]:
    """Operators that DTensor does not dispatch by itself any more."""
    sharded_net(stage=3)
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return {str(operator) for operator in handlers}


def test_products_and_functions_of_one_tensor_stay_with_dtensors_fast_dispatch(pool: Pool) -> None:
    """Tensor parallelism runs these for every layer, whatever is sharded; a handler costs 10 to 20 us each."""
    (handled,) = pool.run(with_handlers, 1)
    fast = ("mm", "bmm", "addmm", "t", "transpose.int", "detach", "clone", "relu", "silu", "gelu", "exp", "neg")
    assert not handled & {f"aten.{name}" if "." in name else f"aten.{name}.default" for name in fast}
    assert handled >= {"aten.max.default", "aten.select.int", "aten.fill_.Scalar", "aten.mse_loss.default"}


def test_dzero_is_imported_configured_and_explained_without_private_modules(tmp_path: Path) -> None:
    """In a cold start: a warm one has imported all of them."""
    script = f"""
import sys, torch, torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.tensor.parallel
import torch.distributed.pipelining, torch.distributed.checkpoint, torch.utils.flop_counter
for module in {PRIVATE}:
    sys.modules[module] = None
for name in {GONE}:
    owner, _, attribute = name.rpartition(".")
    delattr(sys.modules[owner], attribute)
del torch._C._disabled_torch_function_impl
import dzero
from pathlib import Path
from dzero import __main__, overrides
for name in dzero.__all__:
    getattr(dzero, name)
overrides.composed(["data.path=x"], Path({str(CONF)!r}))
for words in (["--help"], ["train", "--help"]):
    sys.argv = ["dzero", *words]
    try:
        __main__.main()
    except SystemExit as end:
        assert not end.code
"""
    run = in_a_process("-c", script, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "usage: dzero [-h]" in run.stdout
    assert "dzero train zero.stage=3" in run.stdout
