"""Hand-offs of two real vLLMs by Baton's transports (`make test-vllm`), on this machine's CPU.

Every third frame is damaged on its way. The drills beside a recorded vLLM are in
``tests/workers/test_vllm_hand_off.py``.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Protocol

import psutil
import pytest

from baton.engine.compiled import cpu_flags
from baton.engine.settings import ExternalEngine
from tests.vllm.hand_offs import doubtful, pages_in_use, vllm_metric
from tests.vllm.places import ARGS, MODEL, PYTHON
from tests.vllm.test_fleet import READY_S, alone
from tests.workers.harness import MiniRouter, WorkerProcess
from tests.workers.test_prefix_pull import outcomes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
    pytest.mark.skipif(
        "avx512f" not in cpu_flags(), reason="not done in 900 s by two vLLMs without AVX-512"
    ),
]
ANSWER = {"max_tokens": 12}
TOKEN_BYTES = 30 * 2 * 3 * 64 * 2  # layers, K and V, heads, values, bf16
EXTERNAL_HITS = "external_prefix_cache_hits_total"


class Start(Protocol):
    """Starts a worker with further arguments for its vLLM."""

    async def __call__(self, worker_id: str, *own: str) -> WorkerProcess: ...


@contextlib.asynccontextmanager
async def starting(model: Path = MODEL, *more: str) -> AsyncIterator[Start]:
    """Return what starts workers, and stop them all at the end."""
    async with contextlib.AsyncExitStack() as undo:
        # long prompts take several steps
        args = (*ARGS, "--dtype", "bfloat16", "--max-num-batched-tokens", "256", *more)

        async def start(worker_id: str, *own: str) -> WorkerProcess:
            external = ExternalEngine(
                kind="vllm", python=str(PYTHON), args=(*args, *own), hand_off="baton"
            )
            worker = await WorkerProcess.start(
                worker_id,
                ready_s=READY_S,
                model=str(model),
                numerics="fast",
                max_context_tokens=2048,
                external=external,
                damage="flip:3",
            )
            undo.push_async_callback(worker.stop)
            return worker

        yield start


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[WorkerProcess, WorkerProcess]]:
    async with starting() as start:
        prefill, decode = await asyncio.gather(start("prefill-0"), start("decode-0"))
        yield prefill, decode


def vllm_of(worker: WorkerProcess) -> str:
    """Return the socket of a worker's vLLM."""
    line = psutil.Process(worker.record.pid).cmdline()
    return line[line.index("--uds") + 1]


async def test_hand_offs_with_damage_then_of_two_tenants_then_with_cancels() -> None:
    async with pair() as (prefill, decode):
        at_decode = MiniRouter(decode)
        await at_decode.connect()
        await check_tokens(at_decode, prefill)
        await check_tenants(at_decode, prefill)
        await check_next_turn(at_decode, prefill)
        await check_pull_from_prefill(at_decode, prefill)
        await check_cancels(at_decode, prefill)
        await at_decode.baseline(30.0)
        await at_decode.close()
        for worker in (prefill, decode):
            await check_rest(vllm_of(worker))


async def check_tokens(router: MiniRouter, prefill: WorkerProcess) -> None:
    """Check that the tokens are those of vLLM alone, but for near ties in bf16.

    Prompts have 17 to 792 tokens, and a block of vLLM has 32. The decode worker's vLLM computes
    the tokens behind the last block apart, which on CPUs with AMX gives other sums: 12 differ.
    """
    own_socket = vllm_of(router.worker)
    different: list[int] = []
    overlaps: list[bool] = []
    repaired = 0
    before = await asyncio.to_thread(vllm_metric, own_socket, EXTERNAL_HITS)  # of a self-test
    loaded_tokens = 0
    for number in range(32):
        name = f"r{number}"
        prompt = list(range(300 + 40 * number, 300 + 40 * number + 17 + 25 * number))
        await router.submit(name, prompt, prefill, sampling=ANSWER)
        ended = await router.ended(name, 60.0)
        assert not ended.HasField("error"), ended
        assert router.routes[name].mode == "disaggregated"
        repaired += ended.times.repaired_chunks
        tokens = router.tokens[name][0]
        if tokens != await alone(own_socket, prompt):
            different.append(number)
            assert not await doubtful(own_socket, prompt, tokens), (number, tokens)
        if len(prompt) > 512:  # transferred from the end of its first step on
            overlaps.append(ended.times.transfer_ns > ended.times.prefill_ns / 2)
        loaded_tokens += len(prompt) // 32 * 32
    assert len(different) <= 16, different
    hits = await asyncio.to_thread(vllm_metric, own_socket, EXTERNAL_HITS)
    assert hits - before == loaded_tokens
    assert repaired > 0
    assert sum(overlaps) > len(overlaps) / 2, overlaps  # a busy machine delays some


async def check_tenants(router: MiniRouter, prefill: WorkerProcess) -> None:
    """Check that two tenants share no block, neither at the prefill nor at the decode worker."""
    prompt = list(range(5000, 5170))

    async def ask(name: str, seed: bytes) -> tuple[float, float]:
        """Return the tokens that prefill's vLLM had cached, and those that decode's loaded."""
        places = ((prefill, "prefix_cache_hits_total"), (router.worker, EXTERNAL_HITS))
        before = [
            await asyncio.to_thread(vllm_metric, vllm_of(at), metric) for at, metric in places
        ]
        await router.submit(name, prompt, prefill, sampling=ANSWER, hash_seed=seed)
        assert not (await router.ended(name, 60.0)).HasField("error")
        after = [await asyncio.to_thread(vllm_metric, vllm_of(at), metric) for at, metric in places]
        return after[0] - before[0], after[1] - before[1]

    assert await ask("first of a", b"a" * 16) == (0, 160)
    assert await ask("again of a", b"a" * 16) == (160, 0)
    assert await ask("first of b", b"b" * 16) == (0, 160)


async def check_next_turn(router: MiniRouter, prefill: WorkerProcess) -> None:
    """Check that a second turn computes and moves only what is new.

    The prefill worker pulls the response's blocks from the decode worker, which keeps its own.
    """
    decode = router.worker
    sampling = {"max_tokens": 60, "ignore_eos": True}
    await router.submit("turn 1", list(range(7000, 7200)), prefill, sampling=sampling)
    assert not (await router.ended("turn 1", 60.0)).HasField("error")
    before = [*range(7000, 7200), *router.tokens["turn 1"][0]]
    prompt = [*before, *range(7300, 7350)]
    held_tokens = 256  # in whole blocks, of 259 with KV
    places = (vllm_of(prefill), vllm_of(decode))
    loaded = [await asyncio.to_thread(vllm_metric, at, EXTERNAL_HITS) for at in places]
    source = (decode, held_tokens // 16)
    await router.submit("turn 2", prompt, prefill, sampling=ANSWER, prefix=source)
    ended = await router.ended("turn 2", 60.0)
    assert not ended.HasField("error"), ended
    assert router.routes["turn 2"].mode == "disaggregated"
    assert await outcomes(prefill) == {"pulled": 1}
    assert ended.times.cached_tokens == held_tokens
    assert ended.times.transfer_bytes == (len(prompt) - held_tokens) * TOKEN_BYTES
    after = [await asyncio.to_thread(vllm_metric, at, EXTERNAL_HITS) for at in places]
    assert after[0] - loaded[0] == held_tokens - 192  # it has 192 tokens of the first prompt
    assert after[1] - loaded[1] == len(prompt) // 32 * 32 - held_tokens
    tokens = router.tokens["turn 2"][0]
    if tokens != await alone(places[1], prompt):
        assert not await doubtful(places[1], prompt, tokens)


async def check_pull_from_prefill(router: MiniRouter, prefill: WorkerProcess) -> None:
    """Check pulls in the other direction: of blocks that are there, and of others."""
    at_prefill = MiniRouter(prefill, "owner")
    await at_prefill.connect()
    prompt = list(range(9000, 9170))
    await at_prefill.submit("warm", prompt, sampling=ANSWER)
    assert not (await at_prefill.ended("warm", 60.0)).HasField("error")
    await at_prefill.close()
    for name, first, outcome in (("there", 9000, "pulled"), ("not there", 9500, "refused")):
        await router.submit(
            name, [*range(first, first + 170)], sampling=ANSWER, prefix=(prefill, 10)
        )
        ended = await router.ended(name, 60.0)
        assert not ended.HasField("error"), ended
        assert ended.times.cached_tokens == (160 if outcome == "pulled" else 0)
        assert (await outcomes(router.worker))[outcome] == 1
    tokens = router.tokens["there"][0]
    assert not await doubtful(vllm_of(router.worker), prompt, tokens)


async def check_cancels(router: MiniRouter, prefill: WorkerProcess) -> None:
    """Cancel 100 requests in any phase. They have seeds, and their prompts share steps."""
    random = Random(3)
    sampling = {"max_tokens": 100, "temperature": 1.0, "seed": 7}

    async def one(number: int) -> None:
        name = f"cancelled {number}"
        prompt = list(range(number * 100, number * 100 + random.randint(20, 300)))
        await router.submit(name, prompt, prefill, sampling=sampling)
        await asyncio.sleep(random.uniform(0, 0.5))
        await router.send(cancel={"request_id": name, "attempt": 1})
        await router.ended(name, 60.0)

    for begin in range(0, 100, 10):
        await asyncio.gather(*(one(begin + number) for number in range(10)))


async def check_rest(socket: str) -> None:
    """Check that no block and no page stays in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    async with asyncio.timeout(90):
        while pages_in_use(socket):
            await asyncio.sleep(0.2)
        for name in names:
            while await asyncio.to_thread(vllm_metric, socket, name):
                await asyncio.sleep(0.2)
