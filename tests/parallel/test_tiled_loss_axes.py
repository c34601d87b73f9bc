"""The loss in tiles where the vocabulary, the layers or the sequences are cut: numbers, bytes and traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocated_peak import allocated_peak_bytes
from pool import Pool
from small_runs import settled, train, write_text
from torch import Tensor, nn

from dzero import make_mesh, parallelize, tile_loss
from dzero.data.batch import IGNORED
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama
from dzero.parallel.tiling.loss import losses_of
from dzero.plan.run_layout import workers_of
from dzero.zero.dtensors import local_of

FP32 = 1e-6
SHAPE = LlamaShape(vocab_size=96, hidden_size=32, layers=1, heads=4, kv_heads=4, ffn_size=48)


def batch(tokens: int = 12, vocab: int = 96) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, targets = torch.randint(vocab, (2, 2, tokens), generator=generator)
    targets[0, :3] = IGNORED
    return ids, targets


def model_of(shape: LlamaShape) -> Llama:
    torch.manual_seed(1)
    model = Llama(shape)
    with torch.no_grad():
        model.head.weight.mul_(20)
    return model


def split(rank: int, ranks: int, n: int, tied: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradients of the head and of what is before it, with the vocabulary over the ranks."""
    model = model_of(LlamaShape(**{**vars(SHAPE), "tied": tied}))
    if n > 1:
        tile_loss(model, n, by_tokens=True)
    cut = parallelize(model, make_mesh("cpu", tp=ranks))
    tokens, targets = batch()
    with cut.loss():
        loss = losses_of(model, targets, lambda: model(tokens))
        loss.backward()  # type: ignore[no-untyped-call]
    grads = {name: getattr(param.grad, "full_tensor", lambda g=param.grad: g)() for name, param in named(model)}
    return float(local_of(loss.detach())), grads


def named(model: nn.Module) -> list[tuple[str, Any]]:
    """The parameters that tp cuts; gradients of the others are summed over its ranks by the optimizer."""
    return [(name, param) for name, param in model.named_parameters() if "norm" not in name]


@pytest.mark.parametrize(("ranks", "n", "tied"), [(2, 5, False), (4, 3, True)])
def test_over_a_split_vocabulary_loss_and_gradients_are_those_of_whole_logits(
    pool: Pool, ranks: int, n: int, tied: bool
) -> None:
    model = model_of(LlamaShape(**{**vars(SHAPE), "tied": tied}))
    tokens, targets = batch()
    want = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    want.backward()  # type: ignore[no-untyped-call]
    for loss, grads in pool.run(split, ranks, n, tied):
        assert loss == pytest.approx(float(want.detach()), rel=FP32)
        for name, param in named(model):
            assert (grads[name] - param.grad).norm() <= 2 * FP32 * param.grad.norm(), name


def peak(rank: int, ranks: int, n: int) -> int:
    """Peak of forward and backward of a head whose vocabulary is large."""
    tokens, vocab = 256, 4096
    shape = LlamaShape(vocab_size=vocab, hidden_size=8, layers=1, heads=2, kv_heads=2, ffn_size=8)
    model = Llama(shape)
    if n > 1:
        tile_loss(model, n, by_tokens=True)
    cut = parallelize(model, make_mesh("cpu", tp=ranks))
    ids = torch.randint(vocab, (1, tokens))

    def run() -> None:
        with cut.loss():
            losses_of(model, ids, lambda: model(ids)).backward()  # type: ignore[no-untyped-call]

    return allocated_peak_bytes(run, torch.device("cpu"))


def test_over_a_split_vocabulary_logits_exist_one_tile_at_a_time(pool: Pool) -> None:
    """A rank's logits of all tokens are [256, 2048] in fp32; whole, several of that size exist at once."""
    of_logits, n = 256 * 2048 * 4, 8
    assert min(pool.run(peak, 2, 1)) > 2 * of_logits
    assert max(pool.run(peak, 2, n)) < 4 * of_logits / n + 0.2 * of_logits


def wrong(rank: int, ranks: int) -> None:
    model = model_of(SHAPE)
    tile_loss(model, 2, by_tokens=True)
    parallelize(model, make_mesh("cpu", tp=ranks))
    tokens, targets = batch()
    with pytest.raises(IndexError):
        losses_of(model, torch.full_like(targets, 96), lambda: model(tokens))


def test_targets_that_are_no_ids_are_refused(pool: Pool) -> None:
    pool.run(wrong, 2)


LINES = [
    "mesh.tp=2 zero.stage=3 model.kv_heads=2",
    "mesh.pp=2 train.accumulate=2 zero.stage=2",
    "mesh.cp=2 zero.stage=3",
    *(
        pytest.param(line, marks=pytest.mark.full)
        for line in (
            "mesh.pp=2 train.accumulate=2 mesh.pp_schedule=zero_bubble model.layers=4",
            "mesh.pp=2 train.accumulate=2 mesh.pp_schedule=interleaved mesh.pp_stages_per_rank=2 model.layers=4",
            "mesh.tp=2 mesh.pp=2 train.accumulate=2 model.kv_heads=2",
            "mesh.tp=2 mesh.cp=2 model.kv_heads=2 block.activation_checkpoint=full",
            "mesh.tp=2 zero.stage=1 model.kv_heads=2 model.tied=true",
            "mesh.tp=2 model.kv_heads=2 block.compile=true",
        )
    ),
]


@pytest.mark.parametrize("line", LINES)
def test_train_py_trains_with_tiles_as_with_whole_logits(pool: Pool, tmp_path: Path, line: str) -> None:
    """With as many tiles as are set; traffic is that of theory."""
    text, losses = write_text(tmp_path / "text.txt"), {}
    for n in (1, 3):
        run = settled(text, "precision=fp32", f"block.loss_tiles={n}", *line.split())
        told = pool.run(train, workers_of(run), run, tmp_path / str(n), timeout_s=300)
        assert all(each.agrees for each in told)
        losses[n] = [[*each.losses, each.held_out] for each in told]
    for one, other in zip(losses[1], losses[3], strict=True):
        assert other == pytest.approx(one, rel=FP32)
