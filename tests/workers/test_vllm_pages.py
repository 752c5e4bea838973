"""Hand-offs between vLLM workers by Baton's transports, with damage: real shells, recorded vLLM."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.engine.settings import ExternalEngine
from tests.engine.tiny_llama import write_llama
from tests.engine.vllm.record import LONG
from tests.workers.harness import MiniRouter, WorkerProcess
from tests.workers.test_vllm_hand_off import (
    FIRST,
    RECORDED_VOCAB,
    recorded_tokens,
    recorded_vllm,
)

pytestmark = pytest.mark.fleet
SLOW_DAMAGE = [pytest.param(name, marks=pytest.mark.slow) for name in ("swap", "replay", "torn")]


@contextlib.asynccontextmanager
async def pair(folder: Path, fault: str) -> AsyncIterator[tuple[WorkerProcess, MiniRouter]]:
    """Run a prefill worker, which damages frames, and a decode worker; yield the first."""
    program = recorded_vllm(folder)
    external = ExternalEngine(kind="vllm", python=str(program), hand_off="baton")
    async with contextlib.AsyncExitStack() as undo:
        started = []
        for name in ("prefill-0", "decode-0"):
            worker = await WorkerProcess.start(
                name,
                model=write_llama(folder / name, vocab_size=RECORDED_VOCAB),
                numerics="fast",
                external=external,
                damage=fault,
                transports=("grpc",),  # frames have a payload to damage
            )
            undo.push_async_callback(worker.stop)
            started.append(worker)
        router = MiniRouter(started[1])
        await router.connect()
        undo.push_async_callback(router.close)
        yield started[0], router


def loaded(folder: Path) -> list[str]:
    """Return for each load of the decode worker whether its bytes were those of the prompt."""
    log = folder / "decode-0/loaded"
    return log.read_text().split() if log.exists() else []


@pytest.mark.parametrize("damage", ["flip", "incarnation", *SLOW_DAMAGE])
async def test_vllm_loads_what_the_other_vllm_saved_though_frames_are_damaged(
    tmp_path: Path, damage: str
) -> None:
    async with pair(tmp_path, f"{damage}:2") as (prefill, router):
        repaired = 0
        for number in range(4):
            name = f"r{number}"
            await router.submit(name, [number, *LONG], prefill, sampling={"max_tokens": 4})
            end = await router.ended(name)
            assert not end.HasField("error"), end.error.message
            assert router.routes[name].mode == "disaggregated"
            assert router.tokens[name][0] == [FIRST, *recorded_tokens()]
            repaired += end.times.repaired_chunks
        assert loaded(tmp_path) == ["True"] * 4
        assert repaired > 0
        await router.baseline()


@pytest.mark.parametrize("damage", ["flip", "incarnation", "torn"])
async def test_damage_that_never_stops_is_never_loaded(tmp_path: Path, damage: str) -> None:
    async with pair(tmp_path, f"{damage}:1") as (prefill, router):
        await router.submit("r", LONG, prefill, sampling={"max_tokens": 4})
        await router.until(lambda: bool(router.asks))
        assert router.asks[0].reason.code == "transfer_failed"
        assert not router.asks[0].peer_died
        await router.send(replacement={"request_id": "r", "attempt": 1, "compute_locally": True})
        assert not (await router.ended("r")).HasField("error")
        computed = recorded_tokens()  # behind the first token, unless the damage came before it
        assert router.tokens["r"][0] in ([FIRST, *computed], computed)
        assert loaded(tmp_path) == []
        await router.baseline()
