"""File systems without locks, the cache of Hugging Face, that of compiled kernels, and messages that are left out.

They look inside, because of what a test cannot have: other file systems, links that change while they are opened, and
processes that compile at one moment.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from numba.core import caching
from typed_commands import in_a_process

from dzero import RunError
from dzero.checkpoint.store import PARTIAL, CheckpointStore
from dzero.data.config import DataConfig
from dzero.errors import user_errors
from dzero.models.safetensors_reader import StoredTensor
from dzero.offload.scratch_dir import ScratchDir, holders
from dzero.optim import cpu_kernels
from dzero.utils import numba_views
from dzero.utils.file_lock import take
from dzero.utils.hub_cache import cache_folder, local_folder, opened, private_copies, read_bytes
from dzero.utils.library_logs import leave_out


def failing(number: int) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS], ids=errno.errorcode.get)
def without_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flock fails as it does there."""
    monkeypatch.setattr(fcntl, "flock", failing(request.param))


def test_a_lock_is_held_once_and_other_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert take(first) is True
    assert take(second) is False
    os.close(first)
    assert take(second) is True
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        take(second)
    os.close(second)


@pytest.mark.usefixtures("without_locks")
def test_checkpoints_are_saved_and_those_of_others_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shelf = CheckpointStore(tmp_path / "shelf")
    with caplog.at_level(logging.WARNING), shelf.locked():
        (left := shelf.path / f"step_00000001{PARTIAL}").mkdir()
        assert shelf.clean() == []
        assert left.is_dir()
        assert shelf.begin(1) == "step_00000001_2"
    assert "has no locks, so a second run that saves here would not be noticed" in caplog.text


@pytest.mark.usefixtures("without_locks")
def test_scratch_space_is_taken_and_that_of_others_stays(tmp_path: Path) -> None:
    with ScratchDir(str(tmp_path), 4096) as first, ScratchDir(str(tmp_path), 4096) as second:
        assert {each.name for each in holders(str(tmp_path))} == {first.name, second.name}
        assert all((tmp_path / each.name).is_dir() for each in (first, second))


# The cache of Hugging Face

HASH = "0f" * 20


def repository(cache: Path, name: str = "org/name", text: bytes = b"{}") -> Path:
    """A repository as Hugging Face's tools lay it out, with one file; return its snapshot."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc123"
    for each in (folder / "blobs", folder / "refs", snapshot):
        each.mkdir(parents=True)
    (folder / "blobs" / HASH).write_bytes(text)
    (folder / "refs" / "main").write_text("abc123")
    (snapshot / "config.json").symlink_to(f"../../blobs/{HASH}")
    return snapshot


def test_files_and_links_to_blobs_are_read_and_copied_for_other_libraries(tmp_path: Path) -> None:
    snapshot = repository(tmp_path, text=b"blob")
    (snapshot / "file").write_bytes(b"file")
    assert read_bytes(snapshot / "config.json") == b"blob"
    assert read_bytes(snapshot / "file") == b"file"
    (tmp_path / "elsewhere").symlink_to(snapshot)  # the folder itself is the user's choice
    assert read_bytes(tmp_path / "elsewhere" / "config.json") == b"blob"
    with private_copies(snapshot, ["config.json"]) as private:
        assert (private / "config.json").read_bytes() == b"blob"
        assert not (private / "config.json").is_symlink()
        assert private.stat().st_mode & 0o077 == 0
    assert not private.exists()


def blobs_are_a_link(repo: Path, secret: Path) -> str:
    (repo / "blobs" / HASH).unlink()
    (repo / "blobs").rmdir()
    (repo / "blobs").symlink_to(secret.parent)
    return f"../../blobs/{secret.name}"


def blob_is_a_link(repo: Path, secret: Path) -> str:
    (repo / "blobs" / "link").symlink_to(secret)
    return "../../blobs/link"


def snapshots_are_elsewhere(repo: Path, secret: Path) -> str:
    (repo / "snapshots").rename(repo / "other")
    return f"../../blobs/{HASH}"


HOSTILE: dict[str, Callable[[Path, Path], str]] = {
    "absolute": lambda repo, secret: "/etc/passwd",
    "relative": lambda repo, secret: os.path.relpath(secret, repo / "snapshots" / "abc123"),
    "another repository": lambda repo, secret: f"../../../models--org--other/blobs/{HASH}",
    "through blobs": lambda repo, secret: "../../blobs/../../secret",
    "below blobs": lambda repo, secret: f"../../blobs/./{HASH}",
    "blobs themselves": lambda repo, secret: "../../blobs/..",
    "a blob that is a link": blob_is_a_link,
    "blobs that are a link": blobs_are_a_link,
    "not in snapshots": snapshots_are_elsewhere,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_any_other_link_is_refused(tmp_path: Path, case: str) -> None:
    repository(tmp_path / "cache", "org/other")
    snapshot = repository(tmp_path / "cache")
    (secret := tmp_path / "cache" / "secret").write_text("secret")
    target = HOSTILE[case](snapshot.parent.parent, secret)
    folder = next(path for path in snapshot.parent.parent.glob("*/abc123"))
    (folder / "weights").symlink_to(target)
    with pytest.raises(OSError, match=r"weights: .*(is not followed|a folder, a pipe or a device)"):
        read_bytes(folder / "weights")


def test_what_is_no_file_or_not_there_is_told_and_nothing_stays_open(tmp_path: Path) -> None:
    snapshot = repository(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    (snapshot.parent.parent / "blobs" / "folder").mkdir()
    (snapshot / "a").symlink_to("../../blobs/folder")
    (snapshot / "b").symlink_to("../../blobs/gone")
    os.mkfifo(snapshot / "c")
    for name in ("a", "c"):
        with pytest.raises(OSError, match=rf"{name}: a folder, a pipe or a device"), opened(snapshot / name):
            pass
    with pytest.raises(FileNotFoundError, match=r"b: ../../blobs/gone is not in the cache: .*`hf download`"):
        read_bytes(snapshot / "b")
    with pytest.raises(FileNotFoundError):
        read_bytes(snapshot / "d")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_that_changes_meanwhile_leads_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = repository(tmp_path, text=b"blob")
    (tmp_path / "secret").write_text("secret")
    readlink = os.readlink

    def changed(path: str, *, dir_fd: int) -> str:
        target = readlink(path, dir_fd=dir_fd)
        (snapshot / path).unlink()
        (snapshot / path).symlink_to(tmp_path / "secret")
        return target

    monkeypatch.setattr(os, "readlink", changed)
    assert read_bytes(snapshot / "config.json") == b"blob"


def test_a_repository_in_the_cache_is_its_current_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = repository(tmp_path)
    assert local_folder("org/name") == str(snapshot)
    for name in ("org/absent", "gpt2", "../org", "/org/name", "org/name/more", "./name"):
        assert local_folder(name) == name
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert local_folder("org/name") == "org/name"  # a folder goes first
    (tmp_path / "org" / "name").rmdir()
    main = snapshot.parent.parent / "refs" / "main"
    for text in ("", "..", "../../x", "a/b"):
        main.write_text(text)
        with pytest.raises(ValueError, match=r"main: .* is no name of a snapshot"):
            local_folder("org/name")
    main.write_text("abc123")
    snapshot.rename(tmp_path / "moved")
    snapshot.symlink_to(tmp_path / "moved")
    with pytest.raises(ValueError, match="a symbolic link is not followed"):
        local_folder("org/name")


def test_the_cache_is_where_the_tools_of_hugging_face_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    places = {"HOME": "/h/.cache/huggingface/hub", "XDG_CACHE_HOME": "/x/huggingface/hub"}
    places |= {"HF_HOME": "/h/mine/hub", "HF_HUB_CACHE": "/c"}
    values = {"HOME": "/h", "XDG_CACHE_HOME": "/x", "HF_HOME": "~/mine", "HF_HUB_CACHE": "/c"}
    for name, place in places.items():  # each goes before those above it
        monkeypatch.setenv(name, values[name])
        assert cache_folder() == Path(place)


# Compiled kernels

KERNEL = """
import torch
from dzero.comm import host_sum
mine = torch.arange(8, dtype=torch.bfloat16)
mean = torch.empty_like(mine)
host_sum.average(mean, mine, torch.stack([mine, mine * 3]), 0)
stats = host_sum._kernel(wire_bf16=True, output_bf16=True).stats
print(mean.tolist() == (mine * 2).tolist(), sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def used(cache: Path) -> list[str]:
    """By a process with `cache` as its folder of caches: whether the kernel's result is right, its hits and misses."""
    ended = in_a_process("-c", KERNEL, cwd=cache, env={"XDG_CACHE_HOME": str(cache)})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


@pytest.mark.full("tests/utils/inside/test_inside_utils.py::test_variants_compiled_at_one_time_are_not_confused")
def test_kernels_are_compiled_once_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    with ThreadPoolExecutor(2) as both:  # at once, on an empty cache
        assert [each[0] for each in both.map(used, [tmp_path] * 2)] == ["True", "True"]
    (folder,) = (tmp_path / "dzero/kernels").iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    assert used(tmp_path) == ["True", "1", "0"]

    folder.chmod(0o777)  # others could have put code there
    assert used(tmp_path) == ["True", "0", "1"]


def test_variants_compiled_at_one_time_are_not_confused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba numbers the files of a function by its index, so processes that read it at one time take one number."""
    wide, narrow = torch.arange(1000.0), torch.arange(256.0).bfloat16()
    save_index, waiting = caching.IndexDataCacheFile._save_index, list[Callable[[], None]]()

    def save_late(self: caching.IndexDataCacheFile, overloads: dict[object, str]) -> None:
        waiting.append(partial(save_index, self, overloads))
        if len(waiting) == 1:  # as another process would, which has read the index too
            cpu_kernels.sum_squares([wide])
        while waiting:
            waiting.pop(0)()

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_index", save_late)
    monkeypatch.setitem(numba_views.JIT, "cache", True)
    for _ in range(2):  # compiled, then loaded
        cpu_kernels._sum_squares_kernel.cache_clear()
        found = [cpu_kernels.sum_squares([each]).item() for each in (narrow, wide)]
        assert found == [each.double().square().sum().item() for each in (narrow, wide)]
    assert len([*tmp_path.rglob("*.nbc")]) == 2
    monkeypatch.setattr(numba_views, "_digest", lambda: "of other sources")  # in the same folder, if the user chose it
    cpu_kernels._sum_squares_kernel.cache_clear()
    cpu_kernels.sum_squares([wide])
    assert len([*tmp_path.rglob("*.nbc")]) == 3
    cpu_kernels._sum_squares_kernel.cache_clear()


# Errors and messages


def test_only_what_the_package_raises_itself_loses_its_traceback() -> None:
    with pytest.raises(RunError, match=r"data\.held_out=2"), user_errors():
        DataConfig(held_out=2.0)
    tensor = StoredTensor(Path("x"), "x", "F32", (1, 2), 0)
    with pytest.raises(ValueError, match="longer"), user_errors():
        tensor.read((0, 0), (1,))  # a defect of whoever calls it so, though the last line that runs is the package's


DOORS = {
    "the names of the package": "import dzero; [getattr(dzero, name) for name in dzero.__all__]",
    "a published model": "from dzero.models.hf import build_hf; build_hf('gpt2')",
    "moments in 8 bits": "import torch\nfrom dzero.optim.quantized_moments import blank\n"
    "blank(256, signed=True, device=torch.device('cpu'))",
}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("code", DOORS.values(), ids=list(DOORS))
def test_nothing_is_printed_before_the_first_useful_line(code: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    pytest.importorskip("transformers")
    told = in_a_process("-c", code, cwd=tmp_path)
    assert (told.returncode, told.stderr) == (0, "")


def test_other_messages_of_these_loggers_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    torchao, pytree = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")
    leave_out()
    torchao.warning("Failed to load %s: %s", "/a/_C_mxfp8.so", "no such symbol")
    torchao.warning("Please upgrade to torch >= 2.11.0")
    pytree.warning("%s is an Enum subclass and is now natively supported by torch.compile as an opaque value", int)
    pytree.warning("%s is registered already", int)
    assert caplog.messages == ["Please upgrade to torch >= 2.11.0", f"{int} is registered already"]
