"""`docs/guide/cluster.md` as an operator does it: `ray up`, `baton up`, `ray down`, by ssh.

The hosts' addresses are those that stand in ``deploy/ray-cluster-local.yaml`` and in
``deploy/cluster.yaml``: both run as they are, but for the model, which is emulated.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.hosts.harness import wait_for
from tests.hosts.rig.cluster import ROOT, install_base, open_ssh, start_redis
from tests.hosts.rig.namespaces import HOME, Host, Rig, RigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS = {"RAY_UP_enable_autoscaler_v2": "0", "TERM": "dumb", "COLUMNS": "200"}
_NODES = (
    "import ray; ray.init(address='auto', log_to_driver=False, logging_level='ERROR');"
    "print(sum(node['Alive'] for node in ray.nodes()))"
)
LOGIN = ["bash", "--login", "-c"]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(shared=[ROOT]) as made:
        hosts = made.add("head", "n1", "n2", "operator")
        for host in hosts:
            install_base(host)
        operator = made.hosts["operator"]
        try:
            operator.output("command -v rsync")
            open_ssh(operator, hosts[:3])
        except RigError as error:
            pytest.skip(f"needs Debian's openssh-server and rsync: {error}")
        start_redis(made.hosts["head"], "PASSWORD")
        yield made


def in_repository(operator: Host, command: str, timeout_s: float = 300.0) -> str:
    path = {"PATH": "/opt/baton/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    return operator.output(
        f"cd ~/repository && {command}", timeout_s=timeout_s, environment={**SETTINGS, **path}
    )


def test_from_hosts_without_anything_to_a_fleet_and_back(rig: Rig) -> None:
    began_s = time.monotonic()
    make = ["make", "--directory", str(ROOT), "wheel", f"VENV={sys.prefix}"]
    made = subprocess.run(make, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    head, operator = rig.hosts["head"], rig.hosts["operator"]
    operator.output(f"mkdir ~/repository && cp -r {ROOT}/deploy {ROOT}/dist ~/repository/")
    operator.output(
        "cd ~/repository && sed -i 's/^pools:/pools:\\n  engine: emulated/' deploy/cluster.yaml"
    )
    in_repository(operator, "ray get-auth-token --generate")
    print(in_repository(operator, "ray up deploy/ray-cluster-local.yaml -y --no-config-cache"))
    token = {"RAY_AUTH_MODE": "token"}
    wait_for(
        lambda: head.output(["/opt/baton/bin/python", "-c", _NODES], environment=token).endswith(
            "3\n"
        ),
        120,
        lambda: head.output("tail /tmp/ray/session_latest/logs/monitor.log", ok=False),
    )
    doctor = "baton doctor ~/baton/fleet.yaml --address auto"
    print(head.output([*LOGIN, doctor], timeout_s=240, environment=SETTINGS))
    fleet = head.start(
        [*LOGIN, "exec baton up ~/baton/fleet.yaml --address auto > ~/up.log 2>&1"],
        environment=SETTINGS,
    )
    said = f"cat {HOME}/up.log"
    wait_for(
        lambda: "Baton is ready" in head.output(said, ok=False) or fleet.poll() is not None, 150
    )
    text = head.output(said)
    assert "Baton is ready at http://10.77.0.1:8000/v1" in text, text
    body = json.dumps({"model": "default", "prompt": "Hello", "max_tokens": 8})
    answer = operator.output(
        "curl -s http://10.77.0.1:8000/v1/completions -H 'Authorization: Bearer change-me-please' "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )
    assert json.loads(answer)["usage"]["completion_tokens"] == 8
    print(f"from hosts without anything to an answer: {time.monotonic() - began_s:.0f} s")
    hosts = head.output([*LOGIN, "baton nodes"], environment=SETTINGS)
    assert "n1" in hosts and "n2" in hosts
    head.output([*LOGIN, "baton down"], timeout_s=60, environment=SETTINGS)
    assert fleet.wait(30) == 0, head.output(said)
    print(in_repository(operator, "ray down deploy/ray-cluster-local.yaml -y"))
    for name in ("n1", "n2"):  # `ray down` ends hosts of one's own on the head alone
        operator.output(
            f"ssh -o BatchMode=yes root@{rig.hosts[name].address} /opt/baton/bin/ray stop 2>&1",
            ok=False,
        )
    for name in ("head", "n1", "n2"):
        wait_for(lambda name=name: "raylet" not in rig.hosts[name].output("ps -e"), 30)


def test_the_tools_that_ssh_needs_are_named_where_they_lack() -> None:
    """A rig without sshd says so, and which package has it."""
    if shutil.which("sshd"):
        pytest.skip("this machine has one")
    with Rig(layer="") as rig:
        (host,) = rig.add("bare")
        with pytest.raises(RigError, match="no sshd here"):
            open_ssh(host, [host])
