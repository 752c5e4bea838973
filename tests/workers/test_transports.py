"""Hand-offs between real workers by each transport, and what happens when one does not work."""

import re
import signal

import httpx
import pytest

from baton.registry.types import WorkerRecord
from kvtransfer.shared_memory import SharedMemoryTransport
from tests.workers.harness import MiniRouter, WorkerProcess, routed, worker_here, workers

PROMPT = list(range(3, 203))
PROMPT_BYTES = len(PROMPT) * 4 * 2 * 2 * 8 * 2


async def counted(record: WorkerRecord, metric: str) -> dict[str, float]:
    """A counter of a worker, by its labels but the model's; what never happened is left out."""
    async with httpx.AsyncClient() as client:
        page = await client.get(f"http://{record.metrics_address}/metrics")
    found = re.findall(rf"^{metric}_total(?:\{{(.*)\}})? (\S+)$", page.text, re.MULTILINE)
    return {
        re.sub(r'model\w*="[^"]*",?', "", labels).strip(","): float(count)
        for labels, count in found
        if float(count)
    }


async def same_tokens(router: MiniRouter, name: str, prompt: list[int]) -> None:
    """What came of a hand-off is what the decode worker says by itself."""
    end = await router.ended(name)
    assert not end.HasField("error"), end.error.message
    await router.submit(f"golden {name}", prompt)
    await router.ended(f"golden {name}")
    assert router.tokens[name] == router.tokens[f"golden {name}"]


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "grpc"])
async def test_the_tokens_do_not_show_the_transport(transport: str) -> None:
    async with workers("prefill-0", "decode-0", prefill_transports=(transport,)) as ends:
        prefill, decode = ends
        async with routed(decode) as router, routed(prefill) as other:
            await router.submit("a", PROMPT, prefill)
            await same_tokens(router, "a", PROMPT)
            pulled = await counted(decode.record, "baton_pulled_bytes")
            assert pulled == {f'encoding="plain",transport="{transport}"': PROMPT_BYTES}
            assert await counted(decode.record, "baton_transfer_fallbacks") == {}
            await router.baseline()
            await other.baseline()


@pytest.mark.parametrize("damage", ["flip", pytest.param("swap", marks=pytest.mark.slow)])
async def test_damage_on_the_bytes_of_grpc_is_repaired(damage: str) -> None:
    """The same on lent pages: ``test_damage_now_and_then_is_repaired``, whose workers have all."""
    fault = {"prefill_damage": f"{damage}:2", "prefill_transports": ("grpc",)}
    async with workers("prefill-0", "decode-0", **fault) as (prefill, decode):
        async with routed(decode) as router:
            for number in range(3):
                await router.submit(f"a{number}", [number, *PROMPT], prefill)
                await same_tokens(router, f"a{number}", [number, *PROMPT])
            assert sum((await counted(decode.record, "baton_chunks_repaired")).values()) > 0
            await router.baseline()


async def test_a_transport_that_fails_is_replaced_counted_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within the pull: the machine and the router hear nothing of it."""

    async def broken(*_: object) -> None:
        raise OSError("by design")

    async with workers("prefill-0") as (prefill,), worker_here("decode-0") as decode:
        async with routed(decode) as router:
            monkeypatch.setattr(SharedMemoryTransport, "_attach", broken)
            for number in range(2):
                await router.submit(f"a{number}", [number, *PROMPT], prefill)
                await same_tokens(router, f"a{number}", [number, *PROMPT])
            failed = 'reason="broke",transport="shared_memory"'
            fallbacks = await counted(decode.record, "baton_transfer_fallbacks")
            assert list(fallbacks) == [failed]
            pulled = await counted(decode.record, "baton_pulled_bytes")
            assert set(pulled) == {  # gRPC finishes the first, the next best has the second
                'encoding="plain",transport="grpc"',
                'encoding="plain",transport="tcp"',
            }
            assert not router.asks

            monkeypatch.undo()
            for way in decode._parts.decode._parts.peers.edges.values():
                way.begin_life()  # as if the pause were over
            await router.submit("b", [9, *PROMPT], prefill)
            await same_tokens(router, "b", [9, *PROMPT])
            assert len(await counted(decode.record, "baton_pulled_bytes")) == 3
            assert await counted(decode.record, "baton_transfer_fallbacks") == fallbacks


@pytest.mark.parametrize(
    "fate", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
async def test_a_reader_that_dies_or_freezes_while_it_reads(fate: int) -> None:
    """The sender's blocks come free; what the frozen one goes on to read is never shown."""
    reader = await WorkerProcess.start("decode-0", "tests.workers.slow_reader")
    try:
        async with workers("prefill-0", check_every_step=True) as (prefill,):
            async with routed(reader) as router, routed(prefill) as other:
                await router.submit("a", PROMPT * 4, prefill)
                await other.until(lambda: other.status.kv_blocks.leased > 40)
                await other.until(lambda: other.status.kv_blocks.leased > 40)
                reader.signal_all(fate)
                await other.baseline(10.0)
                overdue = sum((await counted(prefill.record, "baton_loans_overdue")).values())
                assert bool(overdue) == (fate == signal.SIGSTOP)
                await other.submit("b", [5] * 700)  # somebody else's KV, in the same pages
                await other.ended("b")
                if fate == signal.SIGSTOP:
                    reader.signal_all(signal.SIGCONT)
                    await router.until(lambda: "a" in router.ends or router.asks or router.lost)
                    answered = router.tokens["a"].get(0, [])
                    await other.submit("golden", PROMPT * 4)
                    await other.ended("golden")
                    assert answered == other.tokens["golden"][0][: len(answered)]
    finally:
        await reader.stop()
