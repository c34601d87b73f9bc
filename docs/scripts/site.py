"""Pages of the site that are made from the code and the benchmarks' rows; mkdocs runs this (mkdocs.yml).

page                    made from
reference/settings.md   the configuration's dataclasses, as `dzero train --help` shows them
reference/support.md    the table of rules in dzero/compatibility.py
reference/deepspeed_keys.md   the table of dzero/integrations/deepspeed/config_keys.py
reference/modules.md    the first line of every module's docstring
results/                the tables, pictures and the log of benchmarks/
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import mkdocs_gen_files

from dzero.cli.settings_help import groups

sys.path.insert(0, str(Path(__file__).parent))
from deepspeed_keys import keys  # mkdocs runs this file without its folder on the path
from support_matrix import support

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
OUTSIDE = re.compile(r"\[([^\]]*)\]\((?!https?:|#|[\w.-]+\.(?:md|png)(?:#[\w-]+)?\))[^)]*\)")
"""A link to a file that is not in the site."""


def settings() -> Iterator[str]:
    """Yield the lines of the page of all settings."""
    yield "# Settings\n"
    yield "Every setting of `train.py`, from the dataclasses that obey them; `dzero train --help` shows the same.\n"
    for group in groups():
        yield f"## {group.name}\n"
        yield f"{group.meaning}\n"
        if group.options:
            yield f"`{group.name}=` takes {', '.join(f'`{each}`' for each in group.options)}.\n"
        if group.settings:
            yield "| setting | default | meaning |\n| --- | --- | --- |"
        for each in group.settings:
            yield f"| `{each.key}` | `{each.default}` | {each.meaning.replace('|', chr(92) + '|')} |"
        yield ""


def modules() -> Iterator[str]:
    """Yield the lines of the page of all modules."""
    yield "# Modules\n"
    yield "What each file is, by its own first line; `tests/test_architecture.py` holds the order of layers.\n"
    package = ""
    for path in sorted((ROOT / "dzero").rglob("*.py"), key=lambda path: (path.parent != ROOT / "dzero", path)):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if text is None:
            continue
        inside = path.relative_to(ROOT).parent.as_posix()
        if inside != package:
            package = inside
            yield f"\n## {package}\n\n| module | |\n| --- | --- |"
        first = text.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        yield f"| `{path.name}` | {first} |"


def write(page: str, lines: Iterator[str]) -> None:
    """Write a page of the site."""
    with mkdocs_gen_files.open(page, "w") as file:
        file.write("\n".join(lines) + "\n")


def results() -> None:
    """Copy the benchmarks' pages and pictures, in which links to files outside of the site become plain text."""
    for path in [*sorted((BENCHMARKS / "results").glob("*.md")), BENCHMARKS / "LOG.md", BENCHMARKS / "README.md"]:
        text = path.read_text(encoding="utf-8").replace("](results/", "](")
        with mkdocs_gen_files.open(f"results/{path.name}", "w") as file:
            file.write(OUTSIDE.sub(r"\1", text))
    for path in sorted((BENCHMARKS / "results").glob("*.png")):
        with mkdocs_gen_files.open(f"results/{path.name}", "wb") as file:
            file.write(path.read_bytes())


write("reference/settings.md", settings())
write("reference/support.md", support())
write("reference/deepspeed_keys.md", keys())
write("reference/modules.md", modules())
results()
