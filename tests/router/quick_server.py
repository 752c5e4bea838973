"""uvicorn's server, which looks ten times as often whether it may end: tests start hundreds."""

import asyncio
import contextlib
import socket

import uvicorn

_POLL_S = 0.01


class QuickServer(uvicorn.Server):
    """Ends as uvicorn does: no new connections, those under way have their time, then the app."""

    async def main_loop(self) -> None:
        """Until ``should_exit``."""
        counter = 0
        while not await self.on_tick(counter // 10 if counter % 10 == 0 else 1):
            counter += 1
            await asyncio.sleep(_POLL_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Without waiting longer than connections and tasks need."""
        state = self.server_state
        for server in self.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:
                    await asyncio.sleep(_POLL_S)
        for task in state.tasks:
            task.cancel()
        await self.lifespan.shutdown()
