"""The papers' published figures, which stand nowhere else, against what their assumptions give."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from papers.arithmetic import (
    bandwidth_for,
    deepest,
    efficiency,
    infinity_need,
    largest,
    layout_of,
    missing_tiers,
    on_device,
    own_bytes,
    own_infinity_need,
    widest_that_fits,
    zero_bytes,
)
from papers.assumptions import Papers, Shape, read_papers

from dzero import OffloadConfig

CONF = Path(__file__).parents[2] / "conf"
GB = 1e9

TABLE_1 = {
    "7.5 B": "120 120 120 / 52.5 41.3 30 / 35.6 21.6 7.5 / 31.4 16.6 1.88 / 30.4 15.4 0.47 / 30.1 15.1 0.12",
    "128 B": "2048 2048 2048 / 896 704 512 / 608 368 128 / 536 284 32 / 518 263 8 / 513 257 2",
    "1 T": "16000 16000 16000 / 7000 5500 4000 / 4750 2875 1000 / 4187 2218 250 / 4046 2054 62.5 / 4011 2013 15.6",
}
"""GB per device with Pos, Pos+g, Pos+g+p / for each of 1, 4, 16, 64, 256 and 1024 ranks (ZeRO 2020, table 1)."""


@pytest.fixture(scope="module")
def papers() -> Papers:
    return read_papers()


@pytest.mark.parametrize("name", TABLE_1)
def test_table_1_of_zero(papers: Papers, name: str) -> None:
    """To less than one unit of the last printed digit: the paper rounds some figures and cuts others."""
    (model,) = (model for model in papers.zero.models if model.name == name)
    assert papers.zero.ranks == [1, 4, 16, 64, 256, 1024]
    for ranks, line in zip(papers.zero.ranks, TABLE_1[name].split(" / "), strict=True):
        for published, stage in zip(line.split(), papers.zero.stages.values(), strict=True):
            last_digit = 10.0 ** -len(published.partition(".")[2])
            computed = zero_bytes(papers.zero, model.elems, stage, ranks)
            assert computed / GB == pytest.approx(float(published), abs=last_digit * 0.999)


def test_the_largest_models_of_zero_offload(papers: Papers) -> None:
    """Abstract and section 6.2: 1.4 B with PyTorch and 13 B with ZeRO-Offload on one V100 of 32 GB.

    13 B is a row of the paper's table of models, the largest that fits. 1.4 B is none: it is the deepest model of the
    row's width that fits with 20 bytes per parameter (2 %: the figure has two digits), and lies below that with 16.
    """
    offload = papers.offload
    pytorch, pytorch_fp32, zero_offload = (
        (lambda shape, count=system.bytes: count * shape.elems) for system in offload.systems
    )
    model = largest(offload, pytorch_fp32)
    assert model is not None
    found = deepest(on_device(offload, pytorch_fp32, model), model.hidden, offload.device_bytes)
    least = deepest(on_device(offload, pytorch, model), model.hidden, offload.device_bytes)
    assert found is not None
    assert least is not None
    assert found.elems == pytest.approx(1.4e9, rel=0.02)
    assert least.elems > 1.4e9
    offloaded = largest(offload, zero_offload)
    assert offloaded is not None
    assert offloaded.shape.elems == pytest.approx(13e9, rel=0.01)


def test_own_bytes_train_the_same_largest_model(papers: Papers) -> None:
    host = OffloadConfig(grad="host", master="host", moments="host")
    found = largest(papers.offload, lambda shape: own_bytes(layout_of(0, 1, host), shape)["device"])
    assert found is not None
    assert found.name == "13 B"
    took = own_bytes(layout_of(0, 1, host), found.shape)
    assert took["host"] == 14 * found.shape.elems
    assert took["device"] == 2 * found.shape.elems + 2 * 12 * found.hidden**2 * 2


def test_the_models_of_zero_infinity_fit_where_it_trained_them(papers: Papers) -> None:
    """Abstract and figure 1: 1 T on one DGX-2 node; 32 T on 32 of them, 512 V100.

    Both are capacities named in round figures: they fit, and the node's other memory is far too small for the states.
    """
    infinity = papers.infinity
    for model, elems, devices in zip(infinity.models, (1e12, 32e12), (16, 512), strict=True):
        assert (model.elems, model.nodes * infinity.devices_per_node) == (elems, devices)
        need = infinity_need(infinity, model)
        assert missing_tiers(infinity, need) == []
        assert need["disk"] > 10 * infinity.host_bytes
        assert 1 < infinity.disk_bytes / need["disk"] < 1.5


def test_own_bytes_keep_a_trillion_on_a_node_and_need_a_narrower_32_trillion(papers: Papers) -> None:
    infinity = papers.infinity
    one, many = infinity.models
    assert missing_tiers(infinity, own_infinity_need(infinity, one)) == []
    assert widest_that_fits(infinity, one) == one
    assert missing_tiers(infinity, own_infinity_need(infinity, many)) == ["device"]  # attention is not tiled
    narrower = widest_that_fits(infinity, many)
    assert narrower is not None
    assert narrower.hidden < many.hidden
    assert narrower.shape.elems == pytest.approx(32e12, rel=0.01)


def test_figure_2a_of_zero_infinity(papers: Papers) -> None:
    """Model states in TB of 2^40 bytes, GB of the largest operator; hidden sizes in K of 1024."""
    for layers, thousands, tib, gib in ((100, 20, 9.16, 6.25), (128, 25, 18.31, 9.77), (195, 64, 182.81, 64.0)):
        shape = Shape(layers=layers, hidden=thousands * 1024)
        assert papers.infinity.bytes * shape.elems / 2**40 == pytest.approx(tib, abs=0.01)
        assert 16 * shape.hidden**2 / 2**30 == pytest.approx(gib, abs=0.005)


def test_bandwidths_of_zero_infinity(papers: Papers) -> None:
    """Section 4.2, on V100s of 70 TFLOP/s and sequences of 1,024 tokens; each published bandwidth is rounded up."""
    e = papers.efficiency
    params, optimizer = e.param_intensity(1), e.optimizer_intensity(2)
    assert (params, optimizer, e.checkpoint_intensity(2048)) == (1024, 1024 * 2 / 4, 24 * 2048)  # equations 9 to 11
    # "with a bandwidth of over 70 GB/s for parameters and gradients, over 50 % efficiency for even the smallest batch"
    assert bandwidth_for(0.5, params, e.achievable_flops) == pytest.approx(70e9, rel=0.03)
    assert efficiency(params, 70e9, e.achievable_flops) > 0.5
    # "nearly 4x higher bandwidth" for optimizer states at one batch
    assert bandwidth_for(0.5, e.optimizer_intensity(1), 1.0) / bandwidth_for(0.5, params, 1.0) == 4
    # "90 % efficiency with a batch of 2 per GPU requires nearly 1.5 TB/s": at 1.5 TB/s it is 91.6 %
    assert efficiency(optimizer, 1.5e12, e.achievable_flops) == pytest.approx(0.9, abs=0.02)
    # "2 GB/s sustains over 50 % for a hidden size of 2K ... less than 1 GB/s over 8K"
    assert efficiency(e.checkpoint_intensity(2048), 2e9, e.achievable_flops) > 0.5
    assert efficiency(e.checkpoint_intensity(8192), 1e9, e.achievable_flops) > 0.5


def test_results_follow_from_the_assumptions(papers: Papers) -> None:
    """Other assumptions, other results: nothing published is in the computation."""
    zero = replace(papers.zero, bytes={kind: 2 * count for kind, count in papers.zero.bytes.items()})
    assert zero_bytes(zero, 10**9, 2, 64) == 2 * zero_bytes(papers.zero, 10**9, 2, 64)
    roomy = replace(papers.offload, device_bytes=10 * papers.offload.device_bytes)
    found = largest(roomy, lambda shape: 2 * shape.elems)
    assert found is not None
    assert found.name == "20 B"
    assert largest(replace(roomy, device_bytes=10**6), lambda shape: 2 * shape.elems) is None
    assert deepest(lambda shape: shape.layers, 64, 1000.5) == Shape(layers=1000, hidden=64)


def test_the_node_of_zero_infinity_is_the_dgx_2_of_conf(papers: Papers) -> None:
    node = OmegaConf.load(CONF / "hardware/dgx2_v100.yaml")
    infinity = papers.infinity
    assert (node.disk_bytes, node.host_bytes) == (infinity.disk_bytes, infinity.host_bytes)
    assert node.devices_per_node == infinity.devices_per_node
    assert node.device_bytes == pytest.approx(infinity.device_bytes, rel=0.01)  # as the driver tells it
    assert float(node.fp16_flops) * float(node.efficiency) == pytest.approx(papers.efficiency.achievable_flops)


def test_the_script_prints_every_table(papers: Papers, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(CONF.parent / "benchmarks" / "paper_tables.py"), run_name="__main__")
    told = capsys.readouterr().out
    for title, count in {
        "2020, table 1": len(papers.zero.models),
        "2021, section 6.2": 1,
        "2021, section 4)": 2,
    }.items():
        assert told.count(title) == count
    assert told.count("ZeRO-Infinity, Rajbhandari et al. 2021") == 3
