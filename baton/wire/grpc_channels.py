"""gRPC channels of a worker to other workers, one per address."""

import grpc
import grpc.aio

from baton.telemetry.tasks import BackgroundTasks
from baton.wire.grpc_options import open_channel
from baton.wire.tls import FleetTls

_RETIRED_S = 600.0  # grace for calls that still run over a channel with an older certificate


class Channels:
    """Channels that are opened on first use and shared by control streams and pulls."""

    def __init__(self, tls: FleetTls | None = None) -> None:
        self._tls = tls
        self._by_address: dict[str, grpc.aio.Channel] = {}
        self._shown: dict[str, grpc.ChannelCredentials | None] = {}
        self._retired: list[grpc.aio.Channel] = []
        self._tasks = BackgroundTasks("channels")

    @property
    def encrypted(self) -> bool:
        """True if the channels use TLS."""
        return self._tls is not None

    def to(self, address: str) -> grpc.aio.Channel:
        """Return the channel to an address; a new one if our certificate has changed since."""
        shown = self._tls.channel_credentials() if self._tls is not None else None
        channel = self._by_address.get(address)
        if channel is not None and self._shown[address] is not shown:
            self._retired.append(channel)
            self._tasks.spawn(channel.close(_RETIRED_S), "retired channel")
            channel = None
        if channel is None:
            channel = self._by_address[address] = open_channel(address, self._tls)
            self._shown[address] = shown
        return channel

    async def forget(self, address: str) -> None:
        """Close the channel to a dead peer, so that its back-off does not delay the next one."""
        self._shown.pop(address, None)
        channel = self._by_address.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Close the channels to all workers."""
        await self._tasks.close()
        for channel in self._retired:
            await channel.close()
        for address in list(self._by_address):
            await self.forget(address)
