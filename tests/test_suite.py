"""The suite itself: what is left out of the default suite is asked there by a named test, and few files look inside."""

from __future__ import annotations

import ast
import runpy
from functools import cache
from pathlib import Path

import dzero

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
OUTSIDE = {"dzero", "dzero.testing", "dzero.integrations.accelerate", "dzero.integrations.transformers"}
"""What the documentation tells users to import."""
MOST_INSIDE, MOST_LINES = 60, 44_000
LEFT_OUT = ("full", "slow", "gpu")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> set[str]:
    """Modules of dzero that a file imports, also within functions, and `dzero.x` for an x that is no public name."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "dzero":
            names = {alias.name for alias in node.names} - {*dzero.__all__, "__version__"}
            found |= {"dzero"} | {f"dzero.{name}" for name in names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] == "dzero"}


def marks(nodes: list[ast.expr]) -> dict[str, ast.expr]:
    """The marks of pytest among expressions, by name."""
    found = {}
    for node in nodes:
        for each in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            mark = each.func if isinstance(each, ast.Call) else each
            if ast.unparse(mark).startswith("pytest.mark."):
                found[ast.unparse(mark).removeprefix("pytest.mark.")] = each
    return found


@cache
def functions() -> dict[str, dict[str, ast.expr]]:
    """The marks of every test function, with those of its file, by file::function."""
    found = {}
    for path in FILES:
        assigned = [node for node in tree(path).body if isinstance(node, ast.Assign)]
        whole = marks([each.value for each in assigned if ast.unparse(each.targets[0]) == "pytestmark"])
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = f"{path.relative_to(TESTS.parent)}::{node.name}"
                found[name] = whole | marks(node.decorator_list)
    return found


def text_of(node: ast.expr, path: Path) -> str:
    """What an expression of texts is, which may name texts of the file."""
    assigned = [
        each for each in tree(path).body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)
    ]
    texts = {ast.unparse(each.targets[0]): ast.literal_eval(each.value) for each in assigned}
    if isinstance(node, ast.Name):
        return str(texts[node.id])
    if isinstance(node, ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.FormattedValue) else each for each in node.values]
        return "".join(text_of(part, path) for part in parts)
    return str(ast.literal_eval(node))


def default_tests() -> set[str]:
    return {name for name, each in functions().items() if not each.keys() & {*LEFT_OUT}}


def test_what_the_default_suite_leaves_out_is_asked_there_by_a_named_test() -> None:
    default, wrong = default_tests(), []
    for name, each in functions().items():
        if (mark := each.get("full")) is None:
            continue
        words = (
            [text_of(arg, TESTS.parent / name.split("::")[0]) for arg in mark.args]
            if isinstance(mark, ast.Call)
            else []
        )
        if len(words) != 1 or words[0] not in default:
            wrong.append(f"{name}: full({', '.join(words)})")
    assert wrong == []


def test_each_fault_that_is_planted_names_a_test_of_the_default_suite() -> None:
    faults = runpy.run_path(str(TESTS / "stress" / "mutations.py"))["FAULTS"]
    assert len(faults) >= 20
    assert {fault.caught_by for fault in faults.values()} - default_tests() == set()


def test_few_files_import_what_is_inside() -> None:
    inside = [str(path.relative_to(TESTS)) for path in FILES if imports(path) - OUTSIDE]
    assert len(inside) <= MOST_INSIDE, inside


def test_the_suite_is_no_longer_than_can_be_read() -> None:
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES) <= MOST_LINES
