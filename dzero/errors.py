"""Errors for the user, which are shown as a message without a traceback.

    error                                               raised by           shown as
    RunError                                            any code            its message
    ValueError, OSError, MemoryError and                a `raise` of this   its message, inside `user_errors`
    ModuleNotFoundError                                 package
    OSError of a file: no permission or no space        the system          path, cause and remedy, inside `user_errors`
    any other error                                     any code            a traceback: it is a bug of dzero

Errors of other libraries about a user's file or setting are converted where the library is called (`converting`), to an
error that names the file or setting.
"""

from __future__ import annotations

import dis
import errno
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
RAISE = dis.opmap["RAISE_VARARGS"]
MOST_CHARACTERS = 300
OTHER_PLACE = "name another place"
SPACE = f"free some, or {OTHER_PLACE}"
REPAIRS = {
    errno.EACCES: f"give this user access to it, or {OTHER_PLACE}",
    errno.EPERM: f"give this user access to it, or {OTHER_PLACE}",
    errno.EROFS: OTHER_PLACE,
    errno.ENOSPC: SPACE,
    errno.EDQUOT: SPACE,
    errno.EIO: f"the disk may be failing: {OTHER_PLACE}",
    errno.ENAMETOOLONG: "take a shorter name",
    errno.EMFILE: "raise the limit (ulimit -n)",
    errno.ENFILE: "the whole machine has too many files open",
}
"""Remedies for system errors that are never caused by this package."""


class RunError(Exception):
    """Error that ends a run. Its message is complete for the user, so it is shown without a traceback."""


class RankLost(RunError):
    """Error that ends a run because a rank did not respond; the watchdog finds out which."""


class ReportedElsewhere(RunError):
    """Error that ends a run whose cause another rank has already reported."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Convert errors about settings, files and the machine to RunError; the module's docstring has a table."""
    try:
        yield
    except (ValueError, OSError, MemoryError, ModuleNotFoundError) as error:
        if is_raised_here(error):
            raise RunError(str(error)) from error
        if isinstance(error, OSError) and error.filename is not None and error.errno in REPAIRS:
            raise RunError(f"{error.filename}: {error.strerror}; {REPAIRS[error.errno]}") from error
        raise


@contextmanager
def converting(what: str, *kinds: type[Exception], repair: str = "") -> Iterator[None]:
    """Convert errors of `kinds` that another library raises to ValueError; use it for single calls on a user's input.

    Errors that this package raises inside are left unchanged.

    Args:
        what: Start of the message, before a short form of the error.
        *kinds: Kinds of errors to convert.
        repair: End of the message.
    """
    try:
        yield
    except kinds as error:
        if is_raised_here(error):
            raise
        raise ValueError(f"{what}: {in_short(error)}{repair and f'; {repair}'}") from error


def import_optional(module: str, purpose: str, extra: str) -> Any:
    """Import an optional package; the error for a missing one says that `purpose` needs it, and names the extra."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{purpose} needs the package {package}: pip install 'dzero[{extra}]'", name=error.name
        ) from error


def is_raised_here(error: BaseException) -> bool:
    """Return whether a `raise` statement of this package raised the error, not a library or an operation."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    return Path(code.co_filename).is_relative_to(PACKAGE) and code.co_code[last.tb_lasti] == RAISE


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if there is none."""
    return (str(error) or type(error).__name__).splitlines()[0]


def in_short(error: BaseException) -> str:
    """Return the error's class and the start of its message, on one line."""
    said = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {textwrap.shorten(said, MOST_CHARACTERS, placeholder=' ...')}"
