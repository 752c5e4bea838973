"""Real Redis servers with settings of their own: replicas, Sentinels, users; TLS before them."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from fleet.local.redis_server import server_binary
from fleet.local.subprocesses import die_with_parent

DOWN_AFTER_MS = 400


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


class Server:
    """One `redis-server`, on loopback."""

    def __init__(
        self,
        folder: Path,
        port: int,
        *lines: str,
        sentinel: bool = False,
        binary: Path | None = None,
    ) -> None:
        self.port = port
        self.binary = binary or server_binary()
        own = folder / str(port)
        own.mkdir()
        file = own / "redis.conf"
        common = ("bind 127.0.0.1", f"port {port}", f"dir {own}", *lines)
        file.write_text("\n".join(common if sentinel else (*common, 'save ""')) + "\n")
        self._command = [str(self.binary), str(file), *(["--sentinel"] if sentinel else [])]
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent()
        )
        return self.process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(self, **options: str) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2, decode_responses=True, **options)

    def wait_up(self) -> None:
        deadline = time.monotonic() + 20
        with self.client() as client:
            while True:
                with contextlib.suppress(redis.ConnectionError):
                    client.execute_command("PING")
                    return
                assert time.monotonic() < deadline
                time.sleep(0.02)


class Watched:
    """A primary, its replica, and three Sentinels that watch over both."""

    def __init__(self, folder: Path) -> None:
        first, second, *others = free_ports(5)
        self.primary = Server(folder, first, "repl-diskless-sync yes", "repl-diskless-sync-delay 0")
        self.replica = Server(folder, second, f"replicaof 127.0.0.1 {first}")
        for server in (self.primary, self.replica):
            server.wait_up()
        rules = (
            f"sentinel monitor baton 127.0.0.1 {first} 2",
            f"sentinel down-after-milliseconds baton {DOWN_AFTER_MS}",
            "sentinel failover-timeout baton 5000",
        )
        self.sentinels = [Server(folder, port, *rules, sentinel=True) for port in others]
        for server in self.sentinels:
            server.wait_up()
        self._wait_until_they_know_each_other()

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.sentinels)
        return f"redis+sentinel://{hosts}/baton"

    def stop(self) -> None:
        for server in (self.primary, self.replica, *self.sentinels):
            server.kill()

    def _wait_until_they_know_each_other(self) -> None:
        deadline = time.monotonic() + 30
        with contextlib.ExitStack() as clients:
            asked = [clients.enter_context(server.client()) for server in self.sentinels]
            while True:
                said = [client.sentinel_master("baton") for client in asked]
                if all((s["num-slaves"], s["num-other-sentinels"]) == (1, 2) for s in said):
                    return
                assert time.monotonic() < deadline, said
                time.sleep(0.1)


@contextlib.contextmanager
def by_tls(port: int, certificate: Path, key: Path) -> Iterator[int]:
    """A port on loopback where TLS is spoken; what is in it goes to another port."""
    relay = Path(__file__).with_name("tls_relay.py")
    command = [sys.executable, str(relay), "127.0.0.1", "0", str(port), str(certificate), str(key)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=die_with_parent()
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


def certificates(folder: Path, name: str = "127.0.0.1") -> tuple[Path, Path, Path]:
    """A CA, and a server's certificate and key that it signed for an address."""
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    certificate, key, request = folder / "server.pem", folder / "server.key", folder / "server.csr"
    extension = folder / "extension"
    extension.write_text(f"subjectAltName = IP:{name}\n")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    signed = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-extfile", extension)
    own = ("-x509", "-days", "2", "-subj", "/CN=trial CA")
    for arguments in (
        ("req", *own, *new_key, "-keyout", ca_key, "-out", ca),
        ("req", *new_key, "-subj", "/CN=redis", "-keyout", key, "-out", request),
        ("x509", "-req", "-in", request, *signed, "-days", "2", "-out", certificate),
    ):
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
    return ca, certificate, key
