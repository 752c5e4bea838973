"""Redis of one fleet: the embedded server, or another one, on which the fleet has a lease.

A second `baton up` of the fleet is refused, from any host or folder.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from baton.config.fleet_file import EMBEDDED, FleetConfig
from baton.registry.lease import RENEW_EVERY_S, FleetLease, LeaseHolder
from baton.registry.redis_store import Registry, RegistryUnavailableError
from fleet.local.checks.redis_check import check_external, redacted
from fleet.local.redis_server import EmbeddedRedis, RedisKeeper, server_program
from fleet.process_key import ProcessKey

_LOOK_S = 0.5


class FleetRedis:
    """Starts or checks the server, keeps the embedded one running, and holds the fleet's lease."""

    def __init__(self, config: FleetConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._keeper: RedisKeeper | None = None
        self._lease: LeaseKeeper | None = None  # of the fleet's name on a shared Redis
        self.url = ""

    def start(self, run_folder: Path, logs: Path, lease_url: str, take_over: bool | None) -> None:
        """Start or check the server, and take the lease of a shared one.

        ``lease_url`` is written into the lease, which ``take_over`` takes from a live supervisor;
        None: not on a cluster, which could keep the workers.

        Raises:
            RedisError: The server cannot be used.
            LeaseTakenError: Another live supervisor runs the fleet.
        """
        if self._config.redis == EMBEDDED:
            own = EmbeddedRedis(run_folder, log_file=logs / "redis.log")
            own.start()
            self._keeper = RedisKeeper(own, self._say)
            self.url = own.url
            self._say(f"redis is up: {server_program()}")
            return
        server = asyncio.run(check_external(self._config.redis, self._config.fleet))
        self.url = self._config.redis
        self._say(f"redis is {server} at {redacted(self._config.redis)}")
        fix = "stop it there, or set another name with `fleet:` or another Redis"
        if take_over is not None:
            fix = "stop it there, or use --take-over, which keeps its workers running"
        by_force = bool(take_over)
        self._lease = LeaseKeeper(self.url, self._config.fleet, lease_url, fix, by_force=by_force)
        self._lease.start()

    def keep(self) -> None:
        """Restart an embedded server that died."""
        if self._keeper is not None:
            self._keeper.keep(time.monotonic())

    @property
    def taken_by(self) -> LeaseHolder | None:
        """Return the supervisor that has taken the fleet over, if any."""
        return self._lease.taken_by if self._lease is not None else None

    def stop(self) -> None:
        """Return the lease, and stop the embedded server."""
        try:
            if self._lease is not None:
                self._lease.stop()
        finally:
            if self._keeper is not None:
                self._keeper.stop()


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
