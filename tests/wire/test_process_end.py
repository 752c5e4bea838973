"""The end of a process by `exit_process`. `tests/fleet/test_routers.py` stops real routers."""

import os
import subprocess
import sys

PROGRAM = """
import atexit, logging, sys
from baton.wire.process_end import exit_process
atexit.register(print, "finalization of Python")
logging.warning("logged")
sys.stdout.write("printed")
exit_process(3)
"""


def test_output_and_exit_code_are_kept_and_the_interpreter_is_not_finalized() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (3, "printed")
    assert "logged" in ended.stderr


def test_a_reader_that_is_gone_does_not_change_the_exit_code() -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=buffered) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(20) == 3
