"""Ranks of a replica that are placed separately: one actor per rank, in its own bundle.

    placement group   bundle 0: WorkerActor, the leader      bundle 1: RankActor      bundle 2: ...
                                └──────── owns ──────────────────┴─────────────────────┘

Ray ends the actors that another one owns with it, and all actors of a placement group with the
group. A rank also exits by itself when its leader's stream breaks (``fleet.worker.rank``).
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.telemetry.logs import LogFormat
from baton.telemetry.tasks import BackgroundTasks
from fleet.pools.ray_process import log_to, on_this_node
from fleet.pools.sealing import unseal
from fleet.worker.rank import RankSettings, running

_START_LIMIT_S = 60.0  # for Ray to start a process on the bundle's node
_SHARED_SETTINGS = ("host", "ports", "fleet_token", "fleet_token_file", "insecure")


class RankActor:
    """Actor that hosts one rank for one incarnation of its leader, and ends with it.

    The settings are fields of ``RankSettings``, with a sealed or plain token; an empty ``host``
    means this node's address.
    """

    def __init__(self, settings: Mapping[str, Any], log_file: str, log_format: LogFormat) -> None:
        log_to(Path(log_file), log_format)
        fields = on_this_node({**settings, "fleet_token": unseal(settings["fleet_token"])})
        self._settings = msgspec.convert(fields, RankSettings)
        self._tasks = BackgroundTasks("rank's actor")

    async def start(self) -> str:
        """Listen for the leader, and return the address."""
        listens: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def broke(error: Exception) -> None:
            if listens.done():
                os._exit(1)
            listens.set_exception(error)

        self._tasks.vital(self._run(listens), "rank", broke)
        return await listens

    async def _run(self, listens: "asyncio.Future[str]") -> None:
        async with running(self._settings) as (address, ended):
            listens.set_result(address)
            code = await ended
        os._exit(code)


class RankActors:
    """Ranks 1 and up of the replica whose leader runs in this actor with these settings."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._worker_id: str = settings["worker_id"]
        self._log_dir = Path(settings["log_dir"])
        self._log_format: LogFormat = settings["log_format"]
        self._settings = {name: settings[name] for name in _SHARED_SETTINGS}
        self._count: int = settings["engine"]["tensor_parallel"] - 1
        self._actors: list[Any] = []

    async def start(self) -> tuple[str, ...]:
        """Start all ranks and return their addresses."""
        starts = [self._start(rank) for rank in range(1, self._count + 1)]
        try:
            return tuple(await asyncio.gather(*starts))
        except BaseException:
            self.end()
            raise

    async def _start(self, rank: int) -> str:
        actor = (
            ray.remote(RankActor)
            .options(
                # The bundle's CPUs belong to the rank anyway; an actor that requested them would
                # wait for a frozen predecessor to release them.
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=ray.util.get_current_placement_group(),
                    placement_group_bundle_index=rank,
                ),
            )
            .remote(
                self._settings,
                str(self._log_dir / f"{self._worker_id}.rank-{rank}.log"),
                self._log_format,
            )
        )
        self._actors.append(actor)
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                address: str = await actor.start.remote()
        except TimeoutError as error:
            why = f"no response for {_START_LIMIT_S:g} s"
            raise RuntimeError(f"rank {rank} did not start: {why}") from error
        except RayError as error:
            why = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
            raise RuntimeError(f"rank {rank} did not start: {why}") from error
        return address

    def end(self) -> None:
        """Kill the ranks that have not ended with their leader."""
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        self._actors.clear()
