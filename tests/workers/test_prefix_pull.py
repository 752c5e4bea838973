"""Leading blocks come from another worker's cache instead of being computed. Real processes.

``a`` holds the blocks, ``b`` is to compute; "direct" b owns the request, "behind" decode owns it.
"""

import signal

import httpx
import msgspec
import pytest

from tests.workers.harness import MiniRouter, WorkerProcess, routed, workers

PROMPT = list(range(3, 203))  # 12 full blocks
BLOCKS = 12
BLOCK_TOKENS = 16


def slow(value: str):
    return pytest.param(value, marks=pytest.mark.slow)


async def page_of(worker: WorkerProcess) -> str:
    """Its metrics."""
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://{worker.record.metrics_address}/metrics")).text


async def outcomes(worker: WorkerProcess) -> dict[str, int]:
    """Pulls by outcome, those that there were."""
    page = await page_of(worker)
    name = "baton_prefix_pulls_total{"
    lines = [line for line in page.splitlines() if line.startswith(name)]
    counted = {line.split('outcome="')[1].split('"')[0]: line.rsplit(" ", 1)[1] for line in lines}
    return {outcome: int(float(count)) for outcome, count in counted.items() if float(count)}


async def ask(router: MiniRouter, name: str, *where: object, **fields: object) -> list[int]:
    await router.submit(name, PROMPT, *where, **fields)
    end = await router.ended(name)
    assert not end.HasField("error"), end.error.message
    return router.tokens[name][0]


@pytest.mark.parametrize("way", [slow("direct"), "behind"])
async def test_what_another_worker_holds_is_not_computed(way):
    async with workers("prefill-0", "prefill-1", "decode-0") as (a, b, decode):
        async with routed(a) as router:
            golden = await ask(router, "golden")
        owner, source = (b, None) if way == "direct" else (decode, b)
        async with routed(owner) as router:
            assert await ask(router, "pulled", source, prefix=(a, BLOCKS)) == golden
            assert router.routes["pulled"].cached_tokens == BLOCKS * BLOCK_TOKENS
            assert await outcomes(b) == {"pulled": 1}
            # There it stays, and a part of it is enough to ask nobody for more.
            assert await ask(router, "again", source) == golden
            assert router.routes["again"].cached_tokens == BLOCKS * BLOCK_TOKENS
            await router.baseline()
        for idle in (a, b):
            async with routed(idle, "watcher") as router:
                await router.baseline()


async def test_only_what_is_lacking_travels():
    async with workers("decode-0", "decode-1") as (a, b):
        async with routed(a) as router:
            golden = await ask(router, "golden")
        async with routed(b) as router:
            await router.submit("half", PROMPT[:100])  # 6 full blocks
            await router.ended("half")
            assert await ask(router, "pulled", prefix=(a, BLOCKS)) == golden
            assert router.routes["pulled"].cached_tokens == BLOCKS * BLOCK_TOKENS
        assert 'baton_prefix_tokens_total{source="peer"} 96.0' in await page_of(b)


async def test_an_answer_goes_on_with_the_blocks_of_where_it_began():
    sampling = {"max_tokens": 60, "seed": 4, "temperature": 1.0}
    async with workers("decode-0", "decode-1") as (a, b):
        async with routed(a) as router:
            golden = await ask(router, "golden", sampling=sampling)
        async with routed(b) as router:
            whole = (len(PROMPT) + 40) // BLOCK_TOKENS  # of the prompt and of what was emitted
            fields = {"sampling": sampling, "emitted": [golden[:41]], "prefix": (a, whole)}
            assert await ask(router, "moved", **fields) == golden
            assert await outcomes(b) == {"pulled": 1}
            assert router.ends["moved"].times.cached_tokens == len(PROMPT)
            await router.baseline()


@pytest.mark.parametrize("why", [slow("lacks"), "killed", slow("another life")])
async def test_who_has_nothing_is_not_waited_for(why):
    async with workers("prefill-0", "prefill-1", "decode-0") as (a, b, decode):
        async with routed(b) as router:
            golden = await ask(router, "golden", probe=True)  # leaves nothing in the cache
        async with routed(decode) as router:
            if why == "killed":
                a.signal_all(signal.SIGKILL)
                await a.process.wait()
            elif why == "another life":
                a.record = msgspec.structs.replace(a.record, incarnation=bytes(16))
            assert await ask(router, "computed", b, prefix=(a, BLOCKS)) == golden
            assert await outcomes(b) == {"refused": 1}
            assert router.routes["computed"].cached_tokens == 0
            await router.baseline()


@pytest.mark.slow
async def test_who_is_frozen_is_waited_for_a_moment_only_and_cancels_are_heard():
    async with workers("prefill-0", "prefill-1", "decode-0") as (a, b, decode):
        async with routed(a) as router:
            golden = await ask(router, "golden")
        async with routed(decode) as router, routed(b, "owner") as owner:
            a.signal_all(signal.SIGSTOP)
            await router.submit("behind", PROMPT, b, prefix=(a, BLOCKS))
            await owner.submit("direct", PROMPT, prefix=(a, BLOCKS))
            for name, asked in (("behind", router), ("direct", owner)):
                await asked.send(cancel={"request_id": name, "attempt": 1})
                assert (await asked.ended(name)).error.code == "cancelled"
            assert await ask(router, "computed", b, prefix=(a, BLOCKS)) == golden
            counted = await outcomes(b)
            assert 2 <= sum(counted.values()) <= 3  # a cancel may be there before the pull begins
            assert counted.keys() <= {"abandoned", "late", "refused"}
            await router.baseline()
            await owner.baseline()


@pytest.mark.parametrize("damage", ["flip:1", slow("torn:1"), slow("incarnation:1")])
async def test_damage_is_never_cached(damage):
    """Every frame is damaged, by whatever transport: nothing of them is used."""
    async with workers("decode-0", "prefill-1", decode_damage=damage) as (a, b):
        async with routed(a) as router:
            golden = await ask(router, "golden")
        async with routed(b) as router:
            assert await ask(router, "computed", prefix=(a, BLOCKS)) == golden
            assert router.routes["computed"].cached_tokens == 0
            assert (await outcomes(b)).keys() <= {"refused", "late"}
            assert "baton_chunks_refused_total{" in await page_of(b)
            await router.baseline()


@pytest.mark.slow
async def test_a_pool_that_is_full_computes_in_its_turn():
    async with workers("decode-0", "decode-1", kv_blocks=16) as (a, b):
        async with routed(a) as router:
            golden = await ask(router, "golden")
        async with routed(b) as router:
            await router.submit("running", list(range(500, 600)), sampling={"max_tokens": 100})
            await router.until(lambda: router.tokens["running"])
            assert await ask(router, "waits", prefix=(a, BLOCKS)) == golden
            assert not (await router.ended("running")).HasField("error")
            await router.baseline()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"prefix_blocks": 0},
        {"pooling": "mean"},
        {"sampling": {"prompt_logprobs": 1}},
        {"probe": True},
    ],
)
async def test_requests_that_cannot_use_it_ask_nobody(fields):
    async with workers("decode-0", "decode-1") as (a, b), routed(b) as router:
        blocks = fields.pop("prefix_blocks", BLOCKS)
        await router.submit("own", PROMPT, prefix=(a, blocks), **fields)
        assert not (await router.ended("own")).HasField("error")
        assert await outcomes(b) == {}
