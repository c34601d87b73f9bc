"""What `import dzero` offers: names, documentation, the presets of `shard`, and what it says of wrong arguments."""

from __future__ import annotations

import inspect
import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from pool import Pool
from torch import nn

import dzero

CONF, DOCS = (Path(__file__).parents[1] / name for name in ("conf", "docs"))
MOST_ARGUMENTS = 7


@pytest.mark.parametrize("name", dzero.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    thing = getattr(dzero, name)
    assert inspect.getdoc(thing)
    assert f"`{name}`" in (dzero.__doc__ or "")
    assert f"::: dzero.{name}\n" in (DOCS / "reference" / "api.md").read_text()


def test_nothing_else_is_shown() -> None:
    assert sorted(dir(dzero)) == sorted([*dzero.__all__, "__version__"])
    with pytest.raises(AttributeError, match="module 'dzero' has no attribute 'shards'; it has"):
        dzero.shards  # noqa: B018


def test_shard_takes_few_arguments() -> None:
    assert len(inspect.signature(dzero.shard).parameters) <= MOST_ARGUMENTS


def layouts(rank: int, ranks: int, group: str, named: dict[str, dict[str, Any]], folder: str) -> list[tuple[Any, Any]]:
    """The table of a model that is sharded with a preset by its name, and with its settings."""
    kind = {"precision": dzero.PrecisionConfig, "offload": dzero.OffloadConfig}[group]

    def layout(given: Any) -> Any:
        return dzero.shard(nn.Linear(8, 8), stage=3, **{group: given}).layout

    with chdir(folder):  # which presets of disks mean
        return [(layout(name), layout(kind(**settings))) for name, settings in named.items()]


@pytest.mark.parametrize("group", ["precision", "offload"])
def test_presets_are_the_files_of_conf(pool: Pool, group: str, tmp_path: Path) -> None:
    files = {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in (CONF / group).glob("*.yaml")}
    for by_name, by_settings in pool.run(layouts, 1, group, files, str(tmp_path))[0]:
        assert by_name == by_settings
    with pytest.raises(TypeError, match="choose one of") as told:
        dzero.shard(nn.Linear(8, 8), **{group: "no preset"})
    assert sorted(re.findall(r"'(\w+)'", str(told.value).partition("choose one of")[2])) == sorted(files)


def shown(rank: int, ranks: int) -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return repr(dzero.shard(model, stage=3, offload="host", precision="bf16"))


def test_the_table_of_a_sharded_model_is_shown(pool: Pool) -> None:
    told = pool.run(shown, 2)[0]
    assert told.startswith("Sharded(Sequential, 3 units, on cpu)\nstage 3 on 1 (replicate) x 2 (shard) ranks\n")
    elems = 2 * (8 * 8 + 8)
    lines = [" ".join(line.split()) for line in told.splitlines()]
    assert f"param 1/2 of each over the shard axis bf16 device {2 * elems // 2} B" in lines
    assert f"moments 1/2 of each over the shard axis fp32 host {8 * elems // 2} B" in lines
