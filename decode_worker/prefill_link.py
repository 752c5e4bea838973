"""One Prefill stream to a prefill worker, from this end."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import grpc
from batonpb import decode_pb2
from batonpb import prefill_pb2 as pb

HEARTBEAT_S = 0.5
SILENCE_S = 3.0  # a prefill worker says something at least every HEARTBEAT_S


@dataclass(slots=True, eq=False)
class PrefillStream:
    """Written to by several tasks; gRPC takes one write at a time."""

    target: decode_pb2.PrefillTarget
    call: Any = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def write(self, message: pb.PrefillControl) -> None:
        """Send a message."""
        async with self.lock:
            await self.call.write(message)

    async def renew(self) -> None:
        """Keep the hand-off's lease alive, until the stream ends."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            for sequence in range(1, 1 << 30):
                await asyncio.sleep(HEARTBEAT_S)
                await self.write(pb.PrefillControl(renew=pb.Renew(sequence=sequence)))

    async def say_last(self, message: pb.PrefillControl) -> None:
        """Send the last word; if it cannot be said, the lease will say it."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self.write(message)
            async with self.lock:
                await self.call.done_writing()
