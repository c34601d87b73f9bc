#!/usr/bin/env bash
# DTensor in torch 2.14: does `detach()` of a number that ranks have in parts ask the other ranks?
# A good guess says: no; detach only leaves the graph, and sends nothing for a sum, a maximum or a mean, whose results
# stay parts until somebody reads them.
# Seen: a norm is reduced by detach(), which sends an all-reduce and returns a replicated number. torch 2.13.0 sent
# nothing. So `if rank == 0: log(weight.norm().detach())` waits for ranks that never come; so does a norm with gradients,
# whose result autograd detaches to save it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.14.1" "numpy==2.3.4" 2>/dev/null
cat >"$folder/detach.py" <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (2,))
group = mesh.get_group()
weight = distribute_tensor(torch.arange(1.0, 9.0).reshape(4, 2), mesh, [Shard(0)])
for name in ("sum", "max", "mean", "norm"):
    number = getattr(weight, name)()
    before = group._get_sequence_number_for_group()
    detached = number.detach()
    sent = group._get_sequence_number_for_group() - before
    if dist.get_rank() == 0:
        print(f"{name}: {number.placements} -> {detached.placements}, collectives: {sent}", flush=True)
dist.destroy_process_group()
PY
"$folder/venv/bin/python" -c 'import platform, torch; print("torch", torch.__version__, "python", platform.python_version())'
echo "A good guess: collectives: 0 in every line."
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/detach.py" 2>"$folder/errors" | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
sum: (Partial(sum),) -> (Partial(sum),), collectives: 0
max: (Partial(max),) -> (Partial(max),), collectives: 0
mean: (Partial(avg),) -> (Partial(avg),), collectives: 0
norm: (_NormPartial(2),) -> (Replicate(),), collectives: 1
SEEN
