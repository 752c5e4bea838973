"""The credit of a worker, as its hand-offs wait for it: `ReceiveCredit` with a clock."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.types.events import StepDone
from decode_worker.credit import MOST_HELD_NS, ReceiveCredit


@dataclass(slots=True)
class Room:
    """What may be asked for: ``frames``, none if the hand-off is over. Ends by ``give_back``."""

    claim: int
    frames: int


class ReceivePacer:
    """One for all hand-offs and prefix pulls of a worker.

    Args:
        cpu_share: See ``ReceiveCredit``.
    """

    def __init__(self, cpu_share: float) -> None:
        now_ns = time.monotonic_ns()
        cpu_ns = time.process_time_ns()
        self._credit = ReceiveCredit(cpu_share, now_ns=now_ns, cpu_ns=cpu_ns)
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._due: asyncio.TimerHandle | None = None

    def after_step(self, step: StepDone) -> None:
        """The engine says whether it writes answers."""
        self._credit.decoding(on=bool(step.answering), now_ns=time.monotonic_ns())
        self._give_out()

    async def take(
        self, owner: str, peer: str, frame_bytes: Sequence[int], waited_s: float = 0.0
    ) -> Room:
        """Wait for room for the first of these frames, one at least.

        Args:
            owner: The hand-off.
            peer: Whom it will ask.
            frame_bytes: Sizes of all frames that it wants.
            waited_s: It has waited for room so long before.
        """
        urgent_ns = time.monotonic_ns() + MOST_HELD_NS - round(waited_s * 1e9)
        claim = self._credit.ask(owner, peer, frame_bytes, urgent_ns)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[claim] = answer
        self._give_out()
        try:
            return Room(claim, await answer)
        except asyncio.CancelledError:
            self._end(claim, 0)
            raise

    def give_back(self, room: Room, received_bytes: int) -> None:
        """Nothing of it is on its way any more; so much of it came."""
        self._end(room.claim, received_bytes)

    def drop(self, owner: str) -> None:
        """A hand-off is over; what waited for room for it gets none."""
        for claim in self._credit.drop(owner, time.monotonic_ns(), time.process_time_ns()):
            self._answer(claim, 0)
        self._give_out()

    def waits(self, owner: str) -> bool:
        """Whether a hand-off wants frames that it may not ask for yet."""
        return self._credit.waits(owner)

    def _end(self, claim: int, received_bytes: int) -> None:
        self._waiting.pop(claim, None)
        now_ns = time.monotonic_ns()
        cpu_ns = time.process_time_ns()
        self._credit.give_back(claim, received_bytes, now_ns, cpu_ns)
        self._give_out()

    def _give_out(self) -> None:
        now_ns = time.monotonic_ns()
        for grant in self._credit.grants(now_ns, time.process_time_ns()):
            self._answer(grant.claim, grant.frames)
        if self._due is not None:
            self._due.cancel()
            self._due = None
        due_ns = self._credit.due_ns(now_ns)
        if due_ns is not None:
            loop = asyncio.get_running_loop()
            self._due = loop.call_later((due_ns - now_ns) / 1e9, self._give_out)

    def _answer(self, claim: int, frames: int) -> None:
        answer = self._waiting.pop(claim, None)
        if answer is not None and not answer.done():
            answer.set_result(frames)
