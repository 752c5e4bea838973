"""Connections to prefill workers, and what has been measured on each edge."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import grpc
import grpc.aio
from batonpb import common_pb2, prefill_pb2_grpc
from batonpb import prefill_pb2 as pb
from batonpb.decode_pb2 import PrefillTarget

from kvtransfer.transport import FrameStream
from kvtransfer.transports import TRANSPORTS, transport_to
from wire.grpc_channels import Channels
from wire.grpc_options import token_metadata

HANDSHAKE_S = 1.0
_AGAIN_S = 0.05  # between handshakes with an address where somebody listens and nobody answers
ControlCall = grpc.aio.StreamStreamCall[Any, Any]
_ASSUMED_BYTES_PER_S = 200e6  # of an edge that was not measured yet, for a pull's budget
_SAMPLES = 9
_LEAST_SAMPLE_BYTES = 1 << 16  # smaller ones say more about latency than about bandwidth


class EdgeRate:
    """Bandwidth from one prefill worker to here, fitted to hand-offs.

    The median byte of the last pulls: half of the bytes came at this rate or faster. A small pull
    tells of latency, and one that waited for the wire behind another's tells of nothing; an edge
    that is believed slow is avoided, so that nobody would learn better.
    """

    def __init__(self) -> None:
        self._pulls: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)  # bytes/s, bytes
        self._bytes_per_s = _ASSUMED_BYTES_PER_S

    @property
    def measured(self) -> bool:
        """Whether a hand-off said anything yet."""
        return bool(self._pulls)

    @property
    def bytes_per_s(self) -> float:
        """As measured, or what is assumed until then."""
        return self._bytes_per_s

    def note(self, payload_bytes: int, seconds: float) -> None:
        """One pull moved that much in that time."""
        if payload_bytes >= _LEAST_SAMPLE_BYTES and seconds > 0:
            self._pulls.append((payload_bytes / seconds, payload_bytes))
            self._bytes_per_s = _median_byte(self._pulls)


def _median_byte(pulls: Iterable[tuple[float, int]]) -> float:
    fastest_first = sorted(pulls, reverse=True)
    half_bytes = sum(payload_bytes for _, payload_bytes in fastest_first) / 2
    came_bytes = accumulate(payload_bytes for _, payload_bytes in fastest_first)
    middle = next(i for i, so_far_bytes in enumerate(came_bytes) if so_far_bytes >= half_bytes)
    return fastest_first[middle][0]


class PeerGoneError(Exception):
    """The incarnation that was named is not there any more."""


class PeerRefusedError(Exception):
    """The peer will not do, and is not known to be dead; the text says why."""


class Peers:
    """Channels by address, and edges by worker id.

    Args:
        capabilities: Ours, for the handshake.
        fleet_token: For every call.
    """

    def __init__(self, capabilities: common_pb2.Capabilities, fleet_token: str) -> None:
        self.edges: dict[str, EdgeRate] = {}
        self._capabilities = capabilities
        self._metadata = token_metadata(fleet_token)
        self._channels = Channels()
        self._transports = [
            kind.connect(self._channels, fleet_token) for kind in TRANSPORTS.values()
        ]
        self._greeted: dict[str, bytes] = {}
        self._addresses: dict[str, str] = {}  # of the latest life of each worker

    def edge(self, worker_id: str) -> EdgeRate:
        """The edge from a prefill worker to here."""
        return self.edges.setdefault(worker_id, EdgeRate())

    async def greet(self, target: PrefillTarget, again: bool = False) -> None:
        """Shake hands once per incarnation.

        Args:
            target: The prefill worker.
            again: Ask even if it was asked before (is it still alive?).

        Raises:
            PeerGoneError: Its address refuses connections, or another incarnation answers there.
            PeerRefusedError: The two cannot work together, or no answer can be had.
        """
        if not again and self._greeted.get(target.address) == target.incarnation:
            return
        reply = await self._handshake(target)
        if reply.identity.incarnation != target.incarnation:
            raise PeerGoneError(f"{target.worker_id} was restarted")
        if reply.HasField("refusal"):
            raise PeerRefusedError(f"{target.worker_id}: {reply.refusal.message}")
        self._greeted[target.address] = target.incarnation
        before = self._addresses.get(target.worker_id, target.address)
        self._addresses[target.worker_id] = target.address
        if before != target.address:
            await self._forget(before)

    async def _handshake(self, target: PrefillTarget) -> pb.HandshakeReply:
        """Ask until there is an answer, or evidence that there will be none, or no more time."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + HANDSHAKE_S
        while True:
            stub = prefill_pb2_grpc.PrefillStub(self._channels.to(target.address))
            try:
                left_s = max(until_s - loop.time(), _AGAIN_S)
                reply: pb.HandshakeReply = await stub.Handshake(
                    self._capabilities, metadata=self._metadata, timeout=left_s
                )
            except grpc.aio.AioRpcError as error:
                reason = f"{target.worker_id} does not answer: {error.details()}"
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise PeerRefusedError(reason) from error  # slow, cut off: not known to be dead
                if await _refuses_connections(target.address):
                    await self._forget(target.address)
                    raise PeerGoneError(reason) from error
                if loop.time() + _AGAIN_S > until_s:
                    raise PeerRefusedError(reason) from error
                await asyncio.sleep(_AGAIN_S)  # a connection that broke, or a server that closes
            else:
                return reply

    async def _forget(self, address: str) -> None:
        """Nobody is behind that address any more."""
        self._greeted.pop(address, None)
        await self._channels.forget(address)

    def prefill(self, target: PrefillTarget) -> "ControlCall":
        """Open the control stream of one hand-off."""
        stub = prefill_pb2_grpc.PrefillStub(self._channels.to(target.address))
        call: ControlCall = stub.Prefill(metadata=self._metadata)
        return call

    def pull(self, target: PrefillTarget, request: pb.PullRequest) -> FrameStream:
        """Ask for frames, by the best transport that reaches the worker.

        Raises:
            TransportError: None does.
        """
        return transport_to(target, self._transports).pull(target, request)

    async def close(self) -> None:
        """Close all connections."""
        for transport in self._transports:
            await transport.close()
        await self._channels.close()


async def _refuses_connections(address: str) -> bool:
    """Whether the host says that nobody listens there: the one proof of a process's end."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, TimeoutError, ValueError):
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        writer.close()
    return False
