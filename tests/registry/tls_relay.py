"""TLS before a server that has none, as stunnel does.

    python tls_relay.py ADDRESS PORT SERVER_PORT CERTIFICATE KEY

What comes to ``ADDRESS:PORT`` by TLS goes to ``127.0.0.1:SERVER_PORT``. One line tells the port,
which is chosen where 0 is asked for. Ends with its standard input.
"""

import asyncio
import contextlib
import ssl
import sys

_PIECE_BYTES = 1 << 16


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # ssl's errors are among them
        while data := await source.read(_PIECE_BYTES):
            target.write(data)
            await target.drain()
    target.close()


async def main(address: str, port: str, server_port: str, certificate: str, key: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inward, onward = await asyncio.open_connection("127.0.0.1", int(server_port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, onward), _copy(inward, writer))

    server = await asyncio.start_server(join, address, int(port), ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
