"""The standard streams of a command: closed ones, and ones that cannot be written."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


def open_closed_streams() -> None:
    """Have stdout and stderr lead nowhere where they are closed, as a daemon's are."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  for good


def reason_of(error: BaseException) -> str:
    """Say in one line what is wrong; an OSError of stdout names no file."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _UNWRITABLE:
        return f"stdout: cannot be written: {error.strerror}"
    return str(error) or type(error).__name__


def say_last(line: str) -> None:
    """Print a line on stderr, if that can be written, and let it be the last one."""
    with suppress(OSError):
        print(line, file=sys.stderr)
    drop_unwritten()


def drop_unwritten() -> None:
    """Drop what could not be printed: Python would try again at exit, complain, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
