"""Ray actors of the workers: each hosts one incarnation, or several in turn."""

import logging
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.config.fleet_file import FleetConfig
from baton.registry.types import WorkerRecord
from fleet.pools.ray_worker import WorkerActor
from fleet.pools.resources import (
    NAMESPACE,
    ControllerSpec,
    actor_name,
    runtime_environment,
    settings_digest,
    worker_settings,
)
from fleet.pools.sealing import SECRET_FIELDS, seal
from fleet.pools.slots import Launch

_LOG = logging.getLogger("fleet.pools.controller")


class WorkerActors:
    """Starts the actors of one lane's workers, with their settings."""

    def __init__(self, config: FleetConfig, spec: ControllerSpec) -> None:
        self._config = config
        self._spec = spec
        self._kv_blocks: dict[str, int] = {}  # largest pool that each worker has had

    def start(self, launch: Launch, group: PlacementGroup) -> Any:
        """Create the actor of an incarnation in its placement group."""
        config = self._config
        options = ray.remote(WorkerActor).options(
            name=actor_name(config.fleet, launch.worker_id, launch.epoch),
            namespace=NAMESPACE,
            lifetime="detached",  # to outlive a restart of the controller
            num_cpus=config.cpus_per_rank,
            num_gpus=config.pools.gpus or None,  # its CUDA_VISIBLE_DEVICES then has these only
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=0
            ),
            runtime_env=runtime_environment(config, self._spec.inherited),
        )
        return options.remote(self._spec.program, self.settings(launch))

    def settings(self, launch: Launch) -> dict[str, Any]:
        """Return a worker's settings, with sealed secrets if they go through a shared Ray."""
        settings = self._plain_settings(launch)
        if self._spec.sealed:
            settings |= {name: seal(settings[name]) for name in SECRET_FIELDS}
        return settings

    def settings_digest(self, launch: Launch) -> str:
        """Return the digest of the settings that a worker has now."""
        return settings_digest(self._plain_settings(launch))

    def note_blocks(self, worker: WorkerRecord) -> None:
        """Remember the largest KV pool of a worker, and log a new one that is smaller."""
        before = self._kv_blocks.get(worker.worker_id, 0)
        if self._config.kv_blocks_per_worker == "auto" and worker.kv_blocks < before:
            _LOG.warning(
                "worker=%s epoch=%d has %d KV blocks, %d before: its host has less free memory",
                worker.worker_id,
                worker.epoch,
                worker.kv_blocks,
                before,
            )
        self._kv_blocks[worker.worker_id] = max(before, worker.kv_blocks)

    def _plain_settings(self, launch: Launch) -> dict[str, Any]:
        kv_blocks_before = self._kv_blocks.get(launch.worker_id, 0)
        return worker_settings(self._config, launch, self._spec, kv_blocks_before)
