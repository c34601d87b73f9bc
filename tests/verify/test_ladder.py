"""What a configuration is compared with: one rung for each thing that changes the order of additions, and no more."""

from __future__ import annotations

import pytest
from small_runs import CONF

from dzero import OffloadConfig
from dzero.overrides import composed
from dzero.verify.config import VerifyRun
from dzero.verify.ladder import BASELINE, ladder

ITSELF = "the configuration"


def rungs(line: str, ranks: int) -> list[tuple[str, bool]]:
    """(name, whether the same bits are expected) of those above the baseline."""
    run = composed([*line.split(), f"launch.workers={ranks}"], CONF, VerifyRun)
    return [(rung.name, rung.allowed is None) for rung in ladder(run, ranks)[1:]]


@pytest.mark.product(keep=8)
@pytest.mark.parametrize(
    ("line", "ranks", "expected"),
    [
        ("zero.stage=0", 2, []),
        ("zero.stage=2", 2, [(ITSELF, True)]),
        ("zero.stage=3 offload=infinity precision=bf16_remainder", 4, [(ITSELF, True)]),
        ("zero.stage=1 train.accumulate=4", 2, [(ITSELF, True)]),
        ("zero.stage=2 train.accumulate=4", 2, [(ITSELF, False)]),
        ("zero.stage=3 train.accumulate=4", 2, [("stage 2 on the device", False), (ITSELF, True)]),
        ("zero.stage=3 mesh.replicate=2", 4, [("stage 1 on the device", False), (ITSELF, True)]),
        (
            "zero.stage=1 mesh.replicate=2 zero.optimizer_shard_axes=[replicate,shard]",
            4,
            [("stage 1 on the device", False), (ITSELF, True)],
        ),
        ("zero.stage=0 block.tiles=2", 2, [(ITSELF, False)]),
        (
            "zero.stage=3 train.accumulate=2 mesh.replicate=2 block.tiles=2 offload=host",
            4,
            [("stage 0 on the device with its tiles", False), ("stage 2 on the device", False), (ITSELF, True)],
        ),
        ("zero.stage=2 offload=host offload.overlap=delayed", 2, [(ITSELF, True)]),
        (
            "zero.stage=2 offload=host offload.overlap=delayed offload.delay_warmup_steps=2",
            2,
            [("updates a step late", False), (ITSELF, True)],
        ),
        ("zero.stage=2 precision.moments=int8", 2, [("stage 1 on the device", False), (ITSELF, True)]),
        ("zero.stage=3 precision.gather=int8", 2, [("stage 1 on the device", False), (ITSELF, True)]),
        ("zero.stage=3 offload=host_all precision.fetch=fp8", 1, [(ITSELF, False)]),
        (
            "zero.stage=3 offload=host_all precision.gather=int8 precision.fetch=fp8",
            2,
            [("stage 1 on the device", False), (ITSELF, False)],
        ),
        (
            "zero.stage=2 precision.reduce=int4 zero.node_ranks=2",
            4,
            [("stage 1 on the device", False), (ITSELF, True)],
        ),
        ("zero.stage=3 zero.node_ranks=2", 4, [(ITSELF, True)]),
        ("zero.stage=3 zero.reduction=native", 2, [(ITSELF, False)]),
        ("zero.stage=2 optim.rule=SGD", 2, [(ITSELF, False)]),
        ("zero.stage=2 optim.rule=Adafactor offload=host", 2, [(ITSELF, True)]),
        ("zero.stage=0 mesh.cp=2", 2, [(ITSELF, False)]),
        ("zero.stage=3 mesh.cp=2 offload=host", 2, [(f"{BASELINE} over cut sequences", False), (ITSELF, True)]),
        (
            "zero.stage=3 mesh.dp=2 mesh.cp=2 train.accumulate=2 block.tiles=2",
            4,
            [
                (f"{BASELINE} with its tiles", False),
                (f"{BASELINE} over cut sequences", False),
                ("stage 2 on the device", False),
                (ITSELF, True),
            ],
        ),
        ("zero.stage=3 mesh.tp=2", 2, [(f"{BASELINE} over cut matrices", False), (ITSELF, True)]),
        ("zero.stage=3 offload=host precision.compute=fp8_rowwise", 2, [(ITSELF, True)]),
        ("zero.stage=0 mesh.pp=2 train.accumulate=2", 2, [(ITSELF, False)]),
        ("zero.stage=1 mesh.ep=2 model=tiny_moe", 2, [(f"{BASELINE} over cut matrices", False), (ITSELF, True)]),
        (
            "zero.stage=3 mesh.dp=2 mesh.replicate=2 mesh.cp=2 mesh.tp=2 mesh.pp=2 train.accumulate=2",
            16,
            [
                (f"{BASELINE} over cut sequences", False),
                (f"{BASELINE} over cut matrices", False),
                (f"{BASELINE} over a pipeline", False),
                ("stage 2 on the device", False),
                (ITSELF, True),
            ],
        ),
        ("zero.stage=3 checkpoint.every=7 resume=auto profile=on", 2, [(ITSELF, True)]),
    ],
)
def test_every_other_order_of_additions_is_a_rung(line: str, ranks: int, expected: list[tuple[str, bool]]) -> None:
    assert rungs(line, ranks) == expected


def test_ranks_that_share_something_do_all_of_it_below_and_a_step_stays_the_same() -> None:
    line = "zero.stage=0 mesh.dp=2 mesh.cp=2 mesh.tp=2 mesh.pp=2 mesh.pp_schedule=gpipe train.accumulate=2"
    run = composed([*line.split(), "train.microbatch_sequences=2", "launch.workers=16"], CONF, VerifyRun)
    meshes = [rung.config.mesh for rung in ladder(run, 16)]
    degrees = [(mesh.dp, mesh.cp, mesh.tp, mesh.pp, mesh.pp_schedule) for mesh in meshes]
    assert degrees == [
        (None, 1, 1, 1, "1f1b"),
        (None, 2, 1, 1, "1f1b"),
        (None, 2, 2, 1, "1f1b"),
        (2, 2, 2, 2, "gpipe"),
    ]
    for rung, mesh in zip(ladder(run, 16), meshes, strict=True):
        assert mesh.readers(mesh.data_ranks(16)) == 2
        assert rung.config.train == run.train


def test_the_baseline_keeps_all_but_what_places_shards_and_tiles() -> None:
    line = "zero.stage=3 mesh.replicate=2 offload=host block.tiles=2 precision=fp16 precision.reduce=fp32 train.seed=7"
    run = composed([*line.split(), "launch.workers=4", "block.activation_checkpoint=full"], CONF, VerifyRun)
    base = ladder(run, 4)[0].config
    assert (base.zero.stage, base.mesh.replicate, base.block.tiles) == (0, 1, 1)
    assert base.offload == OffloadConfig()
    assert (base.precision.param, base.precision.reduce, base.precision.grad) == ("fp16", "fp32", "fp32")
    assert (base.train, base.data, base.optim, base.scaler) == (run.train, run.data, run.optim, run.scaler)
    assert base.block.activation_checkpoint == "full"
