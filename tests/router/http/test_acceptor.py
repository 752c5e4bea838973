import asyncio
import contextlib
import errno
import socket
import ssl

import uvloop

from router.frontend.http.acceptor import Acceptor
from tests.wire import certs

CLIENTS = 300
TURNS = 30


class Listener:
    """A listening socket and the protocols of the connections that were accepted from it."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=CLIENTS)
        self.socket.setblocking(False)
        self.made: list[asyncio.Protocol] = []
        self.clients: list[socket.socket] = []

    def connect(self, count: int) -> None:
        for _ in range(count):
            self.clients.append(socket.create_connection(self.socket.getsockname()))

    def protocol(self) -> asyncio.Protocol:
        made = self.made

        class Noted(asyncio.Protocol):
            def connection_made(self, transport) -> None:
                made.append(self)
                self.transport = transport

            def data_received(self, data) -> None:
                self.transport.write(data)

        return Noted()

    def acceptor(self, tls: ssl.SSLContext | None = None) -> Acceptor:
        return Acceptor(self.socket.fileno(), self.protocol, tls, lambda _: None, 4)

    async def close(self) -> None:
        for client in self.clients:
            client.close()
        while any(not one.transport.is_closing() for one in self.made):
            await asyncio.sleep(0.01)
        self.socket.close()


def in_uvloop(work):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_many_connections_are_accepted_in_few_turns_of_the_loop():
    """uvloop itself takes one in each turn, however long a turn is."""

    async def life() -> tuple[int, int]:
        alone = Listener()
        alone.connect(CLIENTS)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(alone.protocol, sock=alone.socket.dup())
        await turns(TURNS)
        before = len(alone.made)
        acceptor = alone.acceptor()
        acceptor.start()
        await turns(TURNS)
        after = len(alone.made)
        await acceptor.close()
        server.close()
        await alone.close()
        return before, after

    before, after = in_uvloop(life())
    assert before <= TURNS
    assert after == CLIENTS


def test_a_process_without_descriptors_accepts_again_when_it_has_some(monkeypatch):
    async def life() -> tuple[int, int]:
        listener = Listener()
        acceptor = listener.acceptor()
        real = acceptor._listener
        fails = iter([OSError(errno.EMFILE, "too many open files")])

        class Empty:
            fileno = real.fileno
            close = real.close

            def accept(self):
                for error in fails:
                    raise error
                return real.accept()

        monkeypatch.setattr(acceptor, "_listener", Empty())
        acceptor.start()
        listener.connect(1)
        await turns(TURNS)
        before = len(listener.made)
        async with asyncio.timeout(5):
            while not listener.made:
                await asyncio.sleep(0.01)
        await acceptor.close()
        await listener.close()
        return before, len(listener.made)

    assert in_uvloop(life()) == (0, 1)


def test_what_was_accepted_is_answered_after_the_acceptor_has_closed():
    async def life() -> bytes:
        listener = Listener()
        listener.connect(1)
        acceptor = listener.acceptor()
        acceptor.start()
        acceptor._accept()  # accepted, and not connected yet
        await acceptor.close()
        reader, writer = await asyncio.open_connection(sock=listener.clients.pop())
        writer.write(b"hello")
        async with asyncio.timeout(5):
            answer = await reader.readexactly(5)
        writer.close()
        await writer.wait_closed()
        await listener.close()
        return answer

    assert in_uvloop(life()) == b"hello"


def test_silent_clients_of_tls_make_way_for_others(tmp_path):
    files = certs.files(certs.made(tmp_path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    trust = ssl.create_default_context(cafile=files.ca)

    async def life() -> tuple[bytes, list[bool]]:
        listener = Listener()
        acceptor = listener.acceptor(context)
        acceptor.start()
        listener.connect(9)
        address = listener.socket.getsockname()
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(
                *address[:2], ssl=trust, server_hostname=files.name
            )
            writer.write(b"hello")
            answer = await reader.readexactly(5)
            ended = [await is_closed(client) for client in listener.clients]
        writer.close()
        with contextlib.suppress(ssl.SSLError):
            await writer.wait_closed()
        await acceptor.close()
        await listener.close()
        return answer, ended

    answer, ended = in_uvloop(life())
    assert answer == b"hello"
    assert ended[:6] == [True] * 6
    assert ended[6:].count(False) == 3


async def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            return not await asyncio.get_running_loop().sock_recv(client, 100)
    return False
