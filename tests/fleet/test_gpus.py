"""Workers with GPUs on a real Ray, which is configured with four GPUs on any machine."""

import asyncio
from pathlib import Path

import pytest
import ray

from baton.config.fleet_file import FleetConfig
from baton.registry.redis_store import Registry
from fleet.local.checks import preflight
from fleet.pools.placement import cluster_nodes
from tests.fleet.ray_fleet import RAYS_OWN_WARNINGS, ray_fleet
from tests.fleet.test_ray_fleet import SPEC, wait_for

pytestmark = [pytest.mark.fleet, *RAYS_OWN_WARNINGS]

CONFIG = FleetConfig.model_validate(
    {
        "fleet": "test",
        "model": "/models/of-vllm",
        "numerics": "fast",
        "cpus_per_rank": 0.5,
        "threads_per_rank": 1,
        "pools": {
            "prefill": 0,
            "decode": 2,
            "engine": "vllm",
            "vllm": {"python": "/opt/vllm/bin/python", "gpus": 2},
        },
    }
)


async def visible(redis_url: str) -> list[str]:
    """The GPUs that each worker sees."""
    registry = Registry(redis_url, "test")
    try:
        return sorted(record.reason for record in (await registry.records())[1].values())
    finally:
        await registry.close()


@pytest.mark.long
def test_each_worker_sees_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 4}')
    with ray_fleet(CONFIG, **SPEC) as fleet:
        wait_for(lambda: asyncio.run(visible(fleet.redis_url)) == ["0,1", "2,3"], 60)
        asked = [group["bundles"] for group in ray.util.placement_group_table().values()]
        assert asked == [{0: {"CPU": 0.5, "GPU": 2.0}}] * 2
        (node,) = cluster_nodes()
        assert (node.gpus, node.free_gpus) == (4.0, 0.0)


def test_gpus_that_nobody_reserves_are_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "_DEVICES", tmp_path)
    vllm = CONFIG.pools.vllm
    assert vllm is not None
    shared = CONFIG.model_copy(
        update={
            "pools": CONFIG.pools.model_copy(update={"vllm": vllm.model_copy(update={"gpus": 0})})
        }
    )
    assert not any("gpus" in note for note in preflight.notes(shared))
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert any("all its GPUs (here 2)" in note for note in preflight.notes(shared))
    assert not any("gpus" in note for note in preflight.notes(CONFIG))
