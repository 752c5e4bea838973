"""The ranks of a replica that Ray places each by itself: an actor for each, in its own bundle.

    placement group   bundle 0: WorkerActor, the leader      bundle 1: RankActor      bundle 2: ...
                                └──────── owns ──────────────────┴─────────────────────┘

Ray ends what an actor owns when that ends, and all of a group with it. Without Ray a rank ends
itself, as soon as its leader's stream breaks (``fleet.rank``). No rank outlives its leader's life.
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
from fleet.rank import RankSettings, running

_START_LIMIT_S = 60.0  # for a process of Ray's, on the node of a bundle
_SAME = ("host", "ports", "fleet_token", "fleet_token_file", "insecure")


class RankActor:
    """One rank, for one life of its leader; its process ends with it.

    Args:
        settings: Fields of ``RankSettings``, the token sealed or not; an empty ``host`` means this
            node's address.
        log_file: For what it and its engine process print.
        log_format: Of its own lines.
    """

    def __init__(self, settings: Mapping[str, Any], log_file: str, log_format: LogFormat) -> None:
        log_to(Path(log_file), log_format)
        fields = on_this_node({**settings, "fleet_token": unseal(settings["fleet_token"])})
        self._settings = msgspec.convert(fields, RankSettings)
        self._tasks = BackgroundTasks("rank's actor")

    async def start(self) -> str:
        """Listen for the leader; at which address.

        Raises:
            InternalError, SecretError: See ``fleet.rank.running``.
        """
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
    """Ranks 1 and up of the replica whose leader runs in this actor.

    Args:
        settings: Of the leader's life, as they came through Ray.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._worker_id: str = settings["worker_id"]
        self._log_dir = Path(settings["log_dir"])
        self._log_format: LogFormat = settings["log_format"]
        self._settings = {name: settings[name] for name in _SAME}
        self._count: int = settings["engine"]["tensor_parallel"] - 1
        self._actors: list[Any] = []

    async def start(self) -> tuple[str, ...]:
        """Start them all; their addresses.

        Raises:
            RuntimeError: One did not start.
        """
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
                # The bundle's CPUs are the rank's, whoever counts them: an actor that asked for
                # them would wait for one of the last life that is frozen.
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
            why = f"nothing was heard of it for {_START_LIMIT_S:g} s"
            raise RuntimeError(f"rank {rank} was not started: {why}") from error
        except RayError as error:
            why = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
            raise RuntimeError(f"rank {rank} was not started: {why}") from error
        return address

    def end(self) -> None:
        """End their processes, those that have not ended with their leader."""
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        self._actors.clear()
