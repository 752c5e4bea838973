"""Whether a worker's shell still runs: asked from outside, and watched from inside.

A shell that was stopped, or whose event loop is caught somewhere, dies of nothing: its streams stay
open and its engine idles. So the controller asks each life every `ASK_EVERY_S`, and after
`FROZEN_AFTER_S` without an answer ends it and begins the next one. A process that wakes up after so
long has been replaced: `StandstillGuard` ends it before it can speak for its old incarnation.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from fleet.process_key import ProcessKey, end_at_once

_LOG = logging.getLogger("fleet.pools.liveness")

ASK_EVERY_S = 2.0
FROZEN_AFTER_S = 8.0
_SLICE_S = 0.25  # time counts in slices, so that what stood still was not this process


class ShellProcess(msgspec.Struct, frozen=True):
    """Which process a life runs in."""

    host: str
    key: ProcessKey
    epoch: int = 0  # of the life; its actor may have been named after an earlier one
    settings_digest: str = ""  # what it was started with
    started: bool = False

    @classmethod
    def own(cls, epoch: int, settings_digest: str = "", *, started: bool = False) -> "ShellProcess":
        """This one."""
        key = ProcessKey.of(os.getpid())
        if key is None:
            raise RuntimeError("cannot read /proc")
        return cls(socket.gethostname(), key, epoch, settings_digest, started)


class Life:
    """What the controller holds of one life: its actor, its process, and when it last answered.

    Args:
        epoch: Its number.
        actor: A `WorkerActor`, as Ray has it.
    """

    def __init__(self, epoch: int, actor: Any) -> None:
        self.epoch = epoch
        self.actor = actor
        self._process: ShellProcess | None = None
        self._silent_s = 0.0

    async def ask(self) -> None:
        """Ask until it is gone; each answer ends a silence."""
        while True:
            try:
                self._process = msgspec.msgpack.decode(
                    await self.actor.ping.remote(), type=ShellProcess
                )
                self._silent_s = 0.0
            except RayError as error:  # whoever waits for its end hears of it, if it is the end
                _LOG.debug("no answer: %r", error)
            await asyncio.sleep(ASK_EVERY_S)

    async def freeze(self) -> None:
        """Return once it has said nothing for `FROZEN_AFTER_S`, counted from now."""
        self._silent_s = 0.0
        while self._silent_s < FROZEN_AFTER_S:
            await asyncio.sleep(_SLICE_S)
            self._silent_s += _SLICE_S

    def end(self) -> None:
        """End its processes for certain: Ray cannot end one that is stopped."""
        process = self._process
        if process is not None and process.host == socket.gethostname():
            end_at_once(process.key)
        with contextlib.suppress(RayError):
            ray.kill(self.actor)


async def process_of(actor: Any) -> ShellProcess | None:
    """What an actor says of its process; None of one that says nothing: it is frozen or gone.

    Args:
        actor: A `WorkerActor`, as Ray has it.
    """
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(ASK_EVERY_S):
            return msgspec.msgpack.decode(await actor.ping.remote(), type=ShellProcess)
    return None


class StandstillGuard:
    """Ends this process when it, or its event loop, stood still for too long.

    Args:
        limit_s: For how long.
        end: Called with the reason; the process's end.
    """

    def __init__(
        self, limit_s: float = FROZEN_AFTER_S, end: Callable[[str], None] | None = None
    ) -> None:
        self._limit_s = limit_s
        self._end = end or _end_this_process
        self._beat_s = time.monotonic()

    async def run(self) -> None:
        """Beat, and have a thread listen to it: that one also runs when the loop does not."""
        self._beat_s = time.monotonic()
        stop = threading.Event()
        threading.Thread(target=self._listen, args=(stop,), daemon=True, name="standstill").start()
        try:
            while True:
                self.look()
                self._beat_s = time.monotonic()
                await asyncio.sleep(_SLICE_S)
        finally:
            stop.set()

    def look(self) -> None:
        """End the process if the last beat is too long ago."""
        still_s = time.monotonic() - self._beat_s
        if still_s > self._limit_s:
            self._end(f"stood still for {still_s:.1f} s: this life has been replaced")

    def _listen(self, stop: threading.Event) -> None:
        while not stop.wait(_SLICE_S):
            self.look()


def _end_this_process(why: str) -> None:
    os.write(2, f"{why}\n".encode())
    faulthandler.dump_traceback(2, all_threads=True)
    os._exit(70)
