"""What do parameters and gradients of 8 and 4 bits on the wire cost in loss? The default run on two ranks, at stage 3.

    python benchmarks/quantized_losses.py --set train.steps=500

    side             precision.gather   precision.reduce
    exact            param              auto: bf16 payloads, fp32 sums
    gather int8      int8 (qwZ)         auto
    gather int4      int4               auto
    reduce int8      param              int8
    reduce int4      param              int4 (qgZ)
    int8 and int4    int8               int4, the payloads of ZeRO++ (Wang et al. 2023)

The run is that of `default_runs.py`. fp8 and error feedback: `float8_wire_losses.py`.
"""

from __future__ import annotations

from default_runs import compare

STAGE = ["zero.stage=3"]
SIDES = {
    "exact": STAGE,
    "gather int8": [*STAGE, "precision.gather=int8"],
    "gather int4": [*STAGE, "precision.gather=int4"],
    "reduce int8": [*STAGE, "precision.reduce=int8"],
    "reduce int4": [*STAGE, "precision.reduce=int4"],
    "int8 and int4": [*STAGE, "precision.gather=int8", "precision.reduce=int4"],
}

if __name__ == "__main__":
    compare("quantized_losses", __doc__, SIDES, ranks=2)
