"""`generate` of a sharded model of transformers: the tokens of the whole model, whenever each rank stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from pool import Pool
from torch import Tensor, nn

import dzero

pytest.importorskip("transformers")
pytest.importorskip("peft")
from small_models import adapted, llama, t5

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 2},
}


def decoder() -> Any:
    return llama(eos_token_id=None, pad_token_id=0)


def tokens() -> Tensor:
    return torch.arange(3, 19).view(2, 8)


STOPS = "tests/integrations/test_generate.py::test_ranks_may_stop_at_different_lengths"


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.full(STOPS))])
@on_ranks(2)
def test_ranks_may_stop_at_different_lengths(rank: int, ranks: int, stage: int) -> list[str]:
    """What differs from the whole model, if every rank stops after another number of tokens; then train on."""
    found = []
    for make in (decoder, t5):
        whole = make().eval()
        sharded = dzero.shard(make(), stage=stage, precision="fp32")
        optim = dzero.AdamW(sharded, lr=1e-2)
        for name, asked in ASKED.items():
            asked = asked | {"max_new_tokens": 3 + 4 * rank, "eos_token_id": None, "pad_token_id": 0}
            with pytest.raises(ValueError, match="max_new_tokens"):  # which must leave no trace
                sharded.model.generate(tokens(), max_new_tokens=-1)
            outputs = []
            for model in (whole, sharded.model.eval()):
                torch.manual_seed(rank)
                outputs.append(model.generate(tokens()[:, : 3 + rank], **asked))
            if not torch.equal(*outputs):
                found.append(f"{type(whole).__name__}, {name}")
            sharded.model.train()(input_ids=tokens(), labels=tokens()).loss.backward()
            optim.step()
            whole.load_state_dict(dict(dzero.weights(sharded)), strict=False)
    return found


def alone(rank: int, ranks: int) -> list[tuple[int, ...]]:
    """Shapes of what rank 0 generates while the others do not."""
    shapes = []
    for model in (decoder(), adapted(decoder())):
        sharded = dzero.shard(model, stage=0)
        if rank == 0:
            found = sharded.model.generate(input_ids=tokens()[:, :3], max_new_tokens=2, do_sample=False)
            shapes.append(tuple(found.shape))
        dist.barrier()
    return shapes


def test_at_stage_0_one_rank_may_generate_alone(pool: Pool) -> None:
    assert pool.run(alone, 2)[0] == [(len(tokens()), 5)] * 2


class FSDPLinear(nn.Linear):
    """A class of a user, whose name begins like those that FSDP2 makes."""


@on_ranks(2)
def test_classes_keep_their_names_and_inner_models_save_no_shards(rank: int, ranks: int, tmp_path: Path) -> list[str]:
    names = []
    for _ in range(2):  # FSDP2 keeps its class for the second one
        model = FSDPLinear(2, 2)
        dzero.shard(model)
        names.append(type(model).__name__)
    sharded: Any = dzero.shard(adapted(decoder())).model
    with pytest.raises(RuntimeError, match=r"^save_pretrained of a sharded model has only this rank's shards"):
        sharded.get_base_model().save_pretrained(tmp_path)
    return [name for name in names if name != "FSDPLinear"] + [each.name for each in tmp_path.iterdir()]
