"""A rig of hosts ends its own processes, and no other one that has got a number of theirs."""

import subprocess
import sys

from tests.hosts.rig.namespaces import Host


def test_a_host_that_has_ended_by_itself_ends_nobody_else() -> None:
    """Its first process's number may be another's by now; the rig runs as root."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as innocent:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        host = Host("one", "10.77.0.1", _holder=ended, _first_pid=innocent.pid)
        host._power_off()
        try:
            assert innocent.poll() is None
        finally:
            innocent.kill()
