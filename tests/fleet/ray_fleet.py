"""A fleet that Ray starts on this machine, with a Redis of its own."""

import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import ray
from ray._private.authentication_test_utils import reset_auth_token_state

from baton.config.fleet_file import FleetConfig
from fleet.local.redis_server import EmbeddedRedis
from fleet.pools.ray_runtime import Controller, process_token, start_local
from fleet.pools.resources import ControllerSpec

RAYS_OWN_WARNINGS = [  # it leaves a pipe and a socket to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class RayFleet(NamedTuple):
    controller: Controller
    redis_url: str
    logs: Path


def use_token() -> None:
    """Make Ray's client in this process use the token of its local clusters.

    It keeps the mode and the token of the first connection in this process. That may be a Ray that
    one of its functions has started by itself, in an earlier test.
    """
    ray.shutdown()
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = process_token()
    reset_auth_token_state()


@contextlib.contextmanager
def ray_fleet(config: FleetConfig, **spec: object) -> Iterator[RayFleet]:
    """Ray, Redis and the controller of ``config``; all of it is ended at the end."""
    folder = Path(tempfile.mkdtemp(prefix="bt-"))
    redis = EmbeddedRedis()
    try:
        redis.start()
        use_token()
        inherited = start_local(folder / "r", config)
        made = ControllerSpec(
            config_json=config.to_json(),
            redis_url=redis.url,
            host="127.0.0.1",
            inherited=inherited,
            log_dir=str(folder / "logs"),
            **spec,
        )
        yield RayFleet(Controller.start(config.fleet, made), redis.url, folder / "logs")
    finally:
        ray.shutdown()
        redis.stop()
        shutil.rmtree(folder)
        gc.collect()  # Ray's pipes and process handles, while their warnings are ignored
