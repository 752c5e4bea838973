"""`deploy/compose.yaml`: what it mounts exists, and nothing is open to other hosts."""

from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_compose_file_mounts_what_exists_and_is_reachable_from_this_host_only() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    mounts = [mount for one in services.values() for mount in one.get("volumes", [])]
    for source in (mount.split(":")[0] for mount in mounts):
        if source.startswith("."):
            assert (DEPLOY / source).exists(), source
        else:
            assert source in compose["volumes"]
    build = services["baton"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    assert all(port.startswith("127.0.0.1:") for port in services["baton"]["ports"])
    for name in ("prometheus", "grafana"):
        assert services[name]["network_mode"] == "service:baton"
        assert "ports" not in services[name]


def test_grafana_finds_prometheus_and_the_boards() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    [source] = yaml.safe_load((folder / "datasources" / "baton.yaml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")
    [boards] = yaml.safe_load((folder / "dashboards" / "baton.yaml").read_text())["providers"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    mounts = dict(mount.split(":")[:2] for mount in compose["services"]["grafana"]["volumes"])
    assert mounts["./grafana"] == boards["options"]["path"]
    assert len(list((DEPLOY / "grafana").glob("*.json"))) == 6
