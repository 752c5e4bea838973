"""Life of an attached server: where it connects to, beside kinds of servers that only note it."""

import asyncio
import itertools
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.config.load import load_config
from baton.engine.remote.attached import ServerFacts, UnfitServerError
from baton.engine.remote.http import HttpOrigin
from baton.registry.connection import RoundTrips
from baton.registry.redis_store import Registry
from baton.registry.types import WorkerRecord
from baton.telemetry.tasks import BackgroundTasks
from fleet.attached import attachment
from fleet.attached.attachment import Attachment
from fleet.attached.process import LaneServers
from fleet.attached.settings import AttachedSettings
from fleet.attached.sources import ServerSource, entry_of
from fleet.local.redis_server import EmbeddedRedis
from fleet.pools.resources import ControllerSpec
from tests.fleet.attached.test_sources import servers_of
from tests.registry.conftest import redis_server

__all__ = ["redis_server"]


class Noting:
    """Kind of servers that are all unfit; notes where it was asked to look at them."""

    hand_off = ""
    keeps_connections = True

    def __init__(self) -> None:
        self.seen: asyncio.Queue[HttpOrigin] = asyncio.Queue()

    async def examine(self, origin: HttpOrigin) -> ServerFacts:
        self.seen.put_nowait(origin)
        raise UnfitServerError("it was only looked at")


class Raising(Noting):
    """Kind whose servers raise an unexpected error, whose text has control characters."""

    async def examine(self, origin: HttpOrigin) -> ServerFacts:
        self.seen.put_nowait(origin)
        raise ImportError("no \x1b[2Jmodule\nat all" + 10_000 * "!")


async def test_an_unexpected_error_is_shown_and_does_not_end_the_attachment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing package left the server as `starting` for ever; its traceback is logged once."""
    monkeypatch.setattr(attachment, "_UNFIT_RETRY_S", 0.01)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    changed = asyncio.Event()
    port = server.sockets[0].getsockname()[1]
    kind = Raising()
    one = attachment_of(f"http://127.0.0.1:{port}", kind, changed)
    running = asyncio.create_task(one.run())
    async with asyncio.timeout(10):
        await changed.wait()
        assert one.phase == "unfit" and len(one.reason) < 1000
        assert one.reason.startswith("ImportError: no  [2Jmodule at all!")
        assert not running.done()
        while kind.seen.qsize() < 3:
            await asyncio.sleep(0.01)
        assert len(caplog.records) == 1
        one.leave()
        await running
    server.close()


async def test_a_server_that_ends_each_life_at_once_is_attached_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that sends KV events that cannot be read was attached again without a pause."""
    monkeypatch.setattr(attachment, "_RETRY_S", 0.02)
    begun_s: list[float] = []
    one = attachment_of("http://127.0.0.1:1", Noting(), asyncio.Event())

    async def examine() -> tuple[None, ...]:
        return ()

    async def serve() -> None:
        begun_s.append(time.monotonic())
        if len(begun_s) == 5:
            monkeypatch.setattr(attachment, "_STEADY_S", 0.0)
        if len(begun_s) == 7:
            one.leave()

    monkeypatch.setattr(one, "_examine", examine)
    monkeypatch.setattr(one, "_serve", serve)
    async with asyncio.timeout(10):
        await one.run()
    *pauses_s, first, second = (b - a for a, b in itertools.pairwise(begun_s))
    assert all(pause_s >= 0.02 * 2**lives for lives, pause_s in enumerate(pauses_s))
    assert max(first, second) < 0.1  # behind long lives


async def test_a_missing_key_file_takes_no_key_from_a_server_that_works() -> None:
    one = attachment_of("http://localhost:1", Noting(), asyncio.Event())
    assert one.takes(msgspec.structs.replace(one.entry, key="secret"))
    assert one.takes(msgspec.structs.replace(one.entry, key="", problem="there is no file"))
    assert one._origin.key == "secret"
    assert one.takes(msgspec.structs.replace(one.entry, key="next", problem=""))
    assert one._origin.key == "next"
    assert not one.takes(msgspec.structs.replace(one.entry, key="newest", label="other"))
    assert one._origin.key == "newest", "its worker keeps its label until it begins anew"


def attachment_of(url: str, kind: Any, changed: asyncio.Event) -> Attachment:
    (server,) = servers_of([url]).known

    def settings() -> Any:
        raise AssertionError("there is no worker")

    redis = RoundTrips("redis://127.0.0.1:1")
    return Attachment(entry_of(server), kind, settings, redis, True, changed.set)


async def test_a_name_is_looked_up_once_for_a_life_of_the_worker() -> None:
    """Requests and health checks go to that address, so that they need no name server."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    kind = Noting()
    one = attachment_of(f"http://localhost:{port}", kind, asyncio.Event())
    running = asyncio.create_task(one.run())
    async with asyncio.timeout(10):
        origin = await kind.seen.get()
        one.leave()
        await running
    server.close()
    assert (origin.host, origin.port) == ("127.0.0.1", port)
    assert origin.authority == f"localhost:{port}"


async def test_a_server_that_takes_no_connection_is_absent_with_the_reason() -> None:
    kind = Noting()
    changed = asyncio.Event()
    one = attachment_of("http://no-such-host.invalid:8000", kind, changed)
    running = asyncio.create_task(one.run())
    async with asyncio.timeout(10):
        await changed.wait()
        shown = one.phase, one.reason
        one.leave()
        await running
    assert shown[0] == "absent"
    assert "http://no-such-host.invalid:8000: its name cannot be looked up" in shown[1]
    assert kind.seen.empty()


def lane_of(folder: Path, servers: str, redis_url: str) -> LaneServers:
    file = folder / "fleet.yaml"
    pools = f"{{engine: vllm, vllm: {{servers: {servers}}}}}"
    file.write_text(f"fleet: test\nmodel: /m\nnumerics: fast\npools: {pools}\n")
    config = load_config(file)
    assert config.pools.servers is not None
    source = ServerSource(config.pools.servers)
    spec = ControllerSpec(config_json="", redis_url=redis_url, fleet_token="", host="", log_dir="")
    kind: Any = Noting()
    tasks = BackgroundTasks("test")
    settings = AttachedSettings(spec=spec)
    return LaneServers(config, kind, source, settings, RoundTrips(redis_url), tasks)


async def test_a_reconciliation_keeps_what_an_unchanged_source_knows(tmp_path: Path) -> None:
    """So a file that is wrong at that moment takes no servers away."""
    (list_of_servers := tmp_path / "servers.yaml").write_text("servers: [http://127.0.0.1:1]\n")
    lane = lane_of(tmp_path, f"{{file: {list_of_servers}}}", "redis://127.0.0.1:1")
    assert [one.url for one in await lane._source.read()] == ["http://127.0.0.1:1"]
    list_of_servers.write_text("servers: [")
    config = load_config(tmp_path / "fleet.yaml")
    lane.change(config)
    assert [one.url for one in await lane._source.read()] == ["http://127.0.0.1:1"]
    (tmp_path / "others.yaml").write_text("servers: [http://127.0.0.1:2]\n")
    text = (tmp_path / "fleet.yaml").read_text().replace("servers.yaml", "others.yaml")
    (tmp_path / "fleet.yaml").write_text(text)
    lane.change(load_config(tmp_path / "fleet.yaml"))
    assert [one.url for one in await lane._source.read()] == ["http://127.0.0.1:2"]


async def test_two_spellings_of_one_host_share_its_default_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server of a host with several is asked at the default port of KV events."""
    alone: list[bool] = []
    monkeypatch.setattr(
        LaneServers, "_attach", lambda *_, **options: alone.append(options["alone"])
    )
    servers = "['http://[::1]:1', 'http://[0:0::1]:2', 'http://gpu-1:1', 'http://GPU-1.:2']"
    lane = lane_of(tmp_path, f"{servers[:-1]}, 'http://gpu-2:1']", "redis://127.0.0.1:1")
    lane._apply(await lane._source.read())
    assert alone == [False] * 4 + [True]


async def test_a_list_without_servers_is_shown_while_the_fleet_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was only in a log, and `baton up` waited without a reason. A signal may end each write."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:50]))
    servers = '{dns: "http://no-such-service.invalid:8000"}'
    lane = lane_of(tmp_path, servers, "redis://127.0.0.1:1")
    following = asyncio.create_task(lane.follow())
    shown = ""
    async with asyncio.timeout(10):
        while "\n" not in shown:
            await asyncio.sleep(0.02)
            shown += capfd.readouterr().out
    following.cancel()
    assert '"worker_id":"list"' in shown
    assert '"reason":"the list of servers is empty"' in shown


async def test_epochs_go_on_behind_those_of_a_process_that_was_killed(
    tmp_path: Path, redis_server: EmbeddedRedis
) -> None:
    """Routers would take its next workers for older ones, and use none of them."""
    registry = Registry(redis_server.url, "test")
    past = WorkerRecord(worker_id="worker-0", role="decode", state="ready", epoch=7)
    await registry.write_slots([past])
    lane = lane_of(tmp_path, "[http://127.0.0.1:1]", redis_server.url)
    running = [asyncio.create_task(work()) for work in (lane.follow, lane.publish)]
    record = past
    async with asyncio.timeout(10):
        while record.state == "ready":
            await asyncio.sleep(0.05)
            record = (await registry.records())[0]["worker-0"]
    for task in running:
        task.cancel()
    await lane.leave(at_once=True)
    await lane._redis.close()
    await registry.close()
    (entry,) = lane._listed.values()
    assert record.epoch == past.epoch
    assert lane._worker(entry.name, entry).epoch == past.epoch + 1
