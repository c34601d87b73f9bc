"""Measurements are kept privately, replaced whole, never read through a link, and checked when they are read."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from measurements import HARDWARE, KEY, MEASUREMENT

from dzero import DiskError
from dzero.estimate import measurement_cache
from dzero.estimate.measurement_cache import DamagedCache


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the measurement of KEY goes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/dzero" / KEY.file


def test_what_is_stored_is_read_back(place: Path) -> None:
    assert measurement_cache.load(KEY) is None
    assert measurement_cache.store(MEASUREMENT) == place
    assert measurement_cache.load(KEY) == MEASUREMENT
    for other in (replace(KEY, ranks=4), replace(KEY, torch="2.14"), replace(KEY, cpu="slide rule")):
        assert measurement_cache.load(other) is None


def test_it_is_private_and_alone(place: Path) -> None:
    before = os.umask(0)
    try:
        measurement_cache.store(MEASUREMENT)
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert [file.name for file in place.parent.iterdir()] == [KEY.file]


def test_without_a_setting_it_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert measurement_cache.folder() == tmp_path / ".cache/dzero"


def test_a_write_that_fails_leaves_the_old_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement_cache.store(MEASUREMENT)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        measurement_cache.store(replace(MEASUREMENT, hardware=replace(HARDWARE, node_link=1.0)))
    assert measurement_cache.load(KEY) == MEASUREMENT
    assert [file.name for file in place.parent.iterdir()] == [KEY.file]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b"{", b"", "damaged"),
        (b'"abacus"', b"3", "damaged"),
        (b'"efficiency": 1.0', b'"efficiency": 7.0', r"damaged, hardware.efficiency=7.0: a part of the peak"),
        (b'"ranks": 2', b'"ranks": 3', "of another machine than its name says"),
        (b"00Z", b"00", "of another machine"),
    ],
)
def test_what_is_damaged_is_told_and_replaced(place: Path, old: bytes, new: bytes, told: str) -> None:
    measurement_cache.store(MEASUREMENT)
    text = place.read_bytes()
    assert old in text
    place.write_bytes(text.replace(old, new))
    with pytest.raises(DamagedCache, match=told):
        measurement_cache.load(KEY)
    measurement_cache.store(MEASUREMENT)
    assert measurement_cache.load(KEY) == MEASUREMENT


@pytest.mark.parametrize("cut", [0, 1, 100])
def test_a_file_cut_short_is_damaged(place: Path, cut: int) -> None:
    measurement_cache.store(MEASUREMENT)
    place.write_bytes(place.read_bytes()[:cut])
    with pytest.raises(DamagedCache, match="damaged"):
        measurement_cache.load(KEY)


def test_a_link_is_not_followed_but_replaced(place: Path, tmp_path: Path) -> None:
    measurement_cache.store(MEASUREMENT)
    other = tmp_path / "other.json"
    place.rename(other)
    place.symlink_to(other)
    before = other.read_bytes()
    with pytest.raises(DamagedCache, match="a symbolic link, which is not followed"):
        measurement_cache.load(KEY)
    measurement_cache.store(replace(MEASUREMENT, hardware=replace(HARDWARE, node_link=1.0)))
    assert other.read_bytes() == before
    assert not place.is_symlink()


def test_a_linked_folder_is_refused(place: Path, tmp_path: Path) -> None:
    place.parent.parent.mkdir()
    place.parent.symlink_to(tmp_path)
    for use in (lambda: measurement_cache.load(KEY), lambda: measurement_cache.store(MEASUREMENT)):
        with pytest.raises(DiskError, match="a symbolic link is not followed"):
            use()


def test_only_a_small_regular_file_is_read(place: Path) -> None:
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    with pytest.raises(DamagedCache, match="not a small file of this user"):
        measurement_cache.load(KEY)
    place.unlink()
    place.write_bytes(b" " * (measurement_cache.MOST_BYTES + 1))
    with pytest.raises(DamagedCache, match="not a small file"):
        measurement_cache.load(KEY)
