"""What do 8-bit floats on the wire, and error feedback, cost in loss? The default run on two ranks, at stage 3.

    python benchmarks/float8_wire_losses.py --set train.steps=500

    side          precision.gather   precision.reduce
    exact         param              auto: bf16 payloads, fp32 sums
    gather fp8    fp8                auto
    reduce fp8    param              fp8
    reduce int4   param              int4
    feedback      param              int4, with precision.feedback=true

The run is that of `default_runs.py`. `precision.fetch=fp8` has the bits of a gather in fp8
(tests/offload/test_fetch_in_blocks.py). Integers: `quantized_losses.py`.
"""

from __future__ import annotations

from default_runs import compare

STAGE = ["zero.stage=3"]
SIDES = {
    "exact": STAGE,
    "gather fp8": [*STAGE, "precision.gather=fp8"],
    "reduce fp8": [*STAGE, "precision.reduce=fp8"],
    "reduce int4": [*STAGE, "precision.reduce=int4"],
    "feedback": [*STAGE, "precision.reduce=int4", "precision.feedback=true"],
}

if __name__ == "__main__":
    compare("float8_wire_losses", __doc__, SIDES, ranks=2)
