"""HTTPS of the router: a real process, real certificates, replaced while an answer streams."""

import asyncio
import contextlib
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from baton.config.clients import ClientLimitsConfig
from baton.config.network import HttpsConfig
from baton.telemetry.metrics import Metrics
from baton.wire.tls import CertificateError
from fleet.cli import certificate_authority as certificates
from fleet.local.http_trust import trusted
from router.frontend.http.certificate import LiveCertificate
from router.frontend.http.protocol import server_config
from tests.e2e.fleet_processes import free_port
from tests.router.quick_server import QuickServer
from tests.wire.certs import DAY, made
from tests.wire.test_tls import shake_hands

SLOW = 40  # pieces of an answer


def https(folder: Path) -> HttpsConfig:
    return HttpsConfig(certificate=str(folder / "router.pem"), key=str(folder / "router.key"))


async def app(scope, receive, send) -> None:
    """Says where it is spoken to from, then counts slowly."""
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for number in range(SLOW if scope["path"] == "/slow" else 1):
        body = f"{scope['scheme']} {number}\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await asyncio.sleep(0.05 if scope["path"] == "/slow" else 0)
    await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def served(certificate: LiveCertificate) -> AsyncIterator[str]:
    config = server_config(
        app,
        Metrics("router", model="m"),
        ClientLimitsConfig(),
        port=0,
        lifespan="off",
        timeout_graceful_shutdown=1,
        ssl_context_factory=lambda *_: certificate.context,
    )
    server = QuickServer(config)
    server.capture_signals = contextlib.nullcontext
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    following = asyncio.create_task(certificate.follow())
    try:
        yield f"https://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        following.cancel()
        server.should_exit = True
        await task


async def test_a_certificate_is_replaced_while_an_answer_streams(tmp_path: Path) -> None:
    folder = made(tmp_path / "certs")
    believes = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    async with served(LiveCertificate(https(folder))) as url:
        async with httpx.AsyncClient(base_url=url, verify=believes, trust_env=False) as client:
            assert (await client.get("/")).text == "https 0\n"
            async with client.stream("GET", "/slow") as answer:
                lines = answer.aiter_lines()
                assert await anext(lines) == "https 0"
                newer = made(tmp_path / "newer")
                for name in ("router.key", "router.pem"):
                    (newer / name).replace(folder / name)
                rest = [line async for line in lines]
            assert rest == [f"https {number}" for number in range(1, SLOW)]
        newer_believes = ssl.create_default_context(cafile=str(newer / "ca.pem"))
        async with asyncio.timeout(20):
            while True:
                async with httpx.AsyncClient(base_url=url, verify=newer_believes) as client:
                    with contextlib.suppress(httpx.ConnectError):
                        assert (await client.get("/")).status_code == 200
                        break
                await asyncio.sleep(0.1)
        async with httpx.AsyncClient(base_url=url, verify=believes) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get("/")


async def test_plain_http_and_garbage_are_hung_up_on(tmp_path: Path) -> None:
    folder = made(tmp_path / "certs")
    pinned = trusted(str(folder / "router.pem"))
    async with served(LiveCertificate(https(folder))) as url:
        port = int(url.rpartition(":")[2])
        for said in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\xff\xff" * 9):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionError):
                    assert b"200" not in await reader.read()
            writer.close()
        async with httpx.AsyncClient(base_url=url, verify=pinned) as client:
            assert (await client.get("/")).status_code == 200, "and serves on"


async def test_commands_here_believe_exactly_the_routers_certificate(tmp_path: Path) -> None:
    folder, other = made(tmp_path / "certs"), made(tmp_path / "other")
    async with served(LiveCertificate(https(folder))) as url:
        for certificate, believed in ((folder, True), (other, False)):
            context = trusted(str(certificate / "router.pem"))
            async with httpx.AsyncClient(base_url=url, verify=context) as client:
                if believed:
                    assert (await client.get("/")).status_code == 200
                    continue
                with pytest.raises(httpx.ConnectError):
                    await client.get("/")


def test_half_of_a_new_pair_is_not_served(tmp_path: Path, caplog) -> None:
    folder = made(tmp_path / "certs")
    live = LiveCertificate(https(folder))
    (folder / "router.key").write_text("garbage")
    live.look()
    assert "cannot be used together" in caplog.text
    certificates.renew(folder, [], DAY)
    live.look()
    assert live._files.changes == 1


@pytest.mark.parametrize("named", ["router.example", None])
def test_a_certificate_with_another_kind_of_key_takes_the_place_of_the_old(
    tmp_path: Path, named: str | None
) -> None:
    """A context keeps a key of each kind: clients got the old certificate, until it expired."""
    folder = made(tmp_path / "certs")
    live = LiveCertificate(https(folder))
    client = ssl._create_unverified_context()
    old = shake_hands(client, live.context, named)
    key = rsa.generate_private_key(65537, 2048)
    (folder / "router.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    certificate = x509.load_pem_x509_certificate((folder / "router.pem").read_bytes())
    begin = certificate.not_valid_before_utc
    fresh = (
        x509.CertificateBuilder(certificate.subject, certificate.subject, key.public_key())
        .serial_number(1)
        .not_valid_before(begin)
        .not_valid_after(begin + 2 * DAY)
        .sign(key, SHA256())
    )
    (folder / "router.pem").write_bytes(fresh.public_bytes(Encoding.PEM))
    live.look()
    assert old != shake_hands(client, live.context, named) == fresh.public_bytes(Encoding.DER)


@pytest.mark.slow
def test_a_router_without_its_key_says_which_file_and_ends(tmp_path: Path) -> None:
    folder = made(tmp_path / "certs")
    (folder / "router.key").unlink()
    with pytest.raises(CertificateError, match=r"router\.key cannot be read"):
        LiveCertificate(https(folder))
    file = tmp_path / "fleet.yaml"
    names = f"certificate: {folder}/router.pem, key: {folder}/router.key"
    file.write_text(f"clients: {{tls: {{{names}}}}}\n")
    done = subprocess.run(
        [sys.executable, "-m", "router", "--config", file, "--port", str(free_port())],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "BATON_REDIS_URL": "redis://127.0.0.1:1"},
    )
    assert done.returncode == 2
    assert f"the key {folder}/router.key cannot be read" in done.stderr
