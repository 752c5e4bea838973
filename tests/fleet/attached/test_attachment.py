"""Life of an attached server: where it connects to, beside kinds of servers that only note it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.config.load import load_config
from baton.engine.remote.attached import ServerFacts, UnfitServerError
from baton.engine.remote.http import HttpOrigin
from baton.telemetry.tasks import BackgroundTasks
from fleet.attached.attachment import Attachment
from fleet.attached.process import AttachedSettings, LaneServers
from fleet.attached.sources import ServerSource, entry_of
from fleet.pools.resources import ControllerSpec
from tests.fleet.attached.test_sources import servers_of


class Noting:
    """Kind of servers that are all unfit; notes where it was asked to look at them."""

    hand_off = ""

    def __init__(self) -> None:
        self.seen: asyncio.Queue[HttpOrigin] = asyncio.Queue()

    async def examine(self, origin: HttpOrigin) -> ServerFacts:
        self.seen.put_nowait(origin)
        raise UnfitServerError("it was only looked at")


class Raising(Noting):
    """Kind whose servers raise what nobody has thought of, with characters of a terminal."""

    async def examine(self, origin: HttpOrigin) -> ServerFacts:
        raise ImportError("no \x1b[2Jmodule\nat all")


async def test_an_unexpected_error_is_shown_and_does_not_end_the_attachment() -> None:
    """A missing package left the server as `starting` for ever."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    changed = asyncio.Event()
    port = server.sockets[0].getsockname()[1]
    one = attachment_of(f"http://127.0.0.1:{port}", Raising(), changed)
    running = asyncio.create_task(one.run())
    async with asyncio.timeout(10):
        await changed.wait()
        assert (one.phase, one.reason) == ("unfit", "ImportError: no  [2Jmodule at all")
        assert not running.done()
        one.leave()
        await running
    server.close()


def attachment_of(url: str, kind: Any, changed: asyncio.Event) -> Attachment:
    (server,) = servers_of([url]).known

    def settings() -> Any:
        raise AssertionError("there is no worker")

    return Attachment(entry_of(server), kind, settings, True, changed.set)


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


async def test_a_list_without_servers_is_shown_while_the_fleet_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was only in a log, and `baton up` waited without a reason."""
    file = tmp_path / "fleet.yaml"
    servers = '{dns: "http://no-such-service.invalid:8000"}'
    pools = f"{{engine: vllm, vllm: {{servers: {servers}}}}}"
    file.write_text(f"model: /m\nnumerics: fast\npools: {pools}\n")
    config = load_config(file)
    assert config.pools.servers is not None
    source = ServerSource(config.pools.servers)
    url = "redis://127.0.0.1:1"
    spec = ControllerSpec(config_json="", redis_url=url, fleet_token="", host="", log_dir="")
    kind: Any = Noting()
    settings = AttachedSettings(spec=spec)
    lane = LaneServers(config, kind, source, settings, BackgroundTasks("test"))
    following = asyncio.create_task(lane.follow())
    shown = ""
    async with asyncio.timeout(10):
        while "\n" not in shown:
            await asyncio.sleep(0.02)
            shown += capfd.readouterr().out
    following.cancel()
    assert '"worker_id":"list"' in shown
    assert '"reason":"the list of servers is empty"' in shown
