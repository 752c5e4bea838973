"""End of a process that has used gRPC."""

import contextlib
import logging
import os
import sys
from typing import NoReturn


def exit_process(code: int) -> NoReturn:
    """End the process with an exit code, after its logs and output are written.

    Python's own end of the interpreter stops threads as they ask for its lock. A thread of gRPC may
    do so inside of C++ code, which then aborts the process: exit code -6 instead of ``code``.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader is gone
            stream.flush()
    os._exit(code)
