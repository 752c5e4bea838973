"""Connections to prefill workers, and what has been measured on each edge."""

from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from batonpb import common_pb2, prefill_pb2_grpc
from batonpb import prefill_pb2 as pb
from batonpb.decode_pb2 import PrefillTarget

from kvtransfer import grpc_transport
from wire.grpc_options import open_channel, token_metadata

HANDSHAKE_S = 1.0
_PRIOR_BYTES_PER_S = 200e6


@dataclass(slots=True)
class EdgeRate:
    """Bandwidth from one prefill worker to here, fitted to hand-offs."""

    bytes_per_s: float = _PRIOR_BYTES_PER_S
    measured: bool = False

    def note(self, payload_bytes: int, seconds: float) -> None:
        """One hand-off moved that much in that time."""
        if payload_bytes < 1 << 16 or seconds <= 0:
            return
        sample = payload_bytes / seconds
        self.bytes_per_s = 0.7 * self.bytes_per_s + 0.3 * sample if self.measured else sample
        self.measured = True


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
        self._fleet_token = fleet_token
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._greeted: dict[str, bytes] = {}

    def edge(self, worker_id: str) -> EdgeRate:
        """The edge from a prefill worker to here."""
        return self.edges.setdefault(worker_id, EdgeRate())

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]

    async def greet(self, target: PrefillTarget, again: bool = False) -> None:
        """Shake hands once per incarnation.

        Args:
            target: The prefill worker.
            again: Ask even if it was asked before (is it still alive?).

        Raises:
            PeerGoneError: Nobody answers, or another incarnation does.
            PeerRefusedError: The two cannot work together.
        """
        if not again and self._greeted.get(target.address) == target.incarnation:
            return
        stub = prefill_pb2_grpc.PrefillStub(self._channel(target.address))
        try:
            reply: pb.HandshakeReply = await stub.Handshake(
                self._capabilities, metadata=self._metadata, timeout=HANDSHAKE_S
            )
        except grpc.aio.AioRpcError as error:
            reason = f"{target.worker_id} does not answer: {error.details()}"
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise PeerRefusedError(reason) from error  # slow, or cut off: not known to be dead
            await self.forget(target.address)
            raise PeerGoneError(reason) from error
        if reply.identity.incarnation != target.incarnation:
            raise PeerGoneError(f"{target.worker_id} was restarted")
        if reply.HasField("refusal"):
            raise PeerRefusedError(f"{target.worker_id}: {reply.refusal.message}")
        self._greeted[target.address] = target.incarnation

    async def forget(self, address: str) -> None:
        """Drop a channel whose far end died, so that its back-off does not delay the next life."""
        self._greeted.pop(address, None)
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    def prefill(self, target: PrefillTarget) -> Any:
        """Open the control stream of one hand-off."""
        stub = prefill_pb2_grpc.PrefillStub(self._channel(target.address))
        return stub.Prefill(metadata=self._metadata)

    def pull(self, target: PrefillTarget, request: pb.PullRequest) -> Any:
        """Ask for frames."""
        return grpc_transport.pull_stream(self._channel(target.address), request, self._fleet_token)

    async def close(self) -> None:
        """Close all channels."""
        for address in list(self._channels):
            await self.forget(address)
