"""Pages of reference that are made from the code: `python docs/scripts/reference.py` writes them into docs/reference/.

    page                 made from
    settings.md          the configuration's dataclasses, as `dzero train --help` shows them
    support.md           the table of rules in dzero/compatibility.py
    deepspeed_keys.md    the table of dzero/integrations/deepspeed/config_keys.py
    modules.md           the first line of every module's docstring

They are committed, for whoever reads the repository and not the site; `tests/test_docs.py` holds that they are current.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from deepspeed_keys import keys
from support_matrix import support

from dzero.cli.settings_help import groups

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


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


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "settings.md": settings,
    "support.md": support,
    "deepspeed_keys.md": keys,
    "modules.md": modules,
}


def text(page: str) -> str:
    """Return what a page says."""
    return "\n".join(PAGES[page]()).rstrip("\n") + "\n"


if __name__ == "__main__":
    for name in PAGES:
        (REFERENCE / name).write_text(text(name), encoding="utf-8")
