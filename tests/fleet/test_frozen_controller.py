"""When a silent controller is replaced; ``test_ray_fleet.py`` has a real one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError

from baton.config.fleet_file import FleetConfig
from fleet.local.local_pools import LocalPools


def test_without_rays_head_nothing_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls would wait for a minute, and then end the supervisor."""

    def silent(timeout_s: float) -> None:
        raise GetTimeoutError(str(timeout_s))

    replaced: list[str] = []
    pools = LocalPools(FleetConfig(), Path())
    silent_one = SimpleNamespace(keep_running=silent)
    monkeypatch.setattr(pools, "_controllers", {"local": silent_one})
    monkeypatch.setattr(pools, "_replace_controller", lambda _: replaced.append("replaced"))
    for answers, times in ((False, 0), (True, 2)):
        monkeypatch.setattr(pools, "_health", SimpleNamespace(answers=answers))
        for _ in range(8):
            pools.answers()
        assert len(replaced) == times
