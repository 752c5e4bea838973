"""The files for `ray up` fit Ray's own schema, and say the same of ports and tokens."""

from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import validate_config

from baton.config.load import load_config

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = ["ray-cluster-local.yaml", "ray-cluster-aws.yaml"]


@pytest.mark.parametrize("name", FILES)
def test_a_cluster_file_fits_the_schema_and_starts_ray_with_its_token(name: str) -> None:
    config = yaml.safe_load((DEPLOY / name).read_text())
    validate_config({**config, "cluster_synced_files": []})  # `ray up` fills that in itself
    head, worker = config["head_start_ray_commands"], config["worker_start_ray_commands"]
    for commands in (head, worker):
        assert all("/opt/baton/bin/ray" in command for command in commands)
        assert "RAY_AUTH_MODE=token" in commands[-1]
        assert "--min-worker-port=11000" in commands[-1]
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head[-1]
    assert "--num-cpus=0" in head[-1]
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def test_the_fleet_file_that_goes_along_is_right() -> None:
    config = load_config(DEPLOY / "cluster.yaml")
    assert config.host == "0.0.0.0" and config.api_keys
    assert config.redis.startswith("redis://")
