#!/usr/bin/env bash
# torch.distributed.breakpoint(): is the timeout of the process group, 5 s here, still that one once the debugger went on?
# A good guess says: yes; timeout_s is for the time in the debugger, as the source says of it.
# Seen: all groups keep timeout_s, an hour, for the rest of the program: a rank that is lost later is waited for that long.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" "numpy==2.3.4" 2>/dev/null
cat >"$folder/late.py" <<'PY'
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank, before = dist.get_rank(), "without"
dist.all_reduce(torch.ones(1))  # gloo connects
if os.environ["DEBUG"] == "1":
    dist.breakpoint(rank=0)
    before = "with"
if rank == 1:
    time.sleep(9)
began_s = time.monotonic()
try:
    dist.all_reduce(torch.ones(1))
    ended = "answers"
except RuntimeError:
    ended = "raises"
if rank == 0:
    print(f"{before} a breakpoint before: all_reduce {ended} after {time.monotonic() - began_s:.0f} s", flush=True)
os._exit(0)
PY
"$folder/venv/bin/python" -c 'import platform, torch; print("torch", torch.__version__, "python", platform.python_version())'
echo "A good guess: both times it raises after 5 s."
cd "$folder"
export OMP_NUM_THREADS=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo
for debug in 0 1; do
    export DEBUG=$debug
    MASTER_PORT=$("$folder/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    export MASTER_PORT
    RANK=1 "$folder/venv/bin/python" late.py </dev/null 2>>"$folder/errors" &
    echo c | RANK=0 "$folder/venv/bin/python" late.py 2>>"$folder/errors" | grep "all_reduce " | sed 's/.*(Pdb) //' | tee -a "$folder/seen"
    wait
done
diff - "$folder/seen" <<'SEEN'
without a breakpoint before: all_reduce raises after 5 s
with a breakpoint before: all_reduce answers after 9 s
SEEN
