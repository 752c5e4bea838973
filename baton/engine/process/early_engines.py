"""Engines that start before their workers, beside Ray: a worker takes the one that it would start.

    python -m baton.engine.process.early_engines SOCKET < ENGINES_JSON

This process imports torch once and forks an engine for each settings. A worker sends its engine's
settings to the socket, and gets the engine's own socket and memory file. Both ends keep that
connection: if the worker's end closes, the engine is killed; when the engine ends, its exit code is
sent. So a worker and its engine end together, as if it had started the engine itself.
"""

import importlib
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import msgspec

from baton.engine.ipc import control_sockets, pool_file
from baton.engine.parent import die_with_parent
from baton.engine.process.own_process import EarlyEngine
from baton.engine.process.step_loop import run

_UNTAKEN_S = 120.0  # without a worker; then the engines that none has taken end


class _Child(NamedTuple):
    pid: int
    settings: bytes
    descriptors: tuple[int, int]  # for the worker: the control socket, the memory file


def _start(early: EarlyEngine, listener: socket.socket, others: list[_Child]) -> _Child:
    ours, theirs = control_sockets()
    pool = pool_file()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        inherited = (number for child in others for number in child.descriptors)
        for descriptor in (listener.fileno(), ours.fileno(), *inherited):
            os.close(descriptor)
        log = os.open(early.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        code = run(early.settings, theirs, pool)
        sys.stderr.flush()
        os._exit(code)
    theirs.close()
    return _Child(pid, msgspec.json.encode(early.settings), (ours.detach(), pool))


def _hand_over(worker: socket.socket, children: list[_Child]) -> None:
    worker.settimeout(1.0)
    with suppress(OSError):
        settings = worker.recv(1 << 16)
        if child := next((child for child in children if child.settings == settings), None):
            socket.send_fds(worker, [b"%d" % child.pid], child.descriptors)
            children.remove(child)
            for descriptor in child.descriptors:
                os.close(descriptor)
            Thread(target=_attend, args=(child.pid, worker)).start()
            return
    worker.close()


def _attend(pid: int, worker: socket.socket) -> None:
    """Wait for the end of an engine and of its worker, each of which ends the other."""
    ended = os.pidfd_open(pid)
    if worker.fileno() in select.select([worker.fileno(), ended], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(ended)
    with suppress(OSError), worker:
        worker.send(b"%d" % os.waitstatus_to_exitcode(status))


def main() -> None:
    """Run ``python -m baton.engine.process.early_engines``."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the shell decides
    early = msgspec.json.decode(sys.stdin.buffer.read(), type=list[EarlyEngine])
    children: list[_Child] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        importlib.import_module("baton.engine.cpu.build")  # with torch, once for all engines
        for each in early:
            children.append(_start(each, listener, children))
        listener.settimeout(_UNTAKEN_S)
        with suppress(TimeoutError):
            while children:
                _hand_over(listener.accept()[0], children)
        Path(sys.argv[1]).unlink(missing_ok=True)
    for child in children:
        os.kill(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
