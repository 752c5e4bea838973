"""A controller that stands still is replaced; its workers serve on, and nothing else ends."""

import contextlib
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from config.fleet_file import FleetConfig, PoolsConfig
from fleet.local.local_pools import LocalPools
from fleet.local.supervisor import _CONTROLLER_LOST_S, _CONTROLLER_POLL_S
from fleet.pools.resources import ControllerSpec
from fleet.process_key import ProcessKey
from tests.fleet.ray_fleet import RAYS_OWN_WARNINGS, ray_fleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(180), *RAYS_OWN_WARNINGS]
CONFIG = FleetConfig(
    fleet="frozen", pools=PoolsConfig(prefill=1, decode=1), cpus_per_rank=0.5, threads_per_rank=1
)
PROGRAM = {"fleet_token": "t", "program": "tests.fleet.small_worker"}


def controllers() -> list[ProcessKey]:
    """Those below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ControllerActor" in " ".join(process.cmdline()):
                found.append(ProcessKey.of(process.pid))
    return [key for key in found if key is not None]


def wait_ready(pools: LocalPools) -> dict[str, int]:
    """The lives that are ready, once all slots have one."""
    deadline = time.monotonic() + 60
    while not (slots := pools.slots()) or any(slot["phase"] != "ready" for slot in slots):
        assert time.monotonic() < deadline, slots
        time.sleep(0.1)
    return {slot["worker_id"]: slot["epoch"] for slot in slots}


def test_a_frozen_controller_is_replaced_before_the_fleet_would_end() -> None:
    with ray_fleet(CONFIG, **PROGRAM) as fleet:
        pools = LocalPools(CONFIG, Path())
        pools._controller = fleet.controller
        pools._health = SimpleNamespace(answers=True)
        pools._spec = ControllerSpec(
            config_json=CONFIG.to_json(),
            redis_url=fleet.redis_url,
            host="127.0.0.1",
            log_dir=str(fleet.logs),
            **PROGRAM,
        )
        before = wait_ready(pools)
        (frozen,) = controllers()
        os.kill(frozen.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        while not pools.answers():
            assert time.monotonic() - began_s < _CONTROLLER_LOST_S
            time.sleep(_CONTROLLER_POLL_S)
        assert len(pools.news()) == 1
        assert wait_ready(pools) == before, "adopted, none was started anew"
        deadline = time.monotonic() + 20
        while frozen.find() is not None:
            assert time.monotonic() < deadline, "Ray ends it; it never wakes as a second one"
            time.sleep(0.1)
        assert frozen not in controllers() and len(controllers()) == 1
        assert pools._controller.stop()


def test_without_rays_head_nothing_is_asked_of_it() -> None:
    """Its calls would wait for a minute, and then end the supervisor."""
    pools = LocalPools(CONFIG, Path())
    from ray.exceptions import GetTimeoutError

    def silent(timeout_s: float) -> None:
        raise GetTimeoutError(str(timeout_s))

    replaced: list[str] = []
    pools._controller = SimpleNamespace(keep_running=silent)
    pools._replace_controller = lambda: replaced.append("replaced")
    for answers, times in ((False, 0), (True, 2)):
        pools._health = SimpleNamespace(answers=answers)
        for _ in range(8):
            pools.answers()
        assert len(replaced) == times
