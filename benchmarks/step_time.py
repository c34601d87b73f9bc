"""How fast is a step, and how much memory does it take, against hand-written loops and DeepSpeed?

    python benchmarks/step_time.py --model 21m --rounds 15 --group stages
"""
from __future__ import annotations
import argparse, os
os.environ["OMP_NUM_THREADS"] = "1"
from harness import measure, RANKS
from workload import Workload
import statistics as st

if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="21m"); p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--steps", type=int, default=2); p.add_argument("--samples", type=int, default=4)
    p.add_argument("--tokens", type=int, default=256)
    p.add_argument("--sides", nargs="+")
    a = p.parse_args()
    w = Workload(model=a.model, samples=a.samples, tokens=a.tokens)
    r = measure(a.sides, w, rounds=a.rounds, steps=a.steps)
    base = st.median(r[a.sides[0]].step_s)
    for s, m in r.items():
        t = st.median(m.step_s)
        print(f"{s:20} {t*1e3:8.1f} ms {RANKS*w.step_tokens/t:8.0f} tok/s rel {base/t:.3f} peak {m.peak_bytes>>20} rest {m.rest_bytes>>20} build {m.build_bytes>>20} MiB loss {m.losses[0]:.4f} .. {m.losses[-1]:.4f}")
