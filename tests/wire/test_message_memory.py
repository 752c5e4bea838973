"""Memory of large messages, as the kernel sees it."""

import os
import subprocess
import sys

import pytest

MESSAGES = """
import resource, sys, threading
from baton.telemetry.process_memory import keep_message_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def come_and_go():
    for number in range(20):
        messages = [b"%d" % number * (4 << 20) for _ in range(3)]
        del messages

def work():
    come_and_go()
    before = faults()
    come_and_go()
    print(faults() - before)

if "keep" in sys.argv:
    keep_message_memory()
work()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def pages_mapped(*options: str) -> list[int]:
    """Of the second time that messages came and went: on the main thread, and on another one."""
    command = [sys.executable, "-c", MESSAGES, *options]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(line) for line in said.split()]


@pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="not glibc")
def test_messages_that_come_and_go_are_given_the_same_pages():
    assert min(pages_mapped()) > 10_000, "each message had new pages: there is nothing to mend"
    assert max(pages_mapped("keep")) < 100
