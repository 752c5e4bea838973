"""Routers behind one port by HTTPS: who takes a dead one's connections has its certificate."""

import os
import signal
import ssl
from pathlib import Path

import httpx
import pytest

from baton.config.network import fleet_host_name
from fleet.cli import certificate_authority as authority
from fleet.local.redis_server import EmbeddedRedis
from fleet.local.router_process import RouterProcesses
from tests.fleet.test_routers import wait_for
from tests.wire.certs import DAY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_two_routers_by_https(tmp_path: Path, redis_server: EmbeddedRedis) -> None:
    folder = tmp_path / "certs"
    authority.make(folder, fleet_host_name("two"), [], DAY)
    file = tmp_path / "fleet.yaml"
    names = f"certificate: {folder}/router.pem, key: {folder}/router.key"
    file.write_text(f"fleet: two\nserved_model_name: [m]\nclients: {{tls: {{{names}}}}}\n")
    environment = {
        **os.environ,
        "BATON_REDIS_URL": redis_server.url,
        "BATON_FLEET_TOKEN": "t",
        "BATON_STATE_DIR": str(tmp_path),
    }
    believes = ssl.create_default_context(cafile=str(folder / "ca.pem"))

    def statuses(count: int = 12) -> set[int]:
        """Each on a connection of its own."""
        url = f"https://127.0.0.1:{routers.port}/health/live"
        return {
            httpx.get(url, timeout=60, trust_env=False, verify=believes).status_code
            for _ in range(count)
        }

    def shown() -> set[str]:
        return {ssl.get_server_certificate(("127.0.0.1", routers.port)) for _ in range(12)}

    routers = RouterProcesses("127.0.0.1", 0, 2)
    try:
        routers.start(file, environment, tmp_path / "group", tmp_path)
        wait_for(lambda: [routers.serving(i) for i in range(2)] == routers.pids)
        assert statuses() == {200}
        authority.renew(folder, [], DAY)
        wait_for(lambda: shown() == {(folder / "router.pem").read_text()})
        os.kill(routers.pids[0], signal.SIGKILL)
        wait_for(lambda: routers.exit_codes[0] == -signal.SIGKILL)
        assert statuses() == {200}
        assert shown() == {(folder / "router.pem").read_text()}
    finally:
        routers.begin_stop()
        routers.finish_stop(5.0)
