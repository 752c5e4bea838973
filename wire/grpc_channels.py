"""A worker's gRPC channels to other workers, one for each address."""

import grpc.aio

from wire.grpc_options import open_channel


class Channels:
    """Opened when first asked for; shared by control streams and pulls."""

    def __init__(self) -> None:
        self._by_address: dict[str, grpc.aio.Channel] = {}

    def to(self, address: str) -> grpc.aio.Channel:
        """The channel to an address."""
        if address not in self._by_address:
            self._by_address[address] = open_channel(address)
        return self._by_address[address]

    async def forget(self, address: str) -> None:
        """Close a channel whose far end died, so that its back-off does not delay the next life."""
        channel = self._by_address.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Close all channels."""
        for address in list(self._by_address):
            await self.forget(address)
