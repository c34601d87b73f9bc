"""Links of Hugging Face's cache are followed, and no others; `org/name` is the current snapshot there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dzero.utils.hub_cache import cache_folder, local_folder, opened, private_copies, read_bytes

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


def test_files_and_links_to_blobs_are_read(tmp_path: Path) -> None:
    snapshot = repository(tmp_path, text=b"blob")
    (snapshot / "file").write_bytes(b"file")
    assert read_bytes(snapshot / "config.json") == b"blob"
    assert read_bytes(snapshot / "file") == b"file"
    (tmp_path / "elsewhere").symlink_to(snapshot)  # the folder itself is the user's choice
    assert read_bytes(tmp_path / "elsewhere" / "config.json") == b"blob"


def test_copies_for_other_libraries_are_regular_files_of_a_private_folder(tmp_path: Path) -> None:
    snapshot = repository(tmp_path, text=b"blob")
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


def test_a_link_that_changes_while_it_is_opened_leads_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_cache_is_where_the_tools_of_hugging_face_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "~/h")
    assert cache_folder() == tmp_path / "h" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    assert cache_folder() == Path("/c")
