"""Models of peft in a loop of one's own: several adapters, of which one is trained at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import dzero as command
from parity_cells import whole
from pool import Pool
from torch import Tensor, nn

import dzero

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
VOCAB = 61
ORDER = ("a", "b", "b", "a")


def two_adapters(*, unfrozen: bool, tied: bool = False) -> Any:
    """A PeftModel with the adapters a and b, of which a is active; `unfrozen`: both require gradients."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    settings = {
        name: peft.LoraConfig(r=2, target_modules=[layer, "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        for name, layer in (("a", "q_proj"), ("b", "o_proj"))
    }
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), settings["a"], adapter_name="a")
    model.add_adapter("b", settings["b"])
    if unfrozen:
        for name, param in model.named_parameters():
            param.requires_grad_(".lora_" in name)
    return model


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))


def steps(model: Any, optim: torch.optim.Optimizer) -> list[float]:
    losses = []
    for name in ORDER:
        model.set_adapter(name)
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value).clone() for name, value in model.state_dict().items() if ".lora_" in name}


def turned(rank: int, ranks: int, stage: int, folder: Path) -> dict[str, Any]:
    """Train the adapters in turn, then save the one that is left."""
    sharded = dzero.shard(two_adapters(unfrozen=True), stage=stage, precision="fp32")
    losses = steps(sharded.model, dzero.AdamW(sharded, lr=1e-2))
    found = {"losses": losses, "adapters": adapters(sharded.model)}
    with pytest.raises(ValueError, match=r"the model has the adapters \['a', 'b'\]: only one is saved"):
        dzero.save_pretrained(sharded, folder / "both")
    sharded.model.delete_adapter("b")
    dzero.save_pretrained(sharded, folder / "a")
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_in_turn_have_the_numbers_of_plain_peft(pool: Pool, tmp_path: Path, stage: int) -> None:
    model = two_adapters(unfrozen=True)
    trained = [param for param in model.parameters() if param.requires_grad]
    losses = steps(model, torch.optim.AdamW(trained, lr=1e-2))
    want = adapters(model)
    for found in pool.run(turned, 2, stage, tmp_path):
        assert found["losses"] == pytest.approx(losses, rel=1e-6)
        assert found["adapters"].keys() == want.keys()
        for name, value in found["adapters"].items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-6)
    loaded = peft.PeftModel.from_pretrained(two_adapters(unfrozen=True).unload(), tmp_path / "a")
    state = {name: value for name, value in loaded.state_dict().items() if ".lora_" in name}
    assert len(state) == 2 * 2 * 2
    for name, value in state.items():
        torch.testing.assert_close(value, want[name.replace(".default.", ".a.")], rtol=0, atol=1e-6)


def switched(rank: int, ranks: int) -> str:
    """Switch to an adapter that was frozen when the model was sharded."""
    sharded = dzero.shard(two_adapters(unfrozen=False), stage=2, precision="fp32")
    optim = dzero.AdamW(sharded, lr=1e-2)
    with pytest.raises(RuntimeError) as told:
        steps(sharded.model, optim)
    return str(told.value)


def test_an_adapter_that_no_optimizer_has_is_refused_at_the_step(pool: Pool) -> None:
    for told in pool.run(switched, 2):
        assert "was frozen in shard() and requires gradients now, which no optimizer would use" in told
        assert "unfreeze all before shard(), then call set_adapter()" in told


def checkpointed(rank: int, ranks: int, folder: Path) -> dict[str, Tensor]:
    """Train one adapter and save a checkpoint; the adapter."""
    model = two_adapters(unfrozen=False, tied=True)
    model.delete_adapter("b")
    sharded = dzero.shard(model, stage=3, precision="fp32")
    optim = dzero.AdamW(sharded, lr=1e-2)
    sharded.model(tokens(), labels=tokens()).loss.backward()
    optim.step()
    with dzero.Checkpointer(dzero.CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
        checkpoints.save(1, {"model": dzero.describe(sharded.model)})
        checkpoints.finish()
    dzero.save_pretrained(sharded, folder / "merged by the loop", merge=True)
    return adapters(sharded.model)


def test_a_checkpoint_of_a_loop_is_exported_alone_and_merged(pool: Pool, tmp_path: Path) -> None:
    want = pool.run(checkpointed, 2, tmp_path / "checkpoints")[0]
    base = two_adapters(unfrozen=False, tied=True).unload()
    base.save_pretrained(tmp_path / "base")
    for name, options in {"adapter": (), "merged": ("--merge", "--base", str(tmp_path / "base"))}.items():
        made = command("export", tmp_path / "checkpoints", tmp_path / name, "--dtype", "fp32", *options)
        assert made.returncode == 0, made.stderr
    state = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").state_dict()
    assert all(torch.equal(state[name.replace(".a.", ".default.")], value) for name, value in want.items())
    folders = (tmp_path / "merged", tmp_path / "checkpoints" / "merged by the loop")
    one, two = (transformers.LlamaForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=0, msg=lambda told, name=name: f"{name}: {told}")
