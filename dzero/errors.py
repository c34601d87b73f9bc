"""Errors that are for the user to read: the message alone, without a traceback.

    raised                                              by                  shown as
    RunError                                            anybody             its message
    ValueError, OSError, MemoryError and                a `raise` of this   its message, inside `user_errors`
    ModuleNotFoundError                                 package
    OSError of a file, for want of permission or space  the system          the path, what is wrong, what to do,
                                                                            inside `user_errors`
    anything else                                       anybody             a traceback: it is a defect of ours

What other libraries raise about a user's file or setting is converted where they are called (`converting`), to an
error that names the file or setting.
"""

from __future__ import annotations

import dis
import errno
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
"""What users can do about errors of the system that are never this package's fault."""


class RunError(Exception):
    """Ends a run. Its message is all that the user needs, so it is shown without a traceback."""


class RankLost(RunError):
    """Ends a run of which a rank did not answer; the watch finds out which."""


class ToldElsewhere(RunError):
    """Ends a run whose end another rank has told the user."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors about settings, files and the machine into RunError; see the table above."""
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
    """Convert errors of `kinds` that another library raises to ValueError: `what`, the error in short, `repair`.

    For calls of a single library on what a user gave. Errors that this package raises inside stay as they are.
    """
    try:
        yield
    except kinds as error:
        if is_raised_here(error):
            raise
        raise ValueError(f"{what}: {in_short(error)}{repair and f'; {repair}'}") from error


def is_raised_here(error: BaseException) -> bool:
    """Return whether a `raise` statement of this package made the error, and no library or operation."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    return Path(code.co_filename).is_relative_to(PACKAGE) and code.co_code[last.tb_lasti] == RAISE


def in_short(error: BaseException) -> str:
    """Return the error's kind and the beginning of its message, on one line."""
    said = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {textwrap.shorten(said, MOST_CHARACTERS, placeholder=' ...')}"
