"""`docs/guide/day-2.md`, "Replace a host": its commands, typed on hosts of the rig under load."""

import pytest

from tests.fleet.walk import commands
from tests.hosts.harness import GCS_PORT, Cluster, wait_for
from tests.hosts.rig.cluster import (
    NODE_SETTINGS,
    ROOT,
    share_program,
    share_ray_token,
    start_redis,
)
from tests.hosts.rig.namespaces import HOME, Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HEAD, OLD, NEW = "head", "n2", "n3"


def test_a_host_is_replaced_under_load() -> None:
    with Rig(shared=[ROOT]) as rig:
        hosts = rig.add(HEAD, "n1", OLD, NEW, "client")
        share_program(hosts)
        share_ray_token(hosts[:4])
        url = start_redis(rig.hosts["client"], "a-password")
        start_redis(rig.hosts["client"], "a-password", GCS_PORT)
        cluster = Cluster(rig, url, workers=3)
        for name in (HEAD, "n1", OLD):
            cluster.start_ray(name)
        cluster.up(HEAD)
        cluster.wait_up(HEAD)
        wait_for(lambda: OLD in cluster.places().values())
        load = cluster.load(40)
        for line in commands("day-2.md", "Replace a host"):
            _type(cluster, line)
        wait_for(lambda: cluster.whole() and NEW in cluster.places().values())
        assert OLD not in cluster.places().values()
        wait_for(lambda: sorted(cluster.nodes()) == [HEAD, "n1", NEW], 60)
        result = load.result()
        assert set(result) == {"ok"}, result


def _type(cluster: Cluster, line: str) -> None:
    """Type a command where its prompt says, without a prompt on the head."""
    where, prompt, command = line.partition("$ ")
    name = {"NEW": NEW, "OLD": OLD}[where] if prompt else HEAD
    command = (command or line).replace("HEAD", cluster.host(HEAD).address).replace("OLD", OLD)
    settings = {**NODE_SETTINGS, "BATON_FLEET_TOKEN_FILE": f"{HOME}/token", "COLUMNS": "200"}
    if command.startswith("baton doctor"):  # a busy machine has differences of speed
        told = cluster.host(name).output(
            f"cd {HOME} && {command}", timeout_s=240, ok=False, environment=settings
        )
        assert NEW in told, told
        return
    print(cluster.host(name).output(f"cd {HOME} && {command}", timeout_s=240, environment=settings))
