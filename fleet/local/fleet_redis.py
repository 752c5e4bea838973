"""Redis of one fleet: the embedded server, or another one."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from baton.config.fleet_file import EMBEDDED, FleetConfig
from baton.registry.lease import LeaseHolder
from fleet.lease_keeper import LeaseKeeper
from fleet.local.checks.redis_check import check_external, redacted
from fleet.local.redis_server import EmbeddedRedis, RedisKeeper, server_program


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
