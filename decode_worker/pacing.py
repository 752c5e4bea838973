"""Asynchronous `ReceiveCredit`: hand-offs wait for the credit of a worker."""

import asyncio
import time
from collections.abc import Sequence

from baton.types.events import StepDone
from decode_worker.credit import MOST_HELD_NS, CreditGrant, ReceiveCredit


class ReceivePacer:
    """Pacer of all hand-offs and prefix pulls of a worker; see ``ReceiveCredit``."""

    def __init__(self, cpu_share: float) -> None:
        now_ns = time.monotonic_ns()
        cpu_ns = time.process_time_ns()
        self._credit = ReceiveCredit(cpu_share, now_ns=now_ns, cpu_ns=cpu_ns)
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._due: asyncio.TimerHandle | None = None

    def after_step(self, step: StepDone) -> None:
        """Note from an engine step whether responses are being generated."""
        self._credit.decoding(on=bool(step.answering), now_ns=time.monotonic_ns())
        if self._waiting:
            self._give_out()

    async def take(
        self, owner: str, peer: str, frame_bytes: Sequence[int], waited_s: float = 0.0
    ) -> CreditGrant:
        """Wait for credit for at least the first frame of a hand-off; none if it is over.

        ``waited_s`` is the time that the hand-off has waited for credit before.
        """
        urgent_ns = time.monotonic_ns() + MOST_HELD_NS - round(waited_s * 1e9)
        demand = self._credit.ask(owner, peer, frame_bytes, urgent_ns)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[demand] = answer
        self._give_out()
        try:
            return CreditGrant(demand, await answer)
        except asyncio.CancelledError:
            self.give_back(CreditGrant(demand, 0), 0)
            raise

    def give_back(self, grant: CreditGrant, received_bytes: int) -> None:
        """Return credit of which nothing is in flight any more."""
        self._waiting.pop(grant.demand, None)
        now_ns = time.monotonic_ns()
        cpu_ns = time.process_time_ns()
        self._credit.give_back(grant.demand, received_bytes, now_ns, cpu_ns)
        self._give_out()

    def drop(self, owner: str) -> None:
        """End all demands of a hand-off that is over; those that wait get no frames."""
        for demand in self._credit.drop(owner, time.monotonic_ns(), time.process_time_ns()):
            self._answer(demand, 0)
        self._give_out()

    def waits(self, owner: str) -> bool:
        """Return whether a hand-off waits for credit."""
        return self._credit.waits(owner)

    def _give_out(self) -> None:
        now_ns = time.monotonic_ns()
        for grant in self._credit.grants(now_ns, time.process_time_ns()):
            self._answer(grant.demand, grant.frames)
        if self._due is not None:
            self._due.cancel()
            self._due = None
        due_ns = self._credit.due_ns(now_ns)
        if due_ns is not None:
            loop = asyncio.get_running_loop()
            self._due = loop.call_later((due_ns - now_ns) / 1e9, self._give_out)

    def _answer(self, demand: int, frames: int) -> None:
        answer = self._waiting.pop(demand, None)
        if answer is not None and not answer.done():
            answer.set_result(frames)
