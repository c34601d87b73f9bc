"""Random settings through the real command: no traceback, no hang, and an exit code of 0 or 1.

DZERO_CASES=300 DZERO_SEED=0 pytest -m slow tests/stress/test_settings.py
                                                writes benchmarks/results/settings-stress-<seed>.json

Cases start warm, so that one costs seconds; some are started as a user starts them.
"""

from __future__ import annotations

import random
import re
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from rows import count, write_row
from small_runs import SMALL, write_text
from typed_commands import in_a_process, typed

REAL_SHARE = 0.05
BASE = [*SMALL.split(), "train.steps=2", "train.evaluate_batches=1", "monitor.tensorboard=false"]
ABSURD = ["nan", "inf", "-inf", "-1", "0", "1", "2", "3", str(2**31), str(2**63), str(2**64), "1e308", "1e-300", "null"]
WORDS = {
    "zero.stage": ["0", "1", "2", "3"],
    "precision": ["bf16", "fp16", "fp32", "bf16_remainder"],
    "offload": ["none", "host", "host_all", "disk", "infinity"],
    "offload.overlap": ["auto", "step", "forward", "backward", "delayed"],
    "offload.activations": ["device", "host", "disk"],
    "block.activation_checkpoint": ["none", "selective", "full"],
    "optim.rule": ["adamw", "muon", "SGD", "Adafactor"],
    "zero.optimizer_shard_axes": ["[shard]", "[replicate,shard]"],
    "zero.reduction": ["auto", "exact", "native"],
    "schedule.kind": ["constant", "cosine", "wsd"],
    "mesh.pp_schedule": ["1f1b", "gpipe", "interleaved", "zero_bubble"],
    "mesh.cp_attention": ["all_gather", "ulysses", "ring"],
    "model": ["tiny", "tiny_moe"],
    "checkpoint.on_error": ["stop", "warn"],
    "monitor.log_every_steps": ["1", "5"],
}
NUMBERS = re.findall(
    r"\S+",
    """
    train.microbatch_sequences train.sequence_tokens train.accumulate train.global_sequences train.seed
    train.evaluate_every_steps train.max_skipped_steps optim.lr optim.eps optim.max_norm
    optim.weight_decay mesh.dp mesh.tp mesh.pp mesh.cp mesh.ep mesh.replicate mesh.pp_stages_per_rank
    launch.workers launch.threads launch.timeout_s checkpoint.every checkpoint.keep
    checkpoint.deadline_s checkpoint.staging_bytes offload.prefetch_units offload.undo_bytes
    offload.delay_warmup_steps offload.param_fraction offload.master_fraction offload.disk.threads
    offload.disk.block_bytes block.tiles block.loss_tiles scaler.init scaler.growth_interval
    schedule.warmup_steps schedule.decay_steps schedule.final model.hidden_size model.layers model.heads
    model.kv_heads model.ffn_size model.vocab_size model.experts model.top_k model.rope_theta
    model.norm_eps data.held_out zero.reshard_after_forward profile.start_step profile.steps
    hardware.device_bytes verify.steps lr optim.betas
    """,
)


def drawn(source: random.Random) -> list[str]:
    """One to five random settings: words that exist, and numbers of which most are absurd."""
    words = [f"{key}={source.choice(WORDS[key])}" for key in source.sample([*WORDS], source.randint(0, 3))]
    chosen = source.sample(NUMBERS, source.choice([0, 0, 1, 1, 2]))
    return words + [f"{key}={source.choice(ABSURD)}" for key in chosen] or ["train.steps=1"]


def outcome(settings: list[str], data: Path, folder: Path, *, real: bool) -> tuple[str, str]:
    """`trained`, `refused`, or what went wrong; and the output."""
    folder.mkdir()
    try:
        ended = (in_a_process if real else typed)("train.py", *BASE, f"data.path={data}", *settings, cwd=folder)
    except subprocess.TimeoutExpired as error:
        return "hung", str(error.stdout)
    told = ended.stdout + ended.stderr
    if "Traceback" in told or ended.returncode not in (0, 1):
        return ("traceback" if "Traceback" in told else f"exit code {ended.returncode}"), told
    return ("trained" if ended.returncode == 0 else "refused"), told


@pytest.mark.slow
def test_random_settings_train_or_are_refused(tmp_path: Path) -> None:
    cases, seed, data = count("CASES"), count("SEED", 0), write_text(tmp_path / "text.txt")
    source, counts, wrong, began_s = random.Random(seed), Counter[str](), list[dict[str, str]](), time.monotonic()
    for number in range(cases):
        settings, real = drawn(source), source.random() < REAL_SHARE
        how, told = outcome(settings, data, tmp_path / str(number), real=real)
        counts[how] += 1
        counts["from a cold start"] += real
        if how not in ("trained", "refused"):
            wrong.append({"settings": " ".join(settings), "how": how, "told": told[-2000:]})
    question = "Do random settings ever end the command with a traceback, with another exit code, or not at all?"
    figures = {"counts": dict(counts), "seconds": round(time.monotonic() - began_s), "wrong": wrong}
    write_row(f"settings-stress-{seed}", question, __file__, {"CASES": cases, "SEED": seed}, **figures)
    assert wrong == []
