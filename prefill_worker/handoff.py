"""One prompt's KV on the side that computes it: its machine, and the stream to decode."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from batonpb import prefill_pb2 as pb

from baton.types import events as ev
from kvtransfer import sender
from kvtransfer.ranks.link import RankLink


class PrefixPull(Protocol):
    """Blocks on their way from other workers' caches into this worker's."""

    def stop(self) -> None:
        """Stop the pull: its result is not needed any more."""

    def close(self) -> None:
        """Cancel the timers: the worker ends."""


class PrefixPuller(Protocol):
    """Brings blocks from other workers' caches."""

    def begin(self, request: pb.PrefillStart, on_end: Callable[[int], None]) -> PrefixPull | None:
        """Pull what the request names; None if there is nothing to wait for.

        Args:
            request: The request that begins with these blocks.
            on_end: Called once with the tokens that came, but never before this returns.
        """


class Handoff:
    """One prompt's KV on this side: the machine, and the stream that listens at present."""

    def __init__(self, engine_id: str, start: pb.PrefillStart, machine: sender.HandoffSender):
        self.engine_id = engine_id
        self.start = start
        self.machine = machine
        self.events: asyncio.Queue[pb.PrefillEvent] = asyncio.Queue()
        self.prompt_outputs = ev.PromptOutputsReady(engine_id)
        self.ended = False
        self.prefix: PrefixPull | None = None  # that its submission to the engine waits for
        self.at_ranks: list[RankLink] = []  # elsewhere, that know of it and not of its end
        self._held_back: deque[tuple[asyncio.Future[None] | None, pb.PrefillEvent]] = deque()

    @property
    def is_open(self) -> bool:
        """Whether its KV may still be announced and read."""
        return self.machine.state is sender.SenderState.OPEN

    def begin_again(self) -> None:
        """Start anew for another stream, which has received nothing yet."""
        self.events = asyncio.Queue()
        self._held_back.clear()

    def say(self, event: pb.PrefillEvent, known: "asyncio.Future[None] | None" = None) -> None:
        """Send an event to decode, in order.

        Args:
            event: The event.
            known: Done when the rank that decode will ask knows of it, too.
        """
        self._held_back.append((known, event))
        if known is not None:
            known.add_done_callback(lambda _: self._say_known())
        self._say_known()

    def _say_known(self) -> None:
        while self._held_back and (self._held_back[0][0] is None or self._held_back[0][0].done()):
            self.events.put_nowait(self._held_back.popleft()[1])
