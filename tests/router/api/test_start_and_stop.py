"""A router that starts refuses nobody for want of workers; one that stops blames nobody."""

import asyncio
import os
import socket
import sys
import time

import httpx
import yaml

from tests.router.conftest import MODEL, events_of, process_of, record_of, until
from tests.router.emulated_worker import EmulatedWorker, Script
from tests.router.static_directory import StaticDirectory


async def test_a_router_listens_when_it_has_met_its_workers(model):
    """Defect 21: for 70 to 100 ms it answered 503, no worker is ready."""
    worker = await EmulatedWorker("decode-0").start()
    address = worker.address
    await worker.stop()
    router = process_of(model, StaticDirectory([record_of("decode-0", address)]))
    starting = asyncio.create_task(router.running().__aenter__())
    await asyncio.sleep(0.3)
    assert not starting.done()
    again = await EmulatedWorker("decode-0").start(int(address.rsplit(":", 1)[1]))
    async with asyncio.timeout(2):
        await starting
    assert len(router.lanes.first.gateway.workers.usable) == 1
    await router.lanes.first.gateway.close()
    await again.stop()


async def test_a_router_waits_no_longer_for_its_workers_than_it_may(model):
    """Defect 21: a worker that is gone must not keep a router from starting."""
    directory = StaticDirectory([record_of("decode-0", "127.0.0.1:1")])
    router = process_of(model, directory, start_limit_s=0.3)
    began_s = time.monotonic()
    async with router.running():
        assert 0.25 < time.monotonic() - began_s < 1.5


async def test_connections_wait_for_a_router_that_is_started_again(tmp_path):
    """Defect 21: without a socket that outlives it, a router's death refuses connections."""
    config = tmp_path / "fleet.yaml"
    config.write_text(yaml.safe_dump({"served_model_name": MODEL}))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        fd = listening.fileno()

        async def start() -> asyncio.subprocess.Process:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "router", "--config", str(config), "--fd", str(fd)),
                env={**os.environ, "BATON_REDIS_URL": "redis://127.0.0.1:1/0"},
                pass_fds=[fd],
            )

        port = listening.getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            first = await start()
            assert (await client.get("/health/live")).status_code == 200
            first.kill()
            await first.wait()
            waiting = asyncio.create_task(client.get("/health/live"))
            await asyncio.sleep(0.1)
            second = await start()
            try:
                assert (await waiting).status_code == 200
            finally:
                second.terminate()
                assert await second.wait() == 0
        assert listening.fileno() == fd  # a clean stop leaves the socket to its holder
        socket.create_connection(("127.0.0.1", port)).close()


async def test_streams_that_run_when_the_fleet_stops_say_so(make_fleet):
    """Defect 24: they ended as ``worker_lost``, though the fleet was stopped in order."""
    fleet = await make_fleet({"decode-0": Script(step_s=0.02)})
    stream = asyncio.create_task(fleet.chat(stream=True, max_tokens=1000))
    await until(lambda: fleet.lane.gateway.in_flight)
    await asyncio.sleep(0.2)
    fleet.lane.gateway.stopping = True  # as router/__main__.py does on a signal
    await fleet.workers["decode-0"].stop()
    last = events_of((await stream).text)[-1]
    assert last["error"]["code"] == "unavailable"
    assert last["error"]["message"] == "the fleet is stopping"
