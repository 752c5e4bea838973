"""Connections to vLLM's sockets with KV events: the stream, and the replay of missing batches."""

import asyncio
from collections.abc import Callable

import msgspec

from baton.engine.vllm.kv_events import REPLAY_END, CachedBlocks, EventOrder
from baton.types.errors import InternalError
from baton.types.events import CacheChanged

try:
    import zmq.asyncio
except ImportError:
    raise ImportError("vLLM workers need pyzmq: pip install 'baton-serve[vllm]'") from None

_REPLAY_S = 30.0  # between two messages of a replay
_RETRY_S = 1.0


class KvEventsClient:
    """Reader of the events of one vLLM, which keeps ``cached`` up to date.

    Args:
        folder: Folder with the sockets ``events`` and ``replay``.
        on_change: Called with each change of Baton's index.
        log: Called with one line of text for each gap.
    """

    def __init__(
        self, folder: str, on_change: Callable[[CacheChanged], None], log: Callable[[str], None]
    ) -> None:
        self.cached = CachedBlocks()
        self._folder = folder
        self._on_change = on_change
        self._log = log
        self._order = EventOrder()
        self._gap = asyncio.Event()
        self._context = zmq.asyncio.Context()

    def close(self) -> None:
        """Free the sockets; the tasks of ``run`` and ``fill_gaps`` have ended."""
        self._context.destroy(linger=0)

    async def run(self) -> None:
        """Read events until this is cancelled."""
        with self._context.socket(zmq.SUB) as events:
            events.subscribe(b"")
            events.connect(f"ipc://{self._folder}/events")
            self._gap.set()  # requests what was published before
            while True:
                self._live(await events.recv_multipart())

    async def fill_gaps(self) -> None:
        """Request missing batches whenever there is a gap, until this is cancelled."""
        while True:
            await self._gap.wait()
            self._gap.clear()
            while (number := self._order.missing_from) is not None:
                try:
                    await self._replay(number)
                except TimeoutError:
                    self._log(f"vLLM does not repeat its KV events from number {number} on")
                    await asyncio.sleep(_RETRY_S)

    def _live(self, parts: list[bytes]) -> None:
        _, number, payload = parts
        self._apply(self._order.live(int.from_bytes(number, "big"), payload))
        if self._order.missing_from is not None:
            self._gap.set()

    async def _replay(self, number: int) -> None:
        with self._context.socket(zmq.DEALER) as replay:
            replay.linger = 0
            replay.rcvhwm = 0  # vLLM discards what its peer does not take at once
            replay.connect(f"ipc://{self._folder}/replay")
            await replay.send_multipart([b"", number.to_bytes(8, "big")])
            has_more = True
            while has_more:
                async with asyncio.timeout(_REPLAY_S):
                    parts = await replay.recv_multipart()
                has_more = self._replayed(parts)

    def _replayed(self, parts: list[bytes]) -> bool:
        """Take one message of a replay; return whether more follow."""
        *_, number, payload = parts
        at = int.from_bytes(number, "big", signed=True)
        if at != REPLAY_END:
            self._apply(self._order.replayed(at, payload))
            return True
        if self._order.replay_ended():
            self._log("KV events are lost: forgetting the cached blocks of this worker")
            self._on_change(self.cached.clear())
        self._apply(self._order.take_ready())
        return False

    def _apply(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            try:
                change = self.cached.apply(payload)
            except msgspec.DecodeError as error:
                raise InternalError(f"vLLM sent KV events of an unknown format: {error}") from None
            if change.stored or change.removed:
                self._on_change(change)
