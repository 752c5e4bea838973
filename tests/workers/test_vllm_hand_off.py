"""Hand-offs between vLLM workers: real shells and translators, and a vLLM that was recorded."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest

from baton.engine.process.client import EngineClient
from baton.engine.settings import EngineSettings, ExternalEngine
from baton.types.errors import InternalError
from tests.engine.tiny_llama import write_llama
from tests.engine.vllm.record import LONG
from tests.workers.harness import MiniRouter, WorkerProcess
from tests.workers.vllm_program import RECORDED

pytestmark = pytest.mark.fleet
FIRST = 260  # first token in recorded/prefill.json
RECORDED_VOCAB = 2048  # holds the ids of `LONG`
ROOT = Path(__file__).parents[2]


class Pair(NamedTuple):
    """A prefill and a decode worker, with the folders that switch their vLLMs."""

    prefill: WorkerProcess
    decode: WorkerProcess
    router: MiniRouter
    folder: Path

    def requests(self, worker_id: str) -> list[dict]:
        """Bodies that a worker's vLLM has received."""
        log = self.folder / worker_id / "requests"
        lines = log.read_bytes().splitlines() if log.exists() else []
        return [msgspec.json.decode(line) for line in lines]


def recorded_vllm(folder: Path) -> Path:
    """Write an interpreter that runs ``vllm_program.py`` in vLLM's place."""
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\ncd {ROOT}\nshift 2\nexec {sys.executable} -m tests.workers.vllm_program "$@"\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    program = recorded_vllm(tmp_path)
    async with contextlib.AsyncExitStack() as undo:
        prefill, decode = [
            await undo.enter_async_context(vllm_worker(worker_id, tmp_path, program))
            for worker_id in ("prefill-0", "decode-0")
        ]
        router = MiniRouter(decode)
        await router.connect()
        undo.push_async_callback(router.close)
        yield Pair(prefill, decode, router, tmp_path)


@pytest.fixture
async def other(pair: Pair) -> AsyncIterator[WorkerProcess]:
    """Another prefill worker beside them."""
    async with vllm_worker("prefill-1", pair.folder, pair.folder / "python") as worker:
        yield worker


@contextlib.asynccontextmanager
async def vllm_worker(worker_id: str, folder: Path, program: Path) -> AsyncIterator[WorkerProcess]:
    model = write_llama(folder / worker_id, vocab_size=RECORDED_VOCAB)
    external = ExternalEngine(kind="vllm", python=str(program), hand_off="nixl")
    worker = await WorkerProcess.start(worker_id, model=model, numerics="fast", external=external)
    try:
        yield worker
    finally:
        await worker.stop()


async def test_a_vllm_is_exact_if_its_mode_is_on_and_all_paths_agree(tmp_path: Path) -> None:
    program = recorded_vllm(tmp_path)
    external = ExternalEngine(
        kind="vllm", python=str(program), hand_off="nixl", batch_invariant=True
    )
    settings = EngineSettings(model=write_llama(tmp_path / "model"), external=external)
    engine = await EngineClient.start(settings)
    ids = engine.ready.numerics_id.partition("/exact/")
    await engine.stop()
    assert ids[0] == "vllm/0.32.0/bf16/bf16/cpu-auto/tp1"
    assert len(ids[2]) == 16
    off = msgspec.structs.replace(external, batch_invariant=False)
    with pytest.raises(InternalError, match="exact: vLLM's batch-invariant mode is off"):
        await EngineClient.start(msgspec.structs.replace(settings, external=off))


@pytest.mark.parametrize("victim", ["vllm", "engine process"])
async def test_a_worker_ends_with_its_vllm(tmp_path: Path, victim: str) -> None:
    external = ExternalEngine(kind="vllm", python=str(recorded_vllm(tmp_path)), hand_off="nixl")
    model = write_llama(tmp_path / "model", vocab_size=RECORDED_VOCAB)
    worker = await WorkerProcess.start("decode-0", model=model, numerics="fast", external=external)
    vllm = psutil.Process(worker.record.pid)
    parent = vllm.parent()
    assert parent is not None
    (vllm if victim == "vllm" else parent).kill()
    assert await asyncio.wait_for(worker.process.wait(), 10)


async def test_an_untested_version_that_fails_its_self_test_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECORDED_VERSION", "0.99.0")
    program = recorded_vllm(tmp_path)
    external = ExternalEngine(kind="vllm", python=str(program), hand_off="nixl")
    model = write_llama(tmp_path / "model", vocab_size=RECORDED_VOCAB)
    settings = EngineSettings(model=model, numerics="fast", external=external)
    with pytest.raises(
        InternalError, match=r"vLLM 0\.99\.0 fails in the test of responses: vLLM sent no log"
    ):
        await EngineClient.start(settings)


async def test_the_first_token_comes_from_one_vllm_and_the_rest_from_another(pair: Pair) -> None:
    await pair.router.submit("r", LONG, pair.prefill, sampling={"max_tokens": 4})
    end = await pair.router.ended("r")
    assert not end.HasField("error")
    assert pair.router.tokens["r"][0] == [FIRST, *recorded_tokens()]
    route = pair.router.routes["r"]
    assert (route.mode, route.prefill_worker_id) == ("disaggregated", "prefill-0")
    (asked,) = pair.requests("prefill-0")
    assert asked["token_ids"] == LONG
    (loaded,) = pair.requests("decode-0")
    assert loaded["token_ids"] == [*LONG, FIRST]
    assert loaded["kv_transfer_params"]["remote_num_tokens"] == 200
    assert loaded["cache_salt"] == asked["cache_salt"]
    times = end.times
    assert times.transfer_ns > 0
    assert times.transfer_bytes == 200 * 2 * 2 * 1 * 32 * 2  # tokens, layers, K and V, heads, bf16
    assert pair.router.status is not None
    await pair.router.baseline()
    assert pair.router.status.transfers.count == 1


def recorded_tokens() -> list[int]:
    lines = (RECORDED / "length.sse").read_bytes().split(b"\n\n")
    chunks = [msgspec.json.decode(line[6:]) for line in lines if line.startswith(b"data: {")]
    return [token for chunk in chunks for one in chunk["choices"] for token in one["token_ids"]]


async def test_a_load_that_fails_goes_to_another_prefill_worker(
    pair: Pair, other: WorkerProcess
) -> None:
    switch = pair.folder / "decode-0" / "fail"
    switch.touch()
    router = pair.router
    await router.submit("r", LONG, pair.prefill, sampling={"max_tokens": 4})
    await router.until(lambda: bool(router.asks))
    (needed,) = router.asks
    assert needed.reason.code == "transfer_failed"
    assert not needed.peer_died
    assert router.tokens["r"][0] == [FIRST]
    switch.unlink()
    target = other.target("r", pair.decode.record)
    await router.send(replacement={"request_id": "r", "attempt": 1, "prefill": target})
    assert not (await router.ended("r")).HasField("error")
    assert router.tokens["r"][0] == [FIRST, *recorded_tokens()]
    failed, loaded = pair.requests("decode-0")
    ports = [body["kv_transfer_params"]["remote_port"] for body in (failed, loaded)]
    assert ports[0] != ports[1]  # parameters of the other vLLM
    await router.baseline()
    assert router.status is not None
    assert router.status.transfers.failures == 1


async def test_the_decode_worker_computes_what_cannot_be_loaded(pair: Pair) -> None:
    (pair.folder / "decode-0" / "fail").touch()
    router = pair.router
    await router.submit("r", LONG, pair.prefill, sampling={"max_tokens": 4})
    await router.until(lambda: bool(router.asks))
    await router.send(replacement={"request_id": "r", "attempt": 1, "compute_locally": True})
    assert not (await router.ended("r")).HasField("error")
    assert router.tokens["r"][0] == [FIRST, *recorded_tokens()]
    assert router.routes["r"].mode == "colocated"
    assert "kv_transfer_params" not in pair.requests("decode-0")[-1]
    await router.baseline()


async def test_a_response_of_one_token_is_not_transferred(pair: Pair) -> None:
    await pair.router.submit("r", LONG, pair.prefill, sampling={"max_tokens": 1})
    assert not (await pair.router.ended("r")).HasField("error")
    assert pair.router.tokens["r"][0] == [FIRST]
    (asked,) = pair.requests("prefill-0")
    assert "kv_transfer_params" not in asked
    assert pair.requests("decode-0") == []


async def test_a_cancelled_load_leaves_nothing(pair: Pair) -> None:
    hang = pair.folder / "decode-0" / "hang"
    hang.touch()
    router = pair.router
    await router.submit("r", LONG, pair.prefill, sampling={"max_tokens": 4})
    await router.until(lambda: router.tokens["r"].get(0) == [FIRST])
    await router.send(cancel={"request_id": "r", "attempt": 1})
    assert (await router.ended("r")).error.code == "cancelled"
    await router.baseline()
    at_prefill = MiniRouter(pair.prefill)
    await at_prefill.connect()
    await at_prefill.baseline()
    await at_prefill.close()


async def test_a_prefill_worker_that_dies_before_its_first_token_is_named(
    pair: Pair, other: WorkerProcess
) -> None:
    shell = psutil.Process(pair.prefill.process.pid)
    shell.suspend()
    router = pair.router
    await router.submit("r", LONG, pair.prefill, sampling={"max_tokens": 4})
    shell.send_signal(signal.SIGKILL)
    await router.until(lambda: bool(router.asks))
    assert router.asks[0].peer_died
    target = other.target("r", pair.decode.record)
    await router.send(replacement={"request_id": "r", "attempt": 1, "prefill": target})
    assert not (await router.ended("r")).HasField("error")


async def test_a_prefill_worker_that_dies_during_the_load_is_named(
    pair: Pair, other: WorkerProcess
) -> None:
    switches = pair.folder / "decode-0"
    (switches / "hang").touch()
    router = pair.router
    await router.submit("r", LONG, pair.prefill, sampling={"max_tokens": 4})
    await router.until(lambda: router.tokens["r"].get(0) == [FIRST])
    async with asyncio.timeout(10):
        while not pair.requests("decode-0"):
            await asyncio.sleep(0.02)
    pair.prefill.process.kill()
    await asyncio.sleep(2.0)  # the stream breaks; only vLLM knows whether it has the KV
    assert router.asks == []
    (switches / "fail").touch()
    (switches / "hang").unlink()
    await router.until(lambda: bool(router.asks))
    assert router.asks[0].peer_died
    (switches / "fail").unlink()
    target = other.target("r", pair.decode.record)
    await router.send(replacement={"request_id": "r", "attempt": 1, "prefill": target})
    assert not (await router.ended("r")).HasField("error")
    assert router.tokens["r"][0] == [FIRST, *recorded_tokens()]


async def test_a_decode_worker_that_dies_during_the_load_leaves_nothing_at_prefill(
    pair: Pair,
) -> None:
    (pair.folder / "decode-0" / "hang").touch()
    at_prefill = MiniRouter(pair.prefill)
    await at_prefill.connect()
    await pair.router.submit("r", LONG, pair.prefill, sampling={"max_tokens": 4})
    await pair.router.until(lambda: pair.router.tokens["r"].get(0) == [FIRST])
    pair.decode.process.kill()
    await at_prefill.baseline(20.0)
    await at_prefill.close()


async def test_what_vllm_cannot_continue_is_refused(pair: Pair) -> None:
    await pair.router.submit("r", LONG, pair.prefill, sampling={"presence_penalty": 1.0})
    end = await pair.router.ended("r")
    assert end.error.code == "invalid_request"
    await pair.router.submit("again", LONG, pair.prefill, emitted=[[5]])
    assert (await pair.router.ended("again")).error.code == "unavailable"
    assert pair.requests("prefill-0") == []
