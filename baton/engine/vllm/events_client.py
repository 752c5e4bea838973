"""Connections to vLLM's sockets with KV events: the stream, and the replay of missing batches."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from baton.engine.remote.cached_prefixes import CachedPrefixes, Work
from baton.engine.vllm.control import log
from baton.engine.vllm.kv_events import REPLAY_END, CachedBlocks, EventOrder, parts_of
from baton.types.errors import InternalError
from baton.types.events import CacheChanged
from baton.types.geometry import BLOCK_TOKENS

try:
    import zmq.asyncio
except ImportError:
    raise ImportError("vLLM workers need pyzmq: pip install 'baton-serve[vllm]'") from None

_REPLAY_S = 30.0  # for a whole replay, while live batches are held
_REPLAYS = 2  # then what is missing is lost: the held batches would fill the memory
_ARRIVE_S = 1.0
_ARRIVE_TRIES = 3
_BATCH_BYTES = 4 << 20  # of one step
_MESSAGE_BYTES = 64 << 20  # then ZeroMQ ends the connection for ever
_PARTS = 3  # topic, number, batch
_UNREADABLE = (msgspec.DecodeError, ArithmeticError, LookupError, ValueError)


class KvEventsClient:
    """Reader of the events of one rank of a vLLM, which keeps ``cached`` up to date.

    Args:
        stream: ZeroMQ endpoint of the events.
        replay: Endpoint that repeats them; empty: none, and events that are missed stay unknown.
        has_tier: Whether vLLM holds blocks in host memory, too.

    Attributes:
        on_change: Called with each change of Baton's index.
    """

    def __init__(self, stream: str, replay: str, *, has_tier: bool = False) -> None:
        self.cached = CachedBlocks(has_tier=has_tier)
        self.on_change: Callable[[CacheChanged], None] = lambda _: None
        self._stream = stream
        self._replay_at = replay
        self._order = EventOrder()
        self._gap = asyncio.Event()
        self._applying = asyncio.Lock()
        self._context = _context_for(stream)

    def close(self) -> None:
        """Free the sockets; the tasks of ``run`` and ``fill_gaps`` have ended."""
        self._context.destroy(linger=0)

    async def run(self) -> None:
        """Read events until this is cancelled."""
        with self._context.socket(zmq.SUB) as events:
            events.subscribe(b"")
            events.connect(self._stream)
            self._gap.set()  # requests what was published before
            while True:
                await self._live(await events.recv_multipart())
                await asyncio.sleep(0)  # receiving what is there takes no turn of the loop

    async def fill_gaps(self) -> None:
        """Request missing batches whenever there is a gap, until this is cancelled."""
        while True:
            await self._gap.wait()
            self._gap.clear()
            while self._order.misses:
                if not self._replay_at or not await self._is_replayed():
                    await self._replay_ended()

    async def _live(self, parts: list[bytes]) -> None:
        _, number, payload = parts
        async with self._applying:
            await self._apply(self._order.live(int.from_bytes(number, "big"), payload))
        if self._order.misses:
            self._gap.set()

    async def _is_replayed(self) -> bool:
        """Return whether the missing batches were repeated, as far as vLLM has them."""
        for _ in range(_REPLAYS):
            number = self._order.next
            try:
                await self._replay(number)
            except TimeoutError:
                log(f"vLLM does not repeat its KV events from number {number} on")
            else:
                return True
        return False

    async def _replay(self, number: int) -> None:
        until_s = asyncio.get_running_loop().time() + _REPLAY_S
        with self._context.socket(zmq.DEALER) as replay:
            replay.linger = 0
            replay.rcvhwm = 0  # vLLM discards what its peer does not take at once
            replay.connect(self._replay_at)
            await replay.send_multipart([b"", number.to_bytes(8, "big")])
            has_more = True
            while has_more:
                async with asyncio.timeout_at(until_s):
                    parts = await replay.recv_multipart()
                has_more = await self._replayed(parts)
                await asyncio.sleep(0)  # as above

    async def _replayed(self, parts: list[bytes]) -> bool:
        """Take one message of a replay; return whether more follow."""
        *_, number, payload = parts
        at = int.from_bytes(number, "big", signed=True)
        if at != REPLAY_END:
            async with self._applying:
                await self._apply(self._order.replayed(at, payload))
            return True
        await self._replay_ended()
        return False

    async def _replay_ended(self) -> None:
        async with self._applying:
            if self._order.replay_ended():
                log("KV events are lost: forgetting the cached blocks of this worker")
                self.on_change(self.cached.clear())
            await self._apply(self._order.take_ready())

    async def _apply(self, payloads: list[bytes]) -> None:
        """Apply batches; other tasks have their turn between the parts of one."""
        try:
            for payload in payloads:
                if len(payload) > _BATCH_BYTES:
                    raise ValueError(f"a batch has {len(payload)} bytes")
                for part in parts_of(payload):
                    change = self.cached.take(part)
                    if change != CacheChanged((), ()):
                        self.on_change(change)
                    await asyncio.sleep(0)
        except _UNREADABLE as error:
            raise InternalError(f"vLLM sent KV events of an unknown format: {error}") from None


def _context_for(stream: str) -> zmq.asyncio.Context:
    context = zmq.asyncio.Context()
    context.setsockopt(zmq.IPV6, "[" in stream)  # with it, names mean their IPv6
    context.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES)
    return context


async def arrive(stream: str, compute: Callable[[str], Awaitable[object]]) -> bool:
    """Return whether readable events arrive of prompts that ``compute`` sends with a cache salt."""
    context = _context_for(stream)
    try:
        events = context.socket(zmq.SUB)
        events.subscribe(b"")
        events.connect(stream)
        for _ in range(_ARRIVE_TRIES):  # the first may come before the subscription
            salt = os.urandom(16).hex()
            await compute(salt)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ARRIVE_S):
                    while True:
                        parts = await events.recv_multipart()
                        if _names(parts, salt.encode()):
                            return True
                        await asyncio.sleep(0)  # receiving what is there takes no turn of the loop
    finally:
        context.destroy(linger=0)
    return False


def _names(parts: list[bytes], salt: bytes) -> bool:
    """Return whether events can be read, and name a salt."""
    with contextlib.suppress(*_UNREADABLE):
        if len(parts) == _PARTS and len(parts[-1]) <= _BATCH_BYTES and salt in parts[-1]:
            CachedBlocks().apply(parts[-1])
            return True
    return False


class EventPrefixes(CachedPrefixes):
    """Prefixes that a rank of a vLLM has cached, by its KV events.

    Args:
        client: Reader of the events.
        block_tokens: Tokens of one of its blocks.
        on_change: Called with each change of Baton's index.
    """

    def __init__(
        self, client: KvEventsClient, block_tokens: int, on_change: Callable[[CacheChanged], None]
    ) -> None:
        self._client = client
        self._block_tokens = block_tokens
        client.on_change = on_change

    @property
    def held_blocks(self) -> int:
        """Number of Baton's blocks that are cached."""
        return self._client.cached.held_blocks

    @property
    def tier_blocks(self) -> int:
        """Number of Baton's blocks in host memory."""
        return self._client.cached.tier_blocks * self._block_tokens // BLOCK_TOKENS

    def works(self) -> list[Work]:
        """Return the tasks that read the events."""
        return [(self._client.run(), "kv events"), (self._client.fill_gaps(), "kv event gaps")]

    def cached_tokens(self, hashes: Sequence[bytes]) -> int:
        """Return the cached tokens of a prompt with these block hashes."""
        return self._client.cached.cached_tokens(hashes, self._block_tokens)

    def close(self) -> None:
        """Close the sockets."""
        self._client.close()
