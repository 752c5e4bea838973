"""Waits between the processes of one vLLM on CPUs, which sleep instead of calling ``sched_yield``.

vLLM's engine core and its workers pass messages through shared memory. After each message vLLM
waits for the next one in a loop of ``sched_yield``, for one second. Two vLLMs that hand over have
four such loops. On fewer cores a process that has a message may wait until the loops of the other
vLLM end.

vLLM also sends a notification for each message, but may drop the second of two within a millisecond
or so. So a wait ends after 1 ms without one.

vLLM loads this module as a plugin in each of its processes: the folder ``baton_waits-1.dist-info``
beside it names the entry point.
"""

import time
from typing import Any

import zmq
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

_WAIT_MS = 1

_condition: Any = getattr(shm_broadcast, "SpinCondition", None)  # another vLLM may have none
_wait_idle: Any = getattr(_condition, "wait", None)


def install() -> None:
    """Let the waits of this process sleep, if its vLLM runs on CPUs."""
    if _condition is not None and current_platform.is_cpu():
        _condition.wait = _wait


def _wait(self: Any, timeout_ms: int | None = None) -> None:
    """Wait for a message, ``timeout_ms`` at most, or for 1 ms soon after the last message."""
    if time.monotonic() > self.last_read + self.busy_loop_s:
        _wait_idle(self, timeout_ms)
        return
    if self.local_notify_socket in dict(self.poller.poll(_WAIT_MS)):
        self.local_notify_socket.recv(zmq.NOBLOCK)
