"""The monitoring port: metrics and health without a key, and nothing else."""

from types import SimpleNamespace

import httpx
import pytest

from baton.config.clients import ApiKeyConfig
from baton.config.network import MonitoringConfig
from router.frontend.group.any_router import AnyRouter
from router.frontend.http.monitoring import monitoring
from tests.router.conftest import OPS, free_port
from tests.router.group.test_any_router import Other

KEYS = {
    "key-of-one": ApiKeyConfig(tenant="one"),
    "key-of-scrapes": ApiKeyConfig(tenant="one", role="metrics"),
}


async def test_the_port_shows_metrics_and_health_and_closes_all_else(make_fleet):
    fleet = await make_fleet({"decode-0": None}, api_keys=KEYS)
    config = MonitoringConfig(port=free_port())
    async with (
        monitoring(fleet.app, fleet.router, config) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=OPS) as client,
    ):
        page = await client.get("/metrics?x=1", headers={"authorization": "", "host": "evil.com"})
        assert page.status_code == 200
        assert 'baton_workers{role="decode",state="ready"} 1.0' in page.text
        for path in ("/health", "/health/live", "/health/ready", "/ping"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/load")).json().keys() == {"server_load"}
        targets = (await client.get("/fleet/targets", headers={"host": "router.ns:8009"})).json()
        assert targets[0]["targets"] == ["router.ns:8009"], "the port that scrapers reach"
        probes = fleet.workers["decode-0"].submissions
        assert [probe.priority for probe in probes] == [0], "the caller's key gives nothing here"
        for method, path in (
            ("GET", "/fleet"),
            ("GET", "/version"),
            ("GET", "//metrics"),
            ("GET", "/metrics/"),
            ("POST", "/metrics"),
            ("POST", "/ping"),
            ("POST", "/v1/chat/completions"),
            ("DELETE", "/fleet/keys/abc"),
        ):
            assert (await client.request(method, path)).status_code == 404, (method, path)
    with pytest.raises(httpx.ConnectError):
        await httpx.AsyncClient().get(f"http://127.0.0.1:{port}/health")


async def test_the_port_of_a_group_shows_the_sum_of_its_routers(make_fleet):
    fleets = [await make_fleet({"decode-0": None}, api_keys=KEYS) for _ in range(2)]
    for fleet in fleets:
        await fleet.chat(max_tokens=1, headers={"authorization": "Bearer key-of-one"})
    past = SimpleNamespace(keep=lambda page: None, missing=lambda answered: [])
    apps = [fleet.server.config.app for fleet in fleets]
    group = AnyRouter(apps[0], Other(apps[1]), past, {})
    config = MonitoringConfig(port=free_port())
    async with (
        monitoring(group, fleets[0].router, config) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        page = (await client.get("/metrics")).text
    assert 'baton_requests_total{endpoint="chat",status="200",tenant="one"} 2.0' in page


async def test_a_key_for_metrics_reads_them_and_nothing_else(make_fleet):
    fleet = await make_fleet({"decode-0": None}, api_keys=KEYS)
    scrape = {"authorization": "Bearer key-of-scrapes"}
    assert (await fleet.http.get("/metrics", headers=scrape)).status_code == 200
    tenant = await fleet.http.get("/metrics", headers={"authorization": "Bearer key-of-one"})
    assert tenant.status_code == 403
    for path in ("/load", "/fleet/targets"):
        assert (await fleet.http.get(path, headers=scrape)).status_code == 200
    for path in ("/fleet", "/fleet/series", "/fleet/requests", "/v1/models", "/server_info"):
        assert (await fleet.http.get(path, headers=scrape)).status_code == 403, path
    assert (await fleet.chat(headers=scrape)).status_code == 403
    assert fleet.workers["decode-0"].submissions == []
    rights = fleet.router.access.keys_of("one", 0)
    assert [key.role for key in rights] == ["tenant"], "batches run with a key for requests"
