"""A fleet's name on a shared Redis belongs to one `baton up`, from any host or state folder."""

import subprocess
import sys

import msgspec
import pytest

from baton.registry.lease import FleetLease
from baton.registry.redis_store import Registry
from fleet.local.fleet_redis import LeaseKeeper, LeaseTakenError, take_lease, this_process
from fleet.local.redis_server import EmbeddedRedis


def test_a_second_one_is_refused_by_name_until_the_first_one_has_stopped(
    redis_server: EmbeddedRedis,
) -> None:
    first, second, third = (
        LeaseKeeper(redis_server.url, "f", f"http://h:{port}") for port in (1, 2, 3)
    )
    first.start()
    with pytest.raises(LeaseTakenError, match=r"fleet f is run by .*pid \d+, http://h:1, since"):
        second.start()
    other = LeaseKeeper(redis_server.url, "g", "")
    other.start()
    first.stop()
    third.start()
    for keeper in (third, other):
        keeper.stop()


@pytest.fixture
def ended_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


@pytest.mark.parametrize("here", [True, False])
async def test_a_killed_one_is_followed_at_once_here_and_after_its_lease_elsewhere(
    redis_server: EmbeddedRedis, ended_pid: int, here: bool
) -> None:
    registry = Registry(redis_server.url, "f")
    killed = msgspec.structs.replace(this_process(""), pid=ended_pid)
    if not here:  # another container of this host: its process ids are not ours
        killed = msgspec.structs.replace(killed, pid_space="pid:[1]")
    await FleetLease(registry, killed).take()
    if not here:
        await registry.send(("PEXPIRE", registry.key("lease"), 1500))
    lease = FleetLease(registry, this_process(""))
    assert await lease.take() == killed
    await take_lease(lease, "f", "stop it")
    assert await lease.renew() is None
    await registry.close()
