"""Connections to prefill workers, and the measurements of each edge."""

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
from batonpb import common_pb2, prefill_pb2_grpc
from batonpb import prefill_pb2 as pb
from batonpb.decode_pb2 import PrefillTarget

from baton.addresses import split_address
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from baton.wire.tls import FleetTls, distrust
from kvtransfer.edge import Edge
from kvtransfer.kv_slice import FRAME_BYTES
from kvtransfer.transport import FrameStream, Peer, TransportError
from kvtransfer.transports import CARRY_INT8, connect_all

HANDSHAKE_S = 1.0
_AGAIN_S = 0.05  # between handshakes with an address that accepts connections and does not answer
# a server that ends cancels its calls
_MAY_BE_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
ControlCall = grpc.aio.StreamStreamCall[Any, Any]


class PeerGoneError(Exception):
    """The named incarnation has ended."""


class PeerRefusedError(Exception):
    """The peer is not usable, and not known to be dead; the message gives the reason."""


class Peers:
    """Channels by address, and edges by worker id."""

    def __init__(
        self,
        capabilities: common_pb2.Capabilities,
        token: FleetToken,
        tls: FleetTls | None = None,
    ) -> None:
        self.edges: dict[str, Edge] = {}
        self._capabilities = capabilities
        self._token = token
        self._channels = Channels(tls)
        self._transports = connect_all(self._channels, token)
        self._greeted: dict[str, Peer] = {}  # by address
        self._addresses: dict[str, str] = {}  # by worker id, of its latest incarnation

    def edge(self, worker_id: str) -> Edge:
        """Return the edge from a prefill worker to this worker."""
        return self.edges.setdefault(worker_id, Edge())

    async def greet(self, target: PrefillTarget, again: bool = False) -> None:
        """Shake hands, once per incarnation, or ``again`` to check that it is alive.

        Raises:
            PeerGoneError: Its address refuses connections, or another incarnation answers there.
            PeerRefusedError: The two are incompatible, or the peer does not answer.
        """
        if not again and self._knows(target):
            return
        reply = await self._handshake(target)
        if reply.identity.incarnation != target.incarnation:
            raise PeerGoneError(f"{target.worker_id} was restarted")
        if reply.HasField("refusal"):
            raise PeerRefusedError(f"{target.worker_id}: {reply.refusal.message}")
        if not self._knows(target):
            self._greeted[target.address] = Peer(target, reply.capabilities)
            self.edge(target.worker_id).begin_life()
        before = self._addresses.get(target.worker_id, target.address)
        self._addresses[target.worker_id] = target.address
        if before != target.address:
            await self._forget(before)

    async def _handshake(self, target: PrefillTarget) -> pb.HandshakeReply:
        """Retry until there is a reply, proof that there will be none, or a timeout."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + HANDSHAKE_S
        while True:
            stub = prefill_pb2_grpc.PrefillStub(self._channels.to(target.address))
            try:
                left_s = max(until_s - loop.time(), _AGAIN_S)
                reply: pb.HandshakeReply = await stub.Handshake(
                    self._capabilities, metadata=self._token.metadata, timeout=left_s
                )
            except asyncio.CancelledError as cancelled:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The channel was closed, because another hand-off found the peer dead.
                if loop.time() > until_s:
                    reason = f"{target.worker_id}: the connection was closed repeatedly"
                    raise PeerRefusedError(reason) from cancelled
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                reason = f"{target.worker_id} does not answer: {distrust(details) or details}"
                if error.code() not in _MAY_BE_GONE:
                    raise PeerRefusedError(reason) from error  # slow, cut off: not known dead
                if await _refuses_connections(target.address):
                    await self._forget(target.address)
                    raise PeerGoneError(reason) from error
                if loop.time() + _AGAIN_S > until_s:
                    raise PeerRefusedError(reason) from error
                await asyncio.sleep(_AGAIN_S)  # a connection that broke, or a server that closes
            else:
                return reply

    async def _forget(self, address: str) -> None:
        self._greeted.pop(address, None)
        await self._channels.forget(address)

    def prefill(self, target: PrefillTarget) -> "ControlCall":
        """Open the control stream of one hand-off."""
        stub = prefill_pb2_grpc.PrefillStub(self._channels.to(target.address))
        call: ControlCall = stub.Prefill(metadata=self._token.metadata)
        return call

    def ways(self, target: PrefillTarget, now_ns: int) -> list[str]:
        """Return the transports to pull from a worker by, the best first."""
        peer = self._peer(target)
        usable = [name for name, way in self._transports.items() if way.reaches(peer)]
        if target.transport:
            return [name for name in usable if name == target.transport]
        return self.edge(target.worker_id).ways(usable, now_ns)

    def frame_bytes(self, target: PrefillTarget, now_ns: int) -> int:
        """Return the size of frames to pull from a worker, by its best transport."""
        for best in self.ways(target, now_ns)[:1]:
            fastest_bytes = self._transports[best].frame_bytes
            return self.edge(target.worker_id).frame_bytes(best, fastest_bytes)
        return FRAME_BYTES

    def encoding(
        self, target: PrefillTarget, way: str, plain_bytes: int, int8_bytes: int
    ) -> common_pb2.ChunkEncoding:
        """Return the encoding to pull KV in: INT8 if both workers support it and it pays."""
        both = (self._capabilities, self._peer(target).capabilities)
        if way not in CARRY_INT8 or not all(
            common_pb2.INT8 in capabilities.encodings for capabilities in both
        ):
            return common_pb2.PLAIN
        frame_bytes = self._transports[way].frame_bytes
        pays = self.edge(target.worker_id).asks_int8(way, plain_bytes, int8_bytes, frame_bytes)
        return common_pb2.INT8 if pays else common_pb2.PLAIN

    def pull(self, target: PrefillTarget, request: pb.PullRequest, way: str) -> FrameStream:
        """Pull frames by one transport.

        Raises:
            TransportError: The transport does not reach the worker.
        """
        peer = self._peer(target)
        if not self._transports[way].reaches(peer):
            raise TransportError(f"{way} does not reach {target.worker_id}")
        return self._transports[way].pull(peer, request)

    def _knows(self, target: PrefillTarget) -> bool:
        greeted = self._greeted.get(target.address)
        return greeted is not None and greeted.target.incarnation == target.incarnation

    def _peer(self, target: PrefillTarget) -> Peer:
        if self._knows(target):
            return self._greeted[target.address]
        return Peer(target, common_pb2.Capabilities())  # only the address is known

    async def close(self) -> None:
        """Close the connections to all prefill workers."""
        for transport in self._transports.values():
            await transport.close()
        await self._channels.close()


async def _refuses_connections(address: str) -> bool:
    """Return whether the host refuses connections: the only proof that the process has ended."""
    with contextlib.suppress(OSError, TimeoutError, ValueError):
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                _, writer = await asyncio.open_connection(*split_address(address))
        except ConnectionRefusedError:
            return True
        writer.close()
    return False
