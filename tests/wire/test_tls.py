"""Who may speak to whom: real connections, real certificates, and what can be wrong with them."""

import contextlib
import re
import shutil
import ssl
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from baton.wire.grpc_channels import Channels
from baton.wire.grpc_options import ROUTER_OPTIONS, listen, open_channel
from baton.wire.tls import CertificateError, FleetTls, distrust
from fleet.cli import certificate_authority as certificates
from tests.house.imports import PACKAGES
from tests.wire.certs import DAY, EXPIRED, NAME, files, made

ECHO = "/test.Echo/Stream"
LIMIT_S = 10


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("certs") / "ours")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("certs") / "others")


@contextlib.asynccontextmanager
async def served(tls: FleetTls | None) -> AsyncIterator[str]:
    """A server that sends back what it is sent; its address."""

    async def echo(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Echo", {"Stream": handler}),)
    )
    port = listen(server, "127.0.0.1:0", tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def echoed(channel: grpc.aio.Channel, said: bytes = b"hello") -> bytes:
    call = channel.stream_stream(ECHO)(timeout=LIMIT_S)
    await call.write(said)
    heard = await call.read()
    await call.done_writing()
    return heard


async def refused(address: str, tls: FleetTls | None) -> str:
    """Return why a connection is refused.

    gRPC may report that its endpoint is closing in place of the reason: then it is asked again.
    """
    details = "Endpoint closing"
    for _ in range(5):
        channel = open_channel(address, tls, ROUTER_OPTIONS)
        try:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echoed(channel)
        finally:
            await channel.close()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, "and it did not hang"
        details = str(caught.value.details())
        if "Endpoint closing" not in details:
            break
    return details


async def test_both_ends_of_a_fleet_understand_each_other(ours: Path) -> None:
    async with served(FleetTls(files(ours))) as address:
        channel = open_channel(address, FleetTls(files(ours)))
        assert await echoed(channel) == b"hello"
        await channel.close()


async def test_a_client_without_the_fleets_ca_is_refused(ours: Path, others: Path) -> None:
    """Its own certificate is another CA's, and it believes that one."""
    async with served(FleetTls(files(ours))) as address:
        reason = await refused(address, FleetTls(files(others)))
        assert "not valid for this fleet" in distrust(reason)


async def test_a_client_that_believes_us_and_shows_another_certificate_is_refused(
    ours: Path, others: Path, tmp_path: Path
) -> None:
    for name in ("fleet.pem", "fleet.key"):
        (tmp_path / name).write_bytes((others / name).read_bytes())
    (tmp_path / "ca.pem").write_bytes((ours / "ca.pem").read_bytes())
    async with served(FleetTls(files(ours))) as address:
        assert await refused(address, FleetTls(files(tmp_path)))


async def test_a_client_that_shows_no_certificate_is_refused(ours: Path) -> None:
    async with served(FleetTls(files(ours))) as address:
        credentials = grpc.ssl_channel_credentials((ours / "ca.pem").read_bytes())
        options = [("grpc.ssl_target_name_override", NAME)]
        async with grpc.aio.secure_channel(address, credentials, options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echoed(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_plain_text_against_tls_and_the_other_way_round(ours: Path) -> None:
    async with served(FleetTls(files(ours))) as address:
        assert await refused(address, None)
    async with served(None) as address:
        reason = await refused(address, FleetTls(files(ours)))
        assert "uses plain text" in distrust(reason)


async def test_a_certificate_that_expired_while_it_was_in_use_is_refused(
    ours: Path, tmp_path: Path
) -> None:
    """The process that shows it was started in time."""
    certificates._sign(tmp_path, "fleet", certificates._read_ca(ours), [NAME], EXPIRED)
    pair = [(tmp_path / name).read_bytes() for name in ("fleet.key", "fleet.pem")]
    credentials = grpc.ssl_server_credentials(
        [tuple(pair)], (ours / "ca.pem").read_bytes(), require_client_auth=True
    )
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        reason = await refused(f"127.0.0.1:{port}", FleetTls(files(ours)))
    finally:
        await server.stop(None)
    assert "expired" in distrust(reason)


async def test_a_certificate_of_our_ca_for_another_fleet_is_refused(
    ours: Path, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_bytes((ours / "ca.pem").read_bytes())
    other = "other.baton.internal"
    certificates._sign(tmp_path, "fleet", certificates._read_ca(ours), [other], DAY)
    async with served(FleetTls(files(tmp_path, other))) as address:
        reason = await refused(address, FleetTls(files(ours)))
        assert "not valid for this fleet" in distrust(reason)


async def test_certificates_are_replaced_while_a_stream_runs(tmp_path: Path) -> None:
    """New CA, new certificates: the stream that stands goes on, the next connection has the new."""
    folder = made(tmp_path / "now")
    theirs, mine = FleetTls(files(folder)), FleetTls(files(folder))
    channels = Channels(mine)
    async with served(theirs) as address:
        first = channels.to(address)
        assert channels.to(address) is first, "as long as nothing changes"
        call = first.stream_stream(ECHO)(timeout=60)
        await call.write(b"before")
        assert await call.read() == b"before"

        old = FleetTls(files(made(tmp_path / "copy")))  # never of this fleet
        newer = made(tmp_path / "newer")
        for name in ("ca.pem", "fleet.key", "fleet.pem"):
            (newer / name).replace(folder / name)

        await call.write(b"after")
        assert await call.read() == b"after", "the stream runs on"
        second = channels.to(address)
        assert second is not first
        assert await echoed(second) == b"hello"
        assert "not valid for this fleet" in distrust(await refused(address, old))
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    await channels.close()


async def test_a_ca_is_replaced_by_way_of_both(ours: Path, others: Path, tmp_path: Path) -> None:
    """Who believes both speaks to who still shows the old, and to who shows the new already."""
    both = (ours / "ca.pem").read_bytes() + (others / "ca.pem").read_bytes()
    folders = {"old": ours, "new": others}
    for name, shown in folders.items():
        (tmp_path / name).mkdir()
        for file in ("fleet.pem", "fleet.key"):
            (tmp_path / name / file).write_bytes((shown / file).read_bytes())
        (tmp_path / name / "ca.pem").write_bytes(both)
    for server, client in (("old", "new"), ("new", "old")):
        async with served(FleetTls(files(tmp_path / server))) as address:
            channel = open_channel(address, FleetTls(files(tmp_path / client)))
            assert await echoed(channel) == b"hello"
            await channel.close()


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str | None) -> bytes | None:
    """Return the server's certificate, after both have sent what they have to say."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends[0].getpeercert(binary_form=True)


def test_a_page_forgets_a_ca_that_was_removed(ours: Path, others: Path, tmp_path: Path) -> None:
    """One context loaded all CAs, one after another: certificates of each were good for ever."""
    folder = tmp_path / "certs"
    shutil.copytree(ours, folder)
    tls = FleetTls(files(folder))
    page = tls.page_context()
    old = ssl.create_default_context(cafile=str(ours / "ca.pem"))
    old.load_cert_chain(ours / "fleet.pem", ours / "fleet.key")
    assert shake_hands(old, page, NAME)
    shutil.copytree(others, folder, dirs_exist_ok=True)
    tls.channel_credentials()
    new = ssl.create_default_context(cafile=str(others / "ca.pem"))
    new.load_cert_chain(ours / "fleet.pem", ours / "fleet.key")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(new, page, NAME)
    new.load_cert_chain(others / "fleet.pem", others / "fleet.key")
    assert shake_hands(new, page, NAME)


async def test_half_of_a_new_pair_changes_nothing(
    ours: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = made(tmp_path / "now")
    tls = FleetTls(files(folder))
    before = tls.channel_credentials()
    (folder / "fleet.key").write_bytes((ours / "fleet.key").read_bytes())
    assert tls.channel_credentials() is before
    assert "cannot be used together" in caplog.text and "stays in use" in caplog.text
    (folder / "fleet.key").unlink()
    assert tls.channel_credentials() is before
    assert f"{folder / 'fleet.key'} cannot be read" in caplog.text
    certificates.renew(folder, [], DAY)
    assert tls.channel_credentials() is not before


@pytest.mark.parametrize(
    ("file", "contents", "said"),
    [
        ("fleet.key", None, "cannot be read: No such file"),
        ("fleet.key", b"garbage", "cannot be used together"),
        ("fleet.pem", b"", "cannot be used together"),
        ("ca.pem", b"\xff\xfe", "is not a PEM certificate"),
        ("ca.pem", b"no certificate", "is not a PEM certificate"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, file: str, contents: bytes | None, said: str
) -> None:
    folder = made(tmp_path / "now")
    if contents is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(contents)
    with pytest.raises(CertificateError, match=said) as caught:
        FleetTls(files(folder))
    assert str(folder / file) in str(caught.value)


def test_one_that_has_expired_is_not_even_begun_with(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=r"fleet.pem expired on .*--renew"):
        FleetTls(files(made(tmp_path / "old", valid=EXPIRED)))


def test_one_for_another_fleet_says_for_which(ours: Path) -> None:
    with pytest.raises(CertificateError, match=f"is for {NAME}.* requires x.baton.internal"):
        FleetTls(files(ours, "x.baton.internal"))


def test_keys_are_their_users_alone_and_the_ca_stays(tmp_path: Path) -> None:
    folder = made(tmp_path / "now")
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.glob("*.key")} == {0o600}
    ca = (folder / "ca.pem").read_bytes()
    names = certificates._names_in(folder / "fleet.pem")
    certificates.renew(folder, ["10.0.0.1"], DAY)
    assert (folder / "ca.pem").read_bytes() == ca
    assert certificates._names_in(folder / "fleet.pem") == [*names[:2], *names[2:], "10.0.0.1"]
    with pytest.raises(CertificateError, match="already has a CA"):
        made(folder)
    with pytest.raises(CertificateError, match="cannot read the CA"):
        certificates.renew(tmp_path / "nothing", [], DAY)


def test_channels_and_ports_are_made_at_one_place() -> None:
    """But for benches, which stay on loopback, and for questions to Ray."""
    root = Path(__file__).parents[2]
    elsewhere = {
        str(file.relative_to(root))
        for package in PACKAGES
        if package not in ("loadtest", "benchmarks")
        for file in (root / package).rglob("*.py")
        if re.search(r"secure_channel\(|secure_port\(", file.read_text(encoding="utf-8"))
    }
    ray = {"fleet/pools/ray_health.py", "fleet/pools/ray_runtime.py"}
    assert elsewhere == {"baton/wire/grpc_options.py", *ray}


def test_a_connection_that_ended_as_it_began_says_nothing_of_trust() -> None:
    """Seen of plain-text workers that stopped."""
    shut = "UNKNOWN: ipv4:127.0.0.1:39093: tcp handshaker shutdown"
    assert distrust(f"failed to connect to all addresses; last error: {shut}") == ""
