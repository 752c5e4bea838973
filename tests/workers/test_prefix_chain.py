"""One prompt's leading blocks from several workers, one after the other. Real processes.

``near`` holds half of them, ``far`` all, behind a link of its own; ``b`` is to compute.
"""

import signal

import msgspec
import pytest

from tests.workers.harness import WorkerProcess, routed, workers
from tests.workers.slow_link import SlowLink, behind_slow_link
from tests.workers.test_prefix_pull import BLOCK_TOKENS, BLOCKS, PROMPT, ask, outcomes, page_of

HALF = BLOCKS // 2
FAST, SLOW = 50e6, 1e6  # bytes/s
NAMES = ("decode-0", "prefill-1", "prefill-2")


def slow(value: str):
    return pytest.param(value, marks=pytest.mark.slow)


async def fill(near: WorkerProcess, far: WorkerProcess) -> list[int]:
    """What they hold is computed; returns the answer."""
    async with routed(far) as router:
        golden = await ask(router, "golden")
    async with routed(near) as router:
        await router.submit("half", PROMPT[: HALF * BLOCK_TOKENS + 4])
        await router.ended("half")
    return golden


def lose(worker: WorkerProcess, link: SlowLink) -> None:
    """Kill it, and lose what the kernel and the link have of its frame."""
    worker.signal_all(signal.SIGKILL)
    link.cut()


@pytest.mark.parametrize("way", ["direct", slow("behind")])
async def test_each_gives_what_those_before_it_lack(way):
    names = (*NAMES, "decode-1") if way == "behind" else NAMES
    async with workers(*names, transports=("grpc",)) as (near, b, far, *decodes):
        golden = await fill(near, far)
        owner, source = (decodes[0], b) if decodes else (b, None)
        async with behind_slow_link(far, FAST) as link, routed(owner) as router:
            asked = {"prefix": (near, HALF), "prefix_then": [(far, BLOCKS)]}
            assert await ask(router, "chain", source, **asked) == golden
            assert router.routes["chain"].cached_tokens == BLOCKS * BLOCK_TOKENS
            assert await outcomes(b) == {"pulled": 2}
            tokens = f'baton_prefix_tokens_total{{source="peer"}} {BLOCKS * BLOCK_TOKENS}.0'
            assert tokens in await page_of(b), "no block came twice"
            assert link.passed_bytes > 0, "the second came over the link"
            await router.baseline()
        for idle in (near, far):
            async with routed(idle, "watcher") as router:
                await router.baseline()


@pytest.mark.parametrize("why", ["killed", slow("frozen"), slow("damage"), slow("lacks")])
async def test_without_the_first_the_second_gives_all(why):
    damage = {"decode_damage": "flip:1"} if why == "damage" else {}
    async with workers(*NAMES, transports=("grpc",), **damage) as (near, b, far):
        golden = await fill(near, far)
        async with behind_slow_link(near, SLOW / 20) as link, routed(b) as router:
            if why == "killed":  # with a part of its frame on the way
                link.after(8 * 1024, lambda: lose(near, link))
            elif why == "frozen":
                near.signal_all(signal.SIGSTOP)
            blocks = BLOCKS if why == "lacks" else HALF
            asked = {"prefix": (near, blocks), "prefix_then": [(far, BLOCKS)]}
            assert await ask(router, "chain", **asked) == golden
            assert router.routes["chain"].cached_tokens == BLOCKS * BLOCK_TOKENS
            counted = await outcomes(b)
            assert counted.pop("pulled") == 1
            assert list(counted.values()) == [1] and counted.keys() <= {"refused", "late"}
            await router.baseline()


@pytest.mark.slow
@pytest.mark.parametrize("why", ["killed", "damage", "another life"])
async def test_without_the_second_what_the_first_gave_is_kept(why):
    damage = {"decode_damage": "flip:1"} if why == "damage" else {}
    names = ("prefill-0", "prefill-1", "decode-2")
    async with workers(*names, transports=("grpc",), **damage) as (near, b, far):
        golden = await fill(near, far)
        async with behind_slow_link(far, SLOW / 20) as link, routed(b) as router:
            if why == "killed":
                link.after(8 * 1024, lambda: lose(far, link))
            elif why == "another life":
                far.record = msgspec.structs.replace(far.record, incarnation=bytes(16))
            asked = {"prefix": (near, HALF), "prefix_then": [(far, BLOCKS)]}
            assert await ask(router, "chain", **asked) == golden
            assert router.routes["chain"].cached_tokens == HALF * BLOCK_TOKENS
            counted = await outcomes(b)
            assert counted.pop("pulled") == 1 and sum(counted.values()) == 1
            await router.baseline()


@pytest.mark.slow
async def test_a_cancel_ends_the_whole_chain():
    async with workers(*NAMES, transports=("grpc",)) as (near, b, far):
        await fill(near, far)
        async with behind_slow_link(near, SLOW / 50), routed(b) as router:
            await router.submit("gone", PROMPT, prefix=(near, HALF), prefix_then=[(far, BLOCKS)])
            await router.send(cancel={"request_id": "gone", "attempt": 1})
            assert (await router.ended("gone")).error.code == "cancelled"
            assert await outcomes(b) in ({}, {"abandoned": 1})
            await router.baseline()
