"""Sending side of one prompt's KV: its machine, and the current stream to decode."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from batonpb import prefill_pb2 as pb

from baton.types import events as ev
from kvtransfer import sender


class CachePull(Protocol):
    """Blocks on their way from other workers' caches into this worker's."""

    def stop(self) -> None:
        """Stop the pull: its result is not needed any more."""

    def close(self) -> None:
        """Cancel the timers: the worker ends."""


BeginPull = Callable[[pb.PrefillStart, Callable[[int], None]], CachePull | None]
"""Pulls what a request names, and calls once with the tokens that came, but never before it
returns; returns None if there is nothing to wait for."""


class SentHandoff:
    """Sending side of one prompt's KV: the machine, and the current stream to decode."""

    def __init__(self, engine_id: str, start: pb.PrefillStart, machine: sender.HandoffSender):
        self.engine_id = engine_id
        self.start = start
        self.machine = machine
        self.events: asyncio.Queue[pb.PrefillEvent] = asyncio.Queue()
        self.prompt_outputs = ev.PromptOutputsReady(engine_id)
        self.ended = False
        self.prefix: CachePull | None = None  # delays its submission to the engine

    @property
    def is_open(self) -> bool:
        """True while the KV may be announced and read."""
        return self.machine.state is sender.SenderState.OPEN
