#!/usr/bin/env bash
# DTensor: is the gradient of w.amax() that of w.max() and of w.amax(dim=(0, 1)), as in plain torch?
# A good guess says: yes, the three are one number of all elements, and DTensor gives the number itself rightly.
# Seen: the gradient of w.amax() of rows on two ranks is NaN. Its backward sums over dim=[], which DTensor takes for a
# reduction over no dimension: each rank sums its own part, and the result is marked as sharded.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" "numpy==2.3.4" 2>/dev/null
cat >"$folder/largest.py" <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
ways = {"max()": lambda w: w.max(), "amax(dim=(0, 1))": lambda w: w.amax(dim=(0, 1)), "amax()": lambda w: w.amax()}
for name, largest in ways.items():
    w = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]).requires_grad_()
    found = largest(w)
    found.backward()
    number, grad = found.full_tensor().item(), w.grad.full_tensor().flatten().tolist()
    if dist.get_rank() == 0:
        print(f"{name}: {number}, gradient {grad}", flush=True)
dist.destroy_process_group()
PY
"$folder/venv/bin/python" -c 'import torch, platform; print("torch", torch.__version__, "python", platform.python_version())'
echo "A good guess: three times 7.0, gradient [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]."
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/largest.py" 2>"$folder/errors" |
  tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
max(): 7.0, gradient [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
amax(dim=(0, 1)): 7.0, gradient [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
amax(): 7.0, gradient [nan, nan, nan, nan, nan, nan, nan, inf]
SEEN
