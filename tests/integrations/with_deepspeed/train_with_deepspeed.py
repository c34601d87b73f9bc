"""Train a tiny llama with DeepSpeed, convert its checkpoint after some steps, and tell how DeepSpeed itself goes on.

    pip install 'dzero[bench,hf]'
    cd tests/integrations/with_deepspeed
    for stage in 2 3; do DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 train_with_deepspeed.py $stage zero$stage; done

The folder holds `universal/`, and in `facts.json` and `facts.safetensors` what came after it: losses, learning rates
and the parameters at the end. The tests resume from the one and compare with the other.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from tiny_llama import BETAS, DECAY, LR, SAVED, STEPS, batch, config

TAG = "saved"


def main(stage: int, out: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config())
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) is matrices], "weight_decay": decay}
        for matrices, decay in ((True, DECAY), (False, 0.0))
    ]
    optimizer = {"lr": LR, "betas": BETAS, "eps": 1e-8, "weight_decay": DECAY, "torch_adam": True}
    schedule = {"warmup_min_lr": 0, "warmup_max_lr": LR, "warmup_num_steps": 3, "total_num_steps": 40}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
    losses, rates = [], []
    for step in range(STEPS):
        rates.append(engine.get_lr()[0] if step else 0.0)
        tokens = batch(step, dist.get_rank(), dist.get_world_size())
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
        if step + 1 == SAVED:
            engine.save_checkpoint(str(out), tag=TAG)
    with deepspeed.zero.GatheredParameters([*engine.module.parameters()]):
        params = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    if dist.get_rank() == 0:
        save_file(params, out / "facts.safetensors")
        (out / "facts.json").write_text(json.dumps({"losses": losses[SAVED:], "rates": rates[SAVED:]}, indent=1) + "\n")
        convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        subprocess.run([*convert, "--input_folder", out / TAG, "--output_folder", out / "universal"], check=True)
        for name in (TAG, "latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py"):
            path = out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
