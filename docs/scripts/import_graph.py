"""Draw which packages and modules of dzero import which, layer by layer.

    python docs/scripts/import_graph.py docs/pictures/imports.png
    python docs/scripts/import_graph.py docs/pictures/imports_before.png --tree ../another/checkout

A box is a package, or a module that is in none (dashed). The number below its name is that of its lines; an edge points
from a box to what it imports, which is always in a row below.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from pathlib import Path

import matplotlib
from PIL import Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PACKAGE_COLOUR, MODULE_COLOUR, EDGE_COLOUR = "#dbe7f3", "#f6e3c5", "#7f8c99"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2], help="the checkout that is drawn")
    options = parser.parse_args()
    imports, lines, packages = graph(options.tree / "dzero")
    draw(options.picture, imports, lines, packages)
    loose = len(lines) - len(packages)
    print(f"{len(packages)} packages, {loose} modules beside them, {sum(lines.values()):,} lines")


def graph(root: Path) -> tuple[dict[str, set[str]], Counter[str], set[str]]:
    """Return who imports whom, the lines of each, and which of them are packages."""
    imports: dict[str, set[str]] = defaultdict(set)
    lines: Counter[str] = Counter()
    packages: set[str] = set()
    names = {path.stem if path.is_file() else path.name for path in root.iterdir()}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts
        box = inside[0].removesuffix(".py")
        if box == "__init__":
            continue
        if len(inside) > 1:
            packages.add(box)
        source = path.read_text(encoding="utf-8")
        lines[box] += source.count("\n")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "dzero":
                continue
            inner = (node.module or "").split(".")[1:2]
            found = set(inner) if inner else {alias.name for alias in node.names}
            imports[box] |= (found & names) - {box}
    return imports, lines, packages


def rows_of(imports: dict[str, set[str]], boxes: set[str]) -> list[list[str]]:
    """Return the boxes in rows, each above all that it imports."""
    depth: dict[str, int] = {}

    def depth_of(box: str) -> int:
        if box not in depth:
            depth[box] = 1 + max((depth_of(other) for other in imports[box] & boxes), default=-1)
        return depth[box]

    rows: dict[int, list[str]] = defaultdict(list)
    for box in sorted(boxes):
        rows[depth_of(box)].append(box)
    return [rows[level] for level in sorted(rows)]


def draw(picture: Path, imports: dict[str, set[str]], lines: Counter[str], packages: set[str]) -> None:
    """Write the picture."""
    rows = rows_of(imports, {*lines})
    widest = max(len(row) for row in rows)
    figure, axes = plt.subplots(figsize=(2.1 * widest + 1, 1.15 * len(rows) + 1))
    place = {
        box: ((number + 0.5) * widest / len(row), level)
        for level, row in enumerate(rows)
        for number, box in enumerate(row)
    }
    for box, others in imports.items():
        for other in others & {*place}:
            (x, y), (to_x, to_y) = place[box], place[other]
            line = {"arrowstyle": "-|>", "color": EDGE_COLOUR, "alpha": 0.35, "lw": 0.8, "shrinkA": 12, "shrinkB": 14}
            axes.annotate("", (to_x, to_y), (x, y), arrowprops=line)
    for box, (x, y) in place.items():
        inside = box in packages
        axes.text(
            x,
            y,
            f"{box}\n{lines[box]:,}",
            ha="center",
            va="center",
            fontsize=9,
            weight="bold" if inside else "normal",
            bbox={
                "boxstyle": "round,pad=0.35",
                "facecolor": PACKAGE_COLOUR if inside else MODULE_COLOUR,
                "linestyle": "-" if inside else "--",
                "edgecolor": "#44515e",
            },
        )
    axes.set_xlim(0, widest)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.axis("off")
    loose = len(lines) - len(packages)
    axes.set_title(f"{len(packages)} packages, {loose} modules in none; lines below the names", fontsize=11)
    figure.savefig(picture, dpi=90, bbox_inches="tight")
    plt.close(figure)
    with Image.open(picture) as drawn:
        few = drawn.convert("RGB").quantize(64)
    few.save(picture, optimize=True)


if __name__ == "__main__":
    main()
