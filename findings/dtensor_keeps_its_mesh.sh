#!/usr/bin/env bash
# A process that makes and destroys gloo groups, with one DTensor in each: is a group gone once everything was deleted,
# destroy_process_group() and torch's own function that clears the caches of DTensor were called, and garbage collected?
# A good guess says: yes, with every torch, but perhaps for the last one.
# Seen: not with torch 2.12. `detach` alone keeps the mesh for ever, and the mesh keeps the group with its two threads,
# which wake up a hundred times a second; `mul` does not. In a test suite that is 1,800 threads after 600 tests.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/cycles.py" <<'PY'
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def cycle(operation):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    operation(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    del mesh
    dist.destroy_process_group()
    _clear_sharding_prop_cache()
    gc.collect()


def kept():
    meshes = sum(type(each) is DeviceMesh for each in gc.get_objects())
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return f"{meshes} meshes, {names.count('pt_gloo_runloop')} threads of groups"


version = ".".join(torch.__version__.split(".")[:2])
operations = {"mul": lambda a: a * a, "detach": lambda a: a.detach()}
for _ in range(10):
    cycle(operations[sys.argv[1]])
print(f"torch {version}, ten groups, {sys.argv[1]}: {kept()}")
PY
echo "A good guess: no more than the last mesh and its two threads each time."
for version in 2.12.1 2.13.0; do
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install -q "torch==$version" "numpy==2.3.4" 2>/dev/null
    "$folder/venv/bin/python" -c 'import platform, torch; print("torch", torch.__version__, "python", platform.python_version())'
    for name in mul detach; do
        GLOO_SOCKET_IFNAME=lo "$folder/venv/bin/python" "$folder/cycles.py" "$name" | tee -a "$folder/seen"
    done
    rm -rf "$folder/venv"
done
diff - "$folder/seen" <<'SEEN'
torch 2.12, ten groups, mul: 1 meshes, 2 threads of groups
torch 2.12, ten groups, detach: 10 meshes, 20 threads of groups
torch 2.13, ten groups, mul: 1 meshes, 2 threads of groups
torch 2.13, ten groups, detach: 0 meshes, 0 threads of groups
SEEN
