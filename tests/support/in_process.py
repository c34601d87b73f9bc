"""`python -m dzero` called in this process: one of its own would import for seconds what is here already."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from dzero.__main__ import main


def dzero(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """How the command ends and what it tells, as it would be of a process whose output goes to a pipe."""
    line, out, err, code = [str(word) for word in words], io.StringIO(), io.StringIO(), 0
    with patch.object(sys, "argv", ["dzero", *line]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=err)  # as the interpreter does
    return subprocess.CompletedProcess(line, code, out.getvalue(), err.getvalue())
