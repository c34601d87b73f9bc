"""Rules of the code, read off the source: who may import whom, and what no file may do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dzero"
# One line is one level; a package imports from packages before it, so within a line from left to right.
LEVELS = """
errors hardware streams rendezvous utils compatibility precedence
data models mesh_config mesh
comm launch
parallel
zero
offload
optim
estimate checkpoint monitor testing
config overrides
plan
trainer
verify
integrations
cli
__main__
"""
ORDER = LEVELS.split()
FILES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [*FILES, ROOT / "train.py"]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


def imports(path: Path) -> set[str]:
    """Our modules that a file imports at its top level."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in whole}
    return {name for name in found if name.split(".")[0] == "dzero"}


def dotted(node: ast.expr) -> str:
    """`a.b.c` for names and attributes, else an empty string."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else f"?.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))


def every(kind: Any = ast.AST) -> Iterator[tuple[Path, Any]]:
    """All nodes of a kind in all files, each with its file."""
    return ((path, node) for path in SOURCES for node in ast.walk(tree(path)) if isinstance(node, kind))


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def test_packages_import_only_from_packages_before_them() -> None:
    packages = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert packages <= set(ORDER)
    for path in FILES:
        if path == PACKAGE / "__init__.py":
            continue
        package = module_of(path).split(".")[1]
        allowed = set(ORDER[: ORDER.index(package) + 1])
        found = imports(path) - ({"dzero"} if package == "__main__" else set())  # which tells the version
        wrong = {name for name in found if name == "dzero" or name.split(".")[1] not in allowed}
        assert not wrong, f"{module_of(path)} imports {sorted(wrong)} from a later package"


def test_no_import_runs_in_a_circle() -> None:
    TopologicalSorter({module_of(path): imports(path) for path in FILES}).prepare()  # which raises CycleError


def test_what_is_ours_is_imported_at_the_top_of_a_file_and_no_global_is_changed() -> None:
    wrong = [
        where(path, node)
        for path, function in every(ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Global)
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dzero")
        or (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "dzero" for a in node.names))
    ]
    assert wrong == []


def test_the_packages_own_file_alone_exports_names() -> None:
    for path in PACKAGE.glob("*/**/__init__.py"):
        assert path.read_text() == "", path


def test_asserts_have_no_effect() -> None:
    """An assert calls nothing but these: python -O must not change what runs."""
    pure = {"isinstance", "all", "any", "len", "type", "issubclass"}
    wrong = [
        where(path, node)
        for path, node in every(ast.Assert)
        for call in ast.walk(node.test)
        if isinstance(call, ast.NamedExpr | ast.Await) or (isinstance(call, ast.Call) and dotted(call.func) not in pure)
    ]
    assert wrong == []


TORCH_FILES = PACKAGE / "integrations" / "deepspeed" / "torch_files.py"
"""The only file that reads what torch.save wrote, in a process of its own."""


def test_one_file_loads_what_torch_saved_and_only_tensors_of_it() -> None:
    (load,) = [call for call in calls(TORCH_FILES) if dotted(call.func) == "torch.load"]
    assert [ast.unparse(each.value) for each in load.keywords if each.arg == "weights_only"] == ["True"]
    safe = [call for call in calls(TORCH_FILES) if dotted(call.func) == "torch.serialization.add_safe_globals"]
    assert [ast.unparse(call.args[0]) for call in safe] == ["[(Inert, name) for name in INERT]"]


def test_nothing_is_unpickled_evaluated_or_run_in_a_shell() -> None:
    forbidden = {"eval", "exec", "os.system", "os.popen", "torch.load", "pickle.load", "pickle.loads", "marshal.loads"}
    false = {"shell", "allow_pickle", "trust_remote_code"}
    wrong = [
        where(path, call)
        for path, call in every(ast.Call)
        if dotted(call.func) in forbidden - ({"torch.load"} if path == TORCH_FILES else set())
        or any(each.arg in false and ast.unparse(each.value) != "False" for each in call.keywords)
    ]
    assert wrong == []


def test_nothing_that_unpickles_a_file_is_imported_or_called_under_any_name() -> None:
    """Under any alias: these modules are not imported at all, of others no reader of pickles is taken or called.

    What dcp reads files with is not taken either, only the interfaces that a reader of ours fulfils."""
    bad = ("pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch.distributed.checkpoint")
    bad += ("torch.package", "torch.serialization", "torch.load", "torch.jit.load", "torch.export.load")
    bad += ("torch.hub.load", "torch.hub.load_state_dict_from_url")
    interfaces = tuple(f"torch.distributed.checkpoint.{name}." for name in ("metadata", "planner", "storage"))
    of_torch_files = {"torch.load", "torch.serialization", "torch.serialization.add_safe_globals"}
    wrong = []
    for path, node in every():
        taken: set[str] = set()
        if isinstance(node, ast.Import):
            taken = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            taken = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
        elif isinstance(node, ast.Attribute):
            taken = {dotted(node)}
        elif isinstance(node, ast.Call) and dotted(node.func) in ("np.load", "numpy.load"):
            safe = any(keyword.arg == "allow_pickle" for keyword in node.keywords)  # and false, by the test above
            taken = set() if safe else {"pickle"}
        taken = {name for name in taken if not f"{name}.".startswith(interfaces)}
        taken -= of_torch_files if path == TORCH_FILES else set()
        wrong += [where(path, node) for name in taken if f"{name}.".startswith(tuple(f"{each}." for each in bad))]
    assert wrong == []


def test_fully_shard_and_its_switches_are_used_where_a_model_is_sharded() -> None:
    switches = {"set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook", "unshard"}
    switches |= {"set_requires_gradient_sync", "set_reshard_after_backward", "set_gradient_divide_factor"}
    switches |= {"set_force_sum_reduction_for_comms", "set_is_last_backward", "set_reshard_after_forward"}
    users = {
        module_of(path)
        for path, node in every(ast.ImportFrom | ast.Call)
        if (isinstance(node, ast.ImportFrom) and any(alias.name == "fully_shard" for alias in node.names))
        or (isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in switches)
    }
    assert users == {"dzero.zero.sharded", "dzero.zero.sharder"}  # what is switched once, and in every microbatch


def test_streams_are_made_in_one_file() -> None:
    """Everything about streams goes through dzero/streams.py, where tests/streams/ puts simulated ones."""
    makers = {f"torch.{module}{kind}" for module in ("", "cuda.", "cpu.") for kind in ("Stream", "Event", "stream")}
    methods = {"current_stream", "default_stream", "set_stream", "wait_stream", "wait_event", "record_stream"}
    methods |= {"record_event", "ExternalStream"}
    used = {
        where(path, node)
        for path, node in every(ast.Attribute)
        if module_of(path) != "dzero.streams"
        and (dotted(node) in makers | {"torch.cuda.synchronize"} or node.attr in methods)
        and not dotted(node).startswith("streams.")
    }
    assert used == set()


def test_nothing_is_stored_on_a_parameter() -> None:
    """Only torch's own fields are set on what is called a parameter, and `setattr` sets no made-up name on one."""
    names = {"p", "param", "parameter", "weight", "bias"}
    own = ("data", "grad", "grad_dtype", "requires_grad")
    wrong = [
        where(path, node)
        for path, node in every(ast.Attribute | ast.Call)
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and dotted(node.value).split(".")[-1] in names
            and node.attr not in own
        )
        or (
            isinstance(node, ast.Call)
            and dotted(node.func) == "setattr"
            and dotted(node.args[0]).split(".")[-1] in names
        )
    ]
    assert wrong == []


SEAMS = {"dzero.utils.torch_internals", "dzero.zero.fsdp_internals", "dzero.parallel.context.ring"}
"""The only modules that name private parts of torch."""
NOT_TORCHS = {
    "_current_frames": "sys",
    "_exit": "os",
    "_register_atexit": "threading",
    "_get_node": "omegaconf",
    "_replace": "named tuples",
    "_init_weights": "transformers",
    "_created_lr_scheduler": "transformers",
    "_optimizers": "accelerate",
    "_is_accelerate_prepared": "accelerate",
}
BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "attrgetter", "__dict__.get", "__dict__.pop")
PRIVATE_MODULE = re.compile(r"torch(\.\w+)*[.:]_\w+")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined(source: ast.Module) -> set[str]:
    """Names that a file defines: functions, classes, variables, fields, and attributes that methods set."""
    found = set()
    for node in ast.walk(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            found.add(node.attr)
    return found


def of_fsdp2() -> set[str]:
    """Attributes of FSDP2's private objects whose names have no underscore, and which dzero does not define itself."""
    seams = [call for call in calls(PACKAGE / "zero" / "fsdp_internals.py") if dotted(call.func) == "Seam"]
    texts = [node.value for seam in seams for node in ast.walk(seam.args[0]) if isinstance(node, ast.Constant)]
    names = {each.strip().split(".")[-1] for text in texts for each in text.split(" or ")}
    ours = set().union(*(defined(tree(path)) for path in FILES if module_of(path) not in SEAMS))
    return {name for name in names if name and not is_private(name)} - ours


def private_of_torch(source: ast.Module, ours: set[str], fsdp2: set[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Line and name of what is private to torch, for all that the source can tell.

    An attribute is ours if it is read from `self`, `cls` or `super()` and any file of dzero defines it (`ours`), or if
    this file does. The name of a logger is no use of it: if torch renames it, its messages are shown.
    """
    here = defined(source)
    named = [
        node for node in ast.walk(source) if isinstance(node, ast.Call) and dotted(node.func).endswith("getLogger")
    ]
    loggers = {each for call in named for each in call.args}
    for node in ast.walk(source):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if PRIVATE_MODULE.fullmatch(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name for name in whole if PRIVATE_MODULE.match(name)]
        elif isinstance(node, ast.Attribute):
            own = here | (ours if ast.unparse(node.value) in ("self", "cls", "super()") else set())
            known = node.attr in own and not dotted(node).startswith("torch.")
            if (is_private(node.attr) and not known and node.attr not in NOT_TORCHS) or (
                node.attr in fsdp2 and dotted(node.value) != "fsdp"
            ):
                names = [ast.unparse(node)]
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(BY_NAME):
            texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            names = [t for t in texts if any(map(is_private, t.split("."))) and t not in ours | NOT_TORCHS.keys()]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in loggers:
            names = [node.value] if PRIVATE_MODULE.fullmatch(node.value) else []
        for name in names:
            yield node.lineno, name


def test_three_files_name_private_parts_of_torch() -> None:
    ours, fsdp2 = set().union(*map(defined, map(tree, FILES))), of_fsdp2()
    assert {"fsdp_params", "sharded_param", "unsharded_accumulated_grad"} <= fsdp2
    found = {
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in SOURCES
        if module_of(path) not in SEAMS
        for line, name in private_of_torch(tree(path), ours, fsdp2)
    }
    assert found == set()
    for path in FILES:
        assert module_of(path) not in SEAMS or [*private_of_torch(tree(path), ours)], path


def test_the_seams_import_private_parts_only_where_they_are_used() -> None:
    """Not at the top of a file, where a rename in torch would break `import dzero`; but for type checkers."""
    wrong = [
        where(path, node)
        for path in FILES
        for node in tree(path).body
        if isinstance(node, ast.Import | ast.ImportFrom) and [*private_of_torch(ast.Module([node], []), set())]
    ]
    assert wrong == []


PRIVATE = {
    "import torch.utils._pytree": "torch.utils._pytree",
    "from torch.utils import _pytree": "torch.utils._pytree",
    "torch._ours(a)": "torch._ours",
    "x = tensor._local_tensor": "tensor._local_tensor",
    "x = self._sharded_param_data": "self._sharded_param_data",
    "x = attrgetter('a._spec')": "a._spec",
    "x = held.__dict__.get('_unsharded_param')": "_unsharded_param",
    "x = import_module('torch.utils._pytree')": "torch.utils._pytree",
    "x = elsewhere._ours": "elsewhere._ours",
    "x = group.fsdp_params": "group.fsdp_params",
    "x = self._ours": None,
    "x = super()._ours()": None,
    "self._mine = 1\nx = other._mine": None,
    "x = tensor.__dict__": None,
    "os._exit(1)": None,
    "logging.getLogger('torch.utils._pytree')": None,
}


@pytest.mark.parametrize("line", PRIVATE)
def test_a_private_name_of_torch_is_found(line: str) -> None:
    found = [each for _, each in private_of_torch(ast.parse(line), {"_ours"}, {"fsdp_params"})]
    assert found == ([] if PRIVATE[line] is None else [PRIVATE[line]])
