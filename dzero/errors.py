"""Errors that are for the user to read: the message alone, without a traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).parent


class RunError(Exception):
    """Ends a run. Its message is all that the user needs, so it is shown without a traceback."""


class RankLost(RunError):
    """Ends a run of which a rank did not answer; the watch finds out which."""


class ToldElsewhere(RunError):
    """Ends a run whose end another rank has told the user."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Where settings and files are first used: what this package itself raises about them is the user's to mend.

    Its ValueError, OSError, MemoryError and ModuleNotFoundError become RunError; those from deeper libraries stay.
    """
    try:
        yield
    except (ValueError, OSError, MemoryError, ModuleNotFoundError) as error:
        frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        if Path(frames[-1]).is_relative_to(PACKAGE):
            raise RunError(str(error)) from error
        raise
