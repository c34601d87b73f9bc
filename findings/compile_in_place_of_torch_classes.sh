#!/usr/bin/env bash
# block.compile() before fully_shard(block), the usual way with FSDP2: how many graphs does a block have that is a class
# of torch.nn (TransformerEncoderLayer, Sequential), and how many a class of one's own with the same forward?
# A good guess says: one each, as torch.compile(block) makes, with and without FSDP2, in torch 2.13 as in 2.14.
# Seen: classes of torch.nn are compiled in place not at all with 2.13, and with 2.14 only without FSDP2. Nothing is
# told, and training is as slow as without; only fullgraph=True raises.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/graphs.py" <<'PY'
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import fully_shard

warnings.filterwarnings("ignore")


class Own(nn.TransformerEncoderLayer):
    def forward(self, x):
        return super().forward(x)


def graphs(cls, way, sharded):
    torch._dynamo.reset()
    counter = CompileCounter()
    block = cls(16, 2, 32, dropout=0.0, batch_first=True)
    if way == "block.compile()":
        block.compile(backend=counter)
    if sharded:
        fully_shard(block)
    called = torch.compile(block, backend=counter) if way == "torch.compile(block)" else block
    called(torch.ones(2, 5, 16)).sum().backward()
    return counter.frame_count


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
version = ".".join(torch.__version__.split(".")[:2])
for cls, way, sharded in (
    (nn.TransformerEncoderLayer, "torch.compile(block)", False),
    (nn.TransformerEncoderLayer, "block.compile()", False),
    (nn.TransformerEncoderLayer, "block.compile()", True),
    (Own, "block.compile()", False),
    (Own, "block.compile()", True),
):
    around = " under fully_shard" if sharded else ""
    print(f"torch {version}, {cls.__name__}, {way}{around}: {graphs(cls, way, sharded)} graphs")
dist.destroy_process_group()
PY
echo "A good guess: 1 graph in every line."
for version in 2.13.0 2.14.1; do
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install -q "torch==$version" "numpy==2.3.4" 2>/dev/null
    "$folder/venv/bin/python" -c 'import platform, torch; print("torch", torch.__version__, "python", platform.python_version())'
    GLOO_SOCKET_IFNAME=lo "$folder/venv/bin/python" "$folder/graphs.py" 2>"$folder/errors" | tee -a "$folder/seen"
    rm -rf "$folder/venv"
done
diff - "$folder/seen" <<'SEEN'
torch 2.13, TransformerEncoderLayer, torch.compile(block): 1 graphs
torch 2.13, TransformerEncoderLayer, block.compile(): 0 graphs
torch 2.13, TransformerEncoderLayer, block.compile() under fully_shard: 0 graphs
torch 2.13, Own, block.compile(): 1 graphs
torch 2.13, Own, block.compile() under fully_shard: 1 graphs
torch 2.14, TransformerEncoderLayer, torch.compile(block): 1 graphs
torch 2.14, TransformerEncoderLayer, block.compile(): 1 graphs
torch 2.14, TransformerEncoderLayer, block.compile() under fully_shard: 0 graphs
torch 2.14, Own, block.compile(): 1 graphs
torch 2.14, Own, block.compile() under fully_shard: 1 graphs
SEEN
