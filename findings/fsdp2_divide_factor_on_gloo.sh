#!/usr/bin/env bash
# FSDP2 on CPUs: does set_gradient_divide_factor work with gloo, where fully_shard itself does?
# A good guess says: yes, it is a number by which gradients are divided, and 1.0 gives their sum.
# Seen: backward raises for gloo's missing PREMUL_SUM, unless set_force_sum_reduction_for_comms(True) was called too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" "numpy==2.3.4" 2>/dev/null
cat >"$folder/factor.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
for force in (False, True):
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)
    if force:
        model.set_force_sum_reduction_for_comms(True)
    try:
        model(torch.full((1, 4), float(rank + 1))).sum().backward()
        seen = f"gradient {model.weight.grad.full_tensor()[0, 0].item()}"  # 1 of rank 0 and 2 of rank 1: the sum is 3
    except RuntimeError as error:
        seen = "PREMUL_SUM" if "PREMUL_SUM" in str(error) else f"another error: {error}"
    if rank == 0:
        print(f"force_sum_reduction={force}: {seen}", flush=True)
dist.destroy_process_group()
sys.exit(0)
PY
"$folder/venv/bin/python" -c 'import torch, platform; print("torch", torch.__version__, "python", platform.python_version())'
echo "A good guess: gradient 3.0 both times."
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/factor.py" 2>"$folder/errors" | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
force_sum_reduction=False: PREMUL_SUM
force_sum_reduction=True: gradient 3.0
SEEN
