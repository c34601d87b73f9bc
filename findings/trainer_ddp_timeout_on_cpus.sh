#!/usr/bin/env bash
# transformers on CPUs: does TrainingArguments(ddp_timeout=...) set the timeout of the process group that it makes?
# A good guess says: yes, on every device; the documentation names init_process_group's timeout and no device.
# Seen: with use_cpu=True the group has torch's 30 minutes, so a lost rank is waited for that long.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" "numpy==2.3.4" "transformers==5.24.0" "accelerate==1.15.0" 2>/dev/null
cat >"$folder/timeout.py" <<'PY'
import torch
import torch.distributed as dist
from transformers import TrainingArguments

args = TrainingArguments(output_dir="out", use_cpu=True, ddp_timeout=8, report_to=[])
_ = args.device  # joins the process group
group = dist.group.WORLD
timeout = group._get_backend(torch.device("cpu")).options._timeout
print(f"ddp_timeout={args.ddp_timeout} {dist.get_backend()} timeout={timeout}", flush=True)
dist.destroy_process_group()
PY
"$folder/venv/bin/python" -c 'import accelerate, platform, torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__, "accelerate", accelerate.__version__, "python", platform.python_version())'
echo "A good guess: timeout=0:00:08."
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node=1 "$folder/timeout.py" 2>"$folder/errors" | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
ddp_timeout=8 gloo timeout=0:30:00
SEEN
