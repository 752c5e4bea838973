"""Workers of an earlier controller, and strangers, found by the names of their actors."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from fleet.pools.liveness import Life, ShellProcess, end_actor, process_of
from fleet.pools.lives import LifeTable
from fleet.pools.resources import NAMESPACE, actor_name, actors_among
from fleet.pools.slots import LivingWorker

_LOG = logging.getLogger("fleet.pools.controller")

_STRANGERS_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class RunningActor:
    """Actor of a worker, and its process, if that responds."""

    worker_id: str
    actor: Any
    named: int  # epoch in the actor's name
    process: ShellProcess | None

    def living(self) -> LivingWorker:
        """Return the incarnation that it hosts, as far as it reports it."""
        process = self.process
        if process is None:
            return LivingWorker(self.worker_id, self.named, ready=False, silent=True)
        role = process.turned.role if process.turned is not None else None
        turn = process.turned.turn if process.turned is not None else 0
        epoch = max(self.named, process.epoch)
        return LivingWorker(self.worker_id, epoch, process.started, role, turn)

    def life(self, epoch: int) -> Life:
        """Return the view of its incarnation, which has this epoch."""
        return Life(epoch, self.actor, self.named)

    def differs(self, settings_digest: str) -> bool:
        """Return whether it was started with other settings than these."""
        process = self.process
        return process is not None and process.settings_digest not in ("", settings_digest)


async def running_actors(fleet: str) -> tuple[list[RunningActor], dict[str, int]]:
    """Return the workers' actors, and the epochs of those that ended after they were listed."""
    names = ray.util.list_named_actors(all_namespaces=True)
    actors: dict[str, Any] = {}
    ended: dict[str, int] = {}
    epochs = dict(actors_among(names, fleet))  # the latest of each
    for worker_id, epoch in epochs.items():
        try:
            actors[worker_id] = ray.get_actor(
                actor_name(fleet, worker_id, epoch), namespace=NAMESPACE
            )
        except ValueError:
            ended[worker_id] = epoch
    processes = await asyncio.gather(*map(process_of, actors.values()))
    running = [
        RunningActor(worker_id, actor, epochs[worker_id], process)
        for (worker_id, actor), process in zip(actors.items(), processes, strict=True)
    ]
    return running, ended


async def end_strangers(fleet: str, lives: LifeTable) -> None:
    """End the fleet's actors that are not followed, such as one whose end was lost, for ever."""
    while True:
        await asyncio.sleep(_STRANGERS_EVERY_S)
        with contextlib.suppress(RayError):
            names = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
            for worker_id, named in lives.strangers(actors_among(names, fleet)):
                _LOG.warning("ending an unknown process of worker=%s epoch=%d", worker_id, named)
                end_actor(actor_name(fleet, worker_id, named), NAMESPACE)
