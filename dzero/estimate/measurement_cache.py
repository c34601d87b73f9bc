"""Cache of measurements of this machine: one small JSON file per key, private to the user.

The folder is $XDG_CACHE_HOME/dzero, or ~/.cache/dzero. A file is written under a temporary name, synchronized and then
renamed, so that a reader sees the old or the new file. A symbolic link is not followed when reading, and is replaced
when writing. A file is used only if it is a regular file of the user with the requested key and valid figures.
"""

from __future__ import annotations

import hashlib
import os
import stat
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dzero.estimate.hardware_spec import HardwareConfig
from dzero.utils.scratch_paths import open_path

MOST_BYTES = 1 << 20
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DamagedCache(ValueError):
    """Cached measurement that cannot be used; the message names the file and the reason."""


@dataclass(frozen=True, kw_only=True)
class MeasurementKey:
    """Conditions that a measurement holds for.

    Attributes:
        host_bytes: Host memory within every limit.
        device: Name of the GPU, or "" without one.
        disks: Mount points of the scratch disks, sorted. They stay the same from boot to boot, and folders of one disk
            share them.
        count: Version of the work that rates are measured by (`operator_work.py`) and of the figures. Raise it whenever
            either changes.
    """

    cpu: str
    cores: int
    host_bytes: int
    device_type: str
    device: str
    ranks: int
    torch: str
    disks: tuple[str, ...]
    count: int = 3

    @property
    def file(self) -> str:
        """Name of the cache file."""
        digest = hashlib.sha256(msgspec.json.encode(self)).hexdigest()
        return f"hardware-{digest[:16]}.json"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Figures of a machine, and the time (UTC) of the measurement."""

    key: MeasurementKey
    when: datetime
    hardware: HardwareConfig

    @property
    def age_s(self) -> float:
        """Seconds since the measurement."""
        return max(0.0, (now() - self.when).total_seconds())


def now() -> datetime:
    """Return the current time in UTC, without microseconds."""
    return datetime.now(UTC).replace(microsecond=0)


def folder() -> Path:
    """Return the folder of the cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dzero"


def load(key: MeasurementKey) -> Measurement | None:
    """Return the measurement for `key`, or None; raise DamagedCache if its file is not usable, or OSError."""
    path = folder() / key.file
    if not path.parent.exists():
        return None
    place = open_path(str(path.parent))
    try:
        text = _read(place, path)
    except FileNotFoundError:
        return None
    finally:
        os.close(place)
    try:
        found = msgspec.json.decode(text, type=Measurement)
    except ValueError as error:  # from JSON, types, and HardwareConfig's own checks
        raise DamagedCache(f"{path}: damaged, {error}") from error
    if found.key != key or found.when.tzinfo is None:
        raise DamagedCache(f"{path}: of another machine than its name says")
    return found


def _read(place: int, path: Path) -> bytes:
    if stat.S_ISLNK(os.stat(path.name, dir_fd=place, follow_symlinks=False).st_mode):
        raise DamagedCache(f"{path}: a symbolic link, which is not followed")
    fd = os.open(path.name, READ, dir_fd=place)
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_size > MOST_BYTES:
            raise DamagedCache(f"{path}: not a small file of this user")
        return file.read(MOST_BYTES)


def store(measurement: Measurement) -> Path:
    """Write the measurement to its file atomically, and return the path; raises OSError if writing fails."""
    path = folder() / measurement.key.file
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = open_path(str(path.parent))
    beside = f".{path.name}.{uuid.uuid4().hex}"
    try:
        with os.fdopen(os.open(beside, NEW, 0o600, dir_fd=place), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(measurement)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path.name, src_dir_fd=place, dst_dir_fd=place)
        os.fsync(place)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=place)
        os.close(place)
    return path
