"""Images at URLs: only of listed hosts, without redirects, bounded in bytes and time."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from baton.types.errors import InvalidRequestError
from router.routing.checks import remote_images
from router.routing.checks.remote_images import MAX_BYTES, RemoteImages


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/image")
            self.end_headers()
            return
        if self.path == "/slow":
            self.server.stopping.wait(5)
            return
        self.send_response(200 if self.path != "/gone" else 404)
        self.end_headers()
        self.wfile.write(b"i" * (MAX_BYTES + 1 if self.path == "/large" else 10))

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.stopping = threading.Event()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.stopping.set()
    server.shutdown()
    server.server_close()


async def test_only_listed_hosts_are_asked_and_what_they_send_is_bounded(port, monkeypatch):
    monkeypatch.setattr(remote_images, "_LIMIT_S", 0.5)
    images = RemoteImages([f"127.0.0.1:{port}", "listed.example"])

    async def error(url: str) -> str:
        with pytest.raises(InvalidRequestError) as raised:
            await images.file(url, "messages[0].content[1]", "a")
        assert "messages[0].content[1]" in f"{raised.value.param} {raised.value.message}"
        return raised.value.message

    base = f"http://127.0.0.1:{port}"
    assert await images.file(f"{base}/image", "x", "a") == b"i" * 10
    for path, why in (("moved", "302"), ("gone", "404"), ("large", "bytes"), ("slow", "Timeout")):
        assert why in await error(f"{base}/{path}")
    for url in (
        "http://127.0.0.1/image",
        f"http://localhost:{port}/image",
        f"http://user:secret@127.0.0.1:{port}/image",
        f"http://listed.example@127.0.0.2:{port}/image",
        f"http://listed.example:{port}/image",
        f"ftp://127.0.0.1:{port}/image",
        "file:///etc/passwd",
        "//listed.example/image",
        "http://[::1",
        "http://xn--a/image",
        "data:image/png,AA",
    ):
        assert "fleet file" in await error(url)


async def test_a_tenant_waits_for_its_own_images_only(port):
    images = RemoteImages([f"127.0.0.1:{port}"])
    slow = [
        asyncio.ensure_future(images.file(f"http://127.0.0.1:{port}/slow", "x", "a"))
        for _ in range(8)
    ]
    await asyncio.sleep(0.2)
    async with asyncio.timeout(3):
        assert await images.file(f"http://127.0.0.1:{port}/image", "x", "b") == b"i" * 10
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
