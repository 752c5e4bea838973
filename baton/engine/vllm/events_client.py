"""Connections to vLLM's sockets with KV events: the stream, and the replay of missing batches."""

import asyncio
from collections.abc import Callable

import msgspec

from baton.engine.vllm.kv_events import REPLAY_END, CacheMirror, EventOrder
from baton.engine.vllm.zmtp import SUBSCRIBE_ALL, ZmtpPeer, message
from baton.types.errors import InternalError
from baton.types.events import CacheChanged

_CHUNK_BYTES = 1 << 16
_RETRY_S = 1.0


class KvEventsClient:
    """Reader of the events of one vLLM, which keeps ``mirror`` up to date.

    Args:
        folder: Folder with the sockets ``events`` and ``replay``.
        on_change: Called with each change of Baton's index.
        log: Called with one line of text for each gap.
    """

    def __init__(
        self, folder: str, on_change: Callable[[CacheChanged], None], log: Callable[[str], None]
    ) -> None:
        self.mirror = CacheMirror()
        self._folder = folder
        self._on_change = on_change
        self._log = log
        self._order = EventOrder()
        self._gap = asyncio.Event()

    async def run(self) -> None:
        """Read events until vLLM closes the stream, or this is cancelled."""
        reader, writer = await asyncio.open_unix_connection(f"{self._folder}/events")
        try:
            peer = ZmtpPeer("SUB")
            writer.write(peer.hello)
            subscribed = False
            while data := await reader.read(_CHUNK_BYTES):
                for parts in peer.feed(data):
                    self._live(parts)
                if peer.ready and not subscribed:
                    subscribed = True
                    writer.write(SUBSCRIBE_ALL)
                    self._gap.set()  # requests what was published before
        finally:
            writer.close()

    async def fill_gaps(self) -> None:
        """Request missing batches whenever there is a gap, until this is cancelled."""
        while True:
            await self._gap.wait()
            self._gap.clear()
            while (number := self._order.missing_from) is not None:
                try:
                    await self._replay(number)
                except OSError as error:
                    self._log(f"cannot request missing KV events: {error}")
                    await asyncio.sleep(_RETRY_S)

    def _live(self, parts: list[bytes]) -> None:
        _, number, payload = parts
        self._apply(self._order.live(int.from_bytes(number, "big"), payload))
        if self._order.missing_from is not None:
            self._gap.set()

    async def _replay(self, number: int) -> None:
        reader, writer = await asyncio.open_unix_connection(f"{self._folder}/replay")
        try:
            peer = ZmtpPeer("DEALER")
            writer.write(peer.hello)
            requested = False
            while data := await reader.read(_CHUNK_BYTES):
                for parts in peer.feed(data):
                    if not self._replayed(parts):
                        return
                if peer.ready and not requested:  # libzmq refuses messages before the handshake
                    requested = True
                    writer.write(message(b"", number.to_bytes(8, "big")))
            raise ConnectionResetError("vLLM closed the replay of KV events")
        finally:
            writer.close()

    def _replayed(self, parts: list[bytes]) -> bool:
        """Take one message of a replay; return whether more follow."""
        *_, number, payload = parts
        at = int.from_bytes(number, "big", signed=True)
        if at != REPLAY_END:
            self._apply(self._order.replayed(at, payload))
            return True
        if self._order.replay_ended():
            self._log("KV events are lost: forgetting the cached blocks of this worker")
            self._on_change(self.mirror.clear())
        self._apply(self._order.take_ready())
        return False

    def _apply(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            try:
                change = self.mirror.apply(payload)
            except msgspec.DecodeError as error:
                raise InternalError(f"vLLM sent KV events of an unknown format: {error}") from None
            if change.stored or change.removed:
                self._on_change(change)
