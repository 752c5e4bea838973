"""The monitoring port: metrics and health without a key, and nothing else."""

import asyncio
import contextlib
import socket
import ssl
from types import SimpleNamespace

import httpx
import pytest

from baton.config.clients import ApiKeyConfig, ClientLimitsConfig
from baton.config.network import MonitoringConfig
from baton.telemetry.tasks import BackgroundTasks
from baton.wire.fleet_token import FleetToken
from router.frontend.group.any_router import AnyRouter
from router.frontend.http.monitoring import monitoring
from tests.router.conftest import OPS, free_port
from tests.router.group.test_any_router import Other
from tests.router.http.test_acceptor import in_uvloop
from tests.wire import certs

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
        page = await client.get("/metrics?x=1", headers={"authorization": "", "host": "node-1:1"})
        assert page.status_code == 200
        assert 'baton_workers{role="decode",state="ready"} 1.0' in page.text
        for path in ("/health", "/health/live", "/health/ready", "/ping"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/load")).json().keys() == {"server_load"}
        targets = (await client.get("/fleet/targets", headers={"host": "r.local:8009"})).json()
        assert targets[0]["targets"] == ["r.local:8009"], "the port that scrapers reach"
        for path in ("/metrics", "/load", "/fleet/targets"):
            rebound = await client.get(path, headers={"host": "rebound.example"})
            assert rebound.status_code == 403 and "clients: {hosts:" in rebound.text
        assert (await client.get("/health", headers={"host": "a.example"})).status_code == 200
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


async def test_scrapes_of_one_instant_share_a_page(make_fleet, monkeypatch):
    """60 of them made the router wait for 0.3 s."""
    fleet = await make_fleet({"decode-0": None})
    whole, made = fleet.router.metrics.render, []

    def render(**options):
        made.append(options)
        return whole(**options)

    monkeypatch.setattr(fleet.router.metrics, "render", render)
    pages = await asyncio.gather(*(fleet.http.get("/metrics") for _ in range(40)))
    assert {page.status_code for page in pages} == {200}
    assert len(made) < 10
    await fleet.chat(max_tokens=1)
    assert 'baton_requests_total{endpoint="chat"' in (await fleet.http.get("/metrics")).text


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


def test_silent_clients_of_tls_cannot_take_all_files_of_the_router(tmp_path):
    files = certs.files(certs.made(tmp_path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    process = SimpleNamespace(
        core=SimpleNamespace(fleet_token=FleetToken("secret")),
        settings=SimpleNamespace(clients=ClientLimitsConfig()),
        observer=SimpleNamespace(task_failed=lambda name: None),
        tasks=BackgroundTasks("test"),
    )

    async def life() -> int:
        config = MonitoringConfig(port=free_port())
        silent = []
        tls = {"ssl_context_factory": lambda *_: context}
        async with monitoring(None, process, config, **tls) as port:
            for _ in range(400):
                with contextlib.suppress(ConnectionError):  # is not yet up, or closed it
                    silent.append(socket.create_connection(("127.0.0.1", port)))
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.5)
            for client in silent:
                client.setblocking(False)
            open_ones = sum(not is_closed(client) for client in silent)
        for client in silent:
            client.close()
        return open_ones

    def is_closed(client: socket.socket) -> bool:
        try:
            return not client.recv(1)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    assert 0 < in_uvloop(life()) < 100
