"""Lease of a fleet on a shared Redis: a second `baton up` is refused, from any host or folder."""

import asyncio
import contextlib
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from baton.registry.lease import RENEW_EVERY_S, FleetLease, LeaseHolder
from baton.registry.redis_store import Registry, RegistryUnavailableError
from fleet.process_key import ProcessKey

_LOOK_S = 0.5


class LeaseTakenError(RuntimeError):
    """Another `baton up`, named in the message, runs this fleet."""


def this_process(url: str) -> LeaseHolder:
    """Return this process as a holder; ``url`` is its router's."""
    return LeaseHolder(
        life=secrets.token_hex(8),
        host=socket.gethostname(),
        pid=os.getpid(),
        url=url,
        since_s=time.time(),
        pid_space=_pid_space(),
    )


async def take_lease(lease: FleetLease, fleet: str, fix: str, *, by_force: bool = False) -> None:
    """Take a lease if it is free, if its holder is dead, or by force.

    Raises:
        LeaseTakenError: Its holder renews it; the message ends with ``fix``.
    """
    other = await lease.take(by_force=by_force)
    seen_ms = await lease.left_ms()
    while other is not None:
        dead_here = (other.host, other.pid_space) == (
            lease.me.host,
            lease.me.pid_space,
        ) and ProcessKey.of(other.pid) is None
        left_ms = await lease.left_ms()
        if left_ms > seen_ms:  # its holder has renewed it since
            raise LeaseTakenError(f"fleet {fleet} is run by {other}: {fix}")
        seen_ms = left_ms
        if not dead_here:
            await asyncio.sleep(_LOOK_S)
        other = await lease.take(by_force=dead_here)


class LeaseKeeper:
    """Takes a fleet's lease, and renews it in a thread until `stop`."""

    def __init__(
        self, redis_url: str, fleet: str, url: str, fix: str = "", *, by_force: bool = False
    ) -> None:
        self._registry = Registry(redis_url, fleet)
        self._fleet = fleet
        self._fix = fix
        self._by_force = by_force
        self._me = this_process(url)
        self._began = threading.Event()
        self._stop = threading.Event()
        self._problem: Exception | None = None
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._keep()), daemon=True, name="lease"
        )
        self.taken_by: LeaseHolder | None = None

    def start(self) -> None:
        """Take the lease; that of a dead holder lapses within 10 s.

        Raises:
            LeaseTakenError: Another live supervisor runs the fleet.
            RegistryUnavailableError: Redis does not answer.
        """
        self._thread.start()
        while not self._began.wait(_LOOK_S):  # in slices: a signal ends the wait
            pass
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        """Release the lease, for the next supervisor."""
        self._stop.set()
        self._thread.join(RENEW_EVERY_S)

    async def _keep(self) -> None:
        lease = FleetLease(self._registry, self._me)
        try:
            await take_lease(lease, self._fleet, self._fix, by_force=self._by_force)
        except Exception as error:  # noqa: BLE001 - raised in `start`
            self._problem = error
            self._stop.set()
        finally:
            self._began.set()
        while self.taken_by is None:
            if await asyncio.to_thread(self._stop.wait, RENEW_EVERY_S):
                break
            with contextlib.suppress(RegistryUnavailableError):
                self.taken_by = await lease.renew()
        if self._problem is None:
            with contextlib.suppress(RegistryUnavailableError):
                await lease.give_up()
        await self._registry.close()


def _pid_space() -> str:
    """Return the id of the namespace in which process ids of this host are unique."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""
