"""HTTP client of engines, against real servers."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from baton.engine.remote import attached, http
from baton.engine.remote.attached import ServerFacts, ServerWatch
from baton.engine.remote.http import HttpOrigin
from baton.types.errors import UnavailableError
from fleet.cli import certificate_authority as authority
from tests.engine.vllm.test_engine import HEAD, chunk


async def test_a_request_larger_than_the_sockets_buffer_arrives_whole(tmp_path: Path) -> None:
    """A prompt of 128 k tokens has about 800 KB."""
    path = str(tmp_path / "http")
    origin = HttpOrigin.of_socket(path)
    body = b"7" * 4_000_000
    request = origin.request_bytes("POST", "/x", body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)  # meanwhile the buffer fills
        arrived = await reader.readexactly(len(request))
        writer.write(HEAD + chunk(b"%d" % (arrived == request)) + b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    parts: list[bytes] = []
    exchange = await origin.begin("POST", "/x", body, parts.append)
    assert await exchange.done
    assert parts == [b"1"]
    server.close()


async def test_a_head_without_an_end_is_cut_off() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"X-Name: " + b"x" * 65_536 + b"\r\n")
                await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    origin = HttpOrigin.of_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert await origin.ask("GET", "/health", 10.0) == (0, False, b"")
    server.close()


async def test_a_server_that_changes_the_protocol_has_not_answered() -> None:
    """Each such answer was a traceback in the log."""
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: failed.append(what))

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 101 Now\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"
        writer.write(head + b"frames")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    origin = HttpOrigin.of_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    _, complete, body = await origin.ask("GET", "/health", 10.0)
    assert (complete, body, failed) == (False, b"", [])
    server.close()


async def test_a_key_goes_over_tls_to_one_address_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = own_certificate(tmp_path, monkeypatch)
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(HEAD + chunk(b"yes") + b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    origin = HttpOrigin.of_url(f"https://localhost:{port}/vllm/", "secret", "127.0.0.1")
    assert await origin.fetch("GET", "/health", 10.0) == b"yes"
    assert heads[0].startswith(b"GET /vllm/health HTTP/1.1\r\nHost: localhost:%d\r\n" % port)
    assert b"Authorization: Bearer secret\r\n" in heads[0]
    assert "secret" not in repr(origin)
    stranger = HttpOrigin.of_url(f"https://other.host:{port}", "secret", "127.0.0.1")
    with pytest.raises(UnavailableError, match=r"is not accepted: .* 'other.host'.$"):
        await stranger.fetch("GET", "/health", 10.0)
    plain = HttpOrigin.of_url(f"http://localhost:{port}")
    with pytest.raises(UnavailableError, match=r"closing the connection .does its URL .* https://"):
        await plain.fetch("GET", "/health", 10.0)
    monkeypatch.delenv("SSL_CERT_FILE")
    unknown = HttpOrigin.of_url(f"https://localhost:{port}")
    with pytest.raises(UnavailableError, match="SSL_CERT_FILE names"):
        await unknown.fetch("GET", "/health", 10.0)
    assert len(heads) == 1
    server.close()


FACTS = ServerFacts(engine="", model="", root="", max_context_tokens=0, block_tokens=16, blocks=0)
YES = HEAD.replace(b"connection: close\r\n", b"") + chunk(b"yes") + b"0\r\n\r\n"


def own_certificate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Return the context of a server whose CA `HttpOrigin` trusts from now on."""
    authority.make(folder, "baton", ["localhost"], timedelta(days=1))
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "router.pem", folder / "router.key")
    return context


RESET = b"the connection is reset amid the work"


class Served:
    """A server that counts connections and requests, and sends one answer after another."""

    def __init__(self, *answers: bytes) -> None:
        self.connections = 0
        self.requests = 0
        self._answers = answers
        self._writers: list[asyncio.StreamWriter] = []

    @contextlib.asynccontextmanager
    async def running(self, context: ssl.SSLContext | None = None) -> AsyncIterator[HttpOrigin]:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        port = self.server.sockets[0].getsockname()[1]
        origin = HttpOrigin.of_url(f"http{'s' if context else ''}://localhost:{port}")
        origin.keeps = True
        yield origin
        origin.kept.close()
        self.server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.sleep(0.05)

    def drop(self) -> None:
        """Close all connections at once; the client notices it when its loop runs again."""
        for writer in self._writers:
            writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                answer = self._answers[min(self.requests, len(self._answers) - 1)]
                self.requests += 1
                if answer == RESET:
                    await asyncio.sleep(0.2)
                    linger = struct.pack("ii", 1, 0)
                    kept = writer.get_extra_info("socket")
                    kept.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    writer.transport.abort()
                    return
                if not answer:
                    break
                writer.write(answer)
        writer.close()


async def response(origin: HttpOrigin) -> tuple[int, bool, bytes]:
    """Return status, completeness and body of a response, whose connection may be kept."""
    parts: list[bytes] = []
    exchanges: list[http.HttpExchange] = []

    async def begun(exchange: http.HttpExchange) -> None:
        parts.clear()
        exchanges.append(exchange)

    try:
        async with asyncio.timeout(1):
            ended = await origin.exchange("/x", b"", parts.append, begun)
    finally:
        exchanges[-1].close()  # as the engine closes all at the end
    return ended.status, ended.done.result(), b"".join(parts)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_requests_use_one_connection(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = own_certificate(tmp_path, monkeypatch)
    served = Served(YES)
    async with served.running(context if scheme == "https" else None) as origin:
        for _ in range(3):
            assert await response(origin) == (200, True, b"yes")
        assert await origin.fetch("GET", "/health", 10.0) == b"yes"
        assert (served.connections, served.requests) == (1, 4)
        await origin.fetch("POST", "/load", 10.0)  # its work must not be done twice
        await origin.fetch("GET", "/health", 10.0, anew=True)
        assert served.connections == 3
        await origin.fetch("GET", "/version", 10.0)  # on the same one, so of the same server
        assert served.connections == 3
    assert origin.kept.take() is None


async def test_a_server_without_tls_is_named() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    origin = HttpOrigin.of_url(f"https://localhost:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(UnavailableError, match=r"does not speak TLS .*http://"):
        await origin.fetch("GET", "/health", 10.0)
    server.close()


CLOSING = YES.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 4\r\n\r\nlate"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize(
    ("answers", "body", "connections"),
    [
        pytest.param([YES, b"", YES], b"", 1, id="closed-behind-the-request"),
        pytest.param([YES, LATE, YES], b"yes", 2, id="closed-by-408"),
        pytest.param([YES + YES], b"yes", 2, id="two-responses"),
        pytest.param([YES + b"junk"], b"yes", 2, id="bytes-behind-it"),
        pytest.param([CLOSING], b"yes", 2, id="asked-to-close"),
        pytest.param([CONTINUE * 2 + YES], b"yes", 1, id="continue"),
    ],
)
async def test_a_connection_is_kept_behind_one_whole_response(
    answers: list[bytes], body: bytes, connections: int
) -> None:
    served = Served(*answers)
    async with served.running() as origin:
        assert await response(origin) == (200, True, b"yes")
        assert await response(origin) == (200 if body else 0, bool(body), body)
        assert served.connections == connections


async def test_a_lost_connection_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS a lost connection tells the protocol that it had, and drops what is written."""
    served = Served(YES)
    async with served.running(own_certificate(tmp_path, monkeypatch)) as origin:
        assert await response(origin) == (200, True, b"yes")
        transport = origin.kept.take()
        assert transport is not None
        origin.kept.keep(transport)
        below = transport._ssl_protocol._transport
        transport._ssl_protocol.connection_lost(None)
        below.abort()  # as its socket would be
        assert await response(origin) == (200, True, b"yes")
        assert served.connections == 2


async def test_a_cancelled_exchange_does_not_keep_its_connection() -> None:
    served = Served(YES, HEAD.replace(b"connection: close\r\n", b"") + chunk(b"y"))
    async with served.running() as origin:
        await response(origin)
        begun: asyncio.Future[http.HttpExchange] = asyncio.get_running_loop().create_future()

        async def note(exchange: http.HttpExchange) -> None:
            begun.set_result(exchange)

        parts: list[bytes] = []
        running = asyncio.create_task(origin.exchange("/x", b"", parts.append, note))
        exchange = await begun
        while not parts:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        exchange.data_received(b"1\r\ne\r\n")
        assert origin.kept.take() is None


async def test_a_request_that_the_client_ends_ends_its_connection() -> None:
    served = Served(YES, YES[:-5], YES)
    async with served.running() as origin:
        await response(origin)
        with pytest.raises(TimeoutError):
            await response(origin)
        assert await response(origin) == (200, True, b"yes")
        assert (served.connections, served.requests) == (2, 3)


async def test_a_kept_connection_with_bytes_is_closed() -> None:
    served = Served(YES)
    async with served.running() as origin:
        await response(origin)
        transport = origin.kept.take()
        assert transport is not None
        origin.kept.keep(transport)
        transport.write(b"GET / HTTP/1.1\r\n\r\n")  # no exchange reads the response
        while not transport.is_closing():
            await asyncio.sleep(0.01)
        assert origin.kept.take() is None


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(
    ("answers", "body"),
    [pytest.param([YES], b"yes", id="answered"), pytest.param([YES, b""], b"", id="closed-again")],
)
async def test_a_request_is_sent_once_more_if_its_connection_was_closed_before_it_came(
    scheme: str,
    answers: list[bytes],
    body: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = own_certificate(tmp_path, monkeypatch)
    served = Served(*answers)
    async with served.running(context if scheme == "https" else None) as origin:
        assert await response(origin) == (200, True, b"yes")
        served.drop()
        assert await response(origin) == (200 if body else 0, bool(body), body)
        assert (served.connections, served.requests) == (2, 2)


@pytest.mark.parametrize("lost", [b"", LATE, RESET], ids=["closed", "408", "reset"])
async def test_a_look_is_repeated_if_a_kept_connection_gives_no_response(lost: bytes) -> None:
    served = Served(YES, lost, YES, YES, lost, lost)
    async with served.running() as origin:
        assert await origin.ask("GET", "/health", 1) == (200, True, b"yes")
        assert await origin.ask("GET", "/health", 1) == (200, True, b"yes")
        assert (served.connections, served.requests) == (2, 3)
        await response(origin)  # keeps a connection
        status, _, _ = await origin.ask("GET", "/health", 1)
        assert status != 200
        assert (served.connections, served.requests) == (4, 6)


async def test_a_request_whose_work_has_begun_is_not_sent_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server read it, and its connection was reset later."""
    monkeypatch.setattr(http, "_UNREAD_S", 0.1)
    served = Served(YES, RESET)
    async with served.running() as origin:
        await response(origin)
        assert await response(origin) == (0, False, b"")
        assert (served.connections, served.requests) == (1, 2)


async def test_a_request_that_was_cancelled_is_not_sent_once_more() -> None:
    served = Served(YES)
    async with served.running() as origin:
        await response(origin)
        served.drop()
        begun: list[http.HttpExchange] = []

        async def cancel(exchange: http.HttpExchange) -> None:
            begun.append(exchange)
            exchange.close()

        ended = await origin.exchange("/x", b"", lambda _: None, cancel)
        assert begun == [ended]
        assert (ended.status, ended.done.result()) == (0, False)
        assert (served.connections, served.requests) == (1, 1)


async def test_a_repeated_request_ends_when_nothing_listens_any_more() -> None:
    served = Served(YES)
    async with served.running() as origin:
        await response(origin)
        served.server.close()  # its connection stays
        served.drop()
        with pytest.raises(ConnectionRefusedError):
            await response(origin)
        assert served.requests == 1


async def test_a_server_that_takes_no_new_connections_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Looks on a kept connection would go on for ever, while requests need new ones."""
    monkeypatch.setattr(attached, "_POLL_S", 0.01)
    served = Served(YES)
    async with served.running() as origin:

        async def read() -> ServerFacts:
            await origin.fetch("GET", "/version", 1)
            return FACTS

        watch = ServerWatch(origin, read, FACTS)
        dead: list[str] = []
        looks = asyncio.Event()
        watching = asyncio.create_task(watch.watch(looks.set, dead.append))
        await looks.wait()
        served.server.close()  # its connections stay
        async with asyncio.timeout(10):
            await watching
        assert dead == [f"nothing listens at {origin.name}"]


async def test_a_new_ca_is_trusted_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes mounts a ConfigMap: the file is a link through another one that is replaced."""
    folders = [tmp_path / name for name in ("first", "second")]
    contexts = [own_certificate(folder, monkeypatch) for folder in folders]
    (tmp_path / "data").symlink_to(folders[0])
    (tmp_path / "ca.pem").symlink_to(tmp_path / "data" / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    first, second = Served(YES), Served(YES)
    async with first.running(contexts[0]) as old, second.running(contexts[1]) as new:
        assert await old.fetch("GET", "/health", 10.0, anew=True) == b"yes"
        with pytest.raises(UnavailableError, match="is not accepted"):
            await new.fetch("GET", "/health", 10.0, anew=True)
        (tmp_path / "next").symlink_to(folders[1])
        (tmp_path / "next").replace(tmp_path / "data")
        assert await new.fetch("GET", "/health", 10.0, anew=True) == b"yes"
        assert await response(new) == (200, True, b"yes")
        with pytest.raises(UnavailableError, match="is not accepted"):
            await old.fetch("GET", "/health", 10.0, anew=True)
        (folders[1] / "ca.pem").write_text("half a certifi")
        assert await new.fetch("GET", "/health", 10.0, anew=True) == b"yes"


async def test_a_ca_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    origin = HttpOrigin.of_url("https://localhost:1")
    with pytest.raises(UnavailableError, match=r"SSL_CERT_FILE=\S+ cannot be used: No such"):
        await origin.fetch("GET", "/health", 10.0)


async def test_a_server_all_of_whose_addresses_refuse_is_gone_at_the_first_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the name is invented: nothing listens at its addresses."""
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()

    async def addresses(*_: object, **more: object) -> list[object]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))
            for host in ("127.0.0.1", "127.0.0.2")
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)
    origin = HttpOrigin.of_url(f"http://two.addresses:{port}")
    with pytest.raises(
        http.RefusedError, match=f"^nothing listens at http://two.addresses:{port}$"
    ):
        await origin.fetch("GET", "/health", 10.0)
    gone: list[str] = []

    async def read() -> ServerFacts:
        raise AssertionError("it takes no connection")

    watch = ServerWatch(origin, read, FACTS)
    watch.suspect()
    async with asyncio.timeout(0.5):
        await watch.watch(lambda: None, gone.append)
    assert gone == [f"nothing listens at http://two.addresses:{port}"]


OLD = b"HTTP/1.0 200 OK\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(OLD + b"Content-Length: 3\r\n\r\nyes", id="http-1.0"),
        pytest.param(YES[:-2] + b"Server-Timing: a;dur=1\r\n\r\n", id="trailers"),
    ],
)
async def test_older_and_rare_forms_of_responses_are_whole(answer: bytes) -> None:
    served = Served(answer, b"")
    async with served.running() as origin:
        parts: list[bytes] = []
        exchange = await origin.begin("POST", "/x", b"", parts.append)
        asyncio.get_running_loop().call_later(0.1, served.drop)
        async with asyncio.timeout(5):
            assert await exchange.done
        assert (exchange.status, b"".join(parts)) == (200, b"yes")


@pytest.mark.parametrize(
    "cut",
    [OLD + b"Content-Length: 9\r\n\r\nyes", YES[:-3], OLD, b"HTTP/1.1 100 Continue\r\n\r\n"],
    ids=["length", "chunks", "head", "continue"],
)
async def test_a_response_that_was_cut_is_not_whole(cut: bytes) -> None:
    served = Served(cut)
    async with served.running() as origin:
        exchange = await origin.begin("POST", "/x", b"", lambda _: None)
        asyncio.get_running_loop().call_later(0.1, served.drop)
        async with asyncio.timeout(5):
            assert not await exchange.done


async def test_requests_ask_for_bodies_as_they_are() -> None:
    """A proxy may compress what has no such header, and nothing here decompresses."""
    request = HttpOrigin.of_url("https://gw.example.:8443/vllm-1/").request_bytes("GET", "/health")
    assert b"\r\nAccept-Encoding: identity\r\n" in request
    assert request.startswith(b"GET /vllm-1/health HTTP/1.1\r\nHost: gw.example:8443\r\n")


async def test_a_continue_without_an_end_is_cut_off() -> None:
    served = Served(CONTINUE * 50_000)
    async with served.running() as origin:
        assert await response(origin) == (0, False, b"")
