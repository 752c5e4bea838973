"""Workers with adapters: loaded on demand, mixed, given up in turn, and never lost on the way."""

import asyncio
import re
import signal

import httpx
from batonpb import common_pb2
from batonpb import decode_pb2 as pb

from tests.workers.harness import MiniRouter, WorkerProcess, routed, workers

PROMPT = list(range(3, 203))


def adapter(number: int, path: object) -> common_pb2.Adapter:
    return common_pb2.Adapter(name=f"a{number}", digest=bytes([number]) * 16, path=str(path))


def adapters_in_use(worker: WorkerProcess) -> str:
    page = httpx.get(f"http://{worker.record.metrics_address}/metrics").text
    [labels] = re.findall(r"^vllm:lora_requests_info\{(.*)\}", page, re.MULTILINE)
    return labels


async def ask(
    router: MiniRouter, name: str, lora=None, prefill=None, prompt=PROMPT, **sampling
) -> list[int]:
    seed = lora.digest if lora else b"s" * 16  # as the router does: names differ by adapter
    await router.submit(name, prompt, prefill, lora, sampling=sampling, hash_seed=seed)
    end = await router.ended(name)
    assert not end.HasField("error"), end.error.message
    return router.tokens[name][0]


async def test_each_adapter_gives_its_own_tokens_on_every_path(tmp_path):
    loras = [None, adapter(1, tmp_path), adapter(2, tmp_path)]
    async with workers("prefill-0", "decode-0") as (prefill, decode), routed(decode) as router:
        for number, lora in enumerate(loras):
            colocated = await ask(router, f"colocated {number}", lora)
            disaggregated = await ask(router, f"disaggregated {number}", lora, prefill)
            again = await ask(router, f"hit {number}", lora, prefill)
            assert router.routes[f"disaggregated {number}"].mode == "disaggregated"
            assert router.routes[f"hit {number}"].cached_tokens > 0
            assert colocated == disaggregated == again
        asked = [ask(router, f"mixed {i}", loras[i % 3], [None, prefill][i % 2]) for i in range(12)]
        mixed = await asyncio.gather(*asked)
        for number, tokens in enumerate(mixed):
            assert tokens == router.tokens[f"colocated {number % 3}"][0]
        assert len({tuple(tokens) for tokens in mixed}) == 3
        await router.baseline()


async def test_more_adapters_than_places_are_served_in_turn(tmp_path):
    async with workers("decode-0", max_adapters=2) as (decode,), routed(decode) as router:
        alone = [await ask(router, f"alone {i}", adapter(i, tmp_path)) for i in range(1, 6)]
        asked = [ask(router, f"r{i}", adapter(i % 5 + 1, tmp_path)) for i in range(15)]
        together = await asyncio.gather(*asked)
        assert together == [alone[i % 5] for i in range(15)]
        await router.baseline()
        reported = list(router.status.adapters)
        assert len(reported) == 2
        assert set(reported) < {adapter(i, tmp_path).digest for i in range(1, 6)}
        page = httpx.get(f"http://{decode.record.metrics_address}/metrics").text
        assert "baton_adapters_held 2.0" in page
        assert 'baton_adapter_evictions_total{adapter="a1"}' in page
        assert 'baton_adapter_loads_total{adapter="a3",outcome="loaded"}' in page


async def test_loads_under_streams_change_no_running_answer(tmp_path):
    """As in vLLM #47724, where a load moved running requests to another adapter."""
    loras = [None, adapter(1, tmp_path), adapter(2, tmp_path)]
    long = {"max_tokens": 150, "prompt": PROMPT[:24]}
    settings = {"max_adapters": 3, "emulated_token_s": 0.002}
    async with workers("prefill-0", "decode-0", **settings) as (prefill, decode):
        async with routed(decode) as router:
            alone = [await ask(router, f"alone {i}", one, **long) for i, one in enumerate(loras)]
            assert len({tuple(tokens) for tokens in alone}) == 3
            running = [
                asyncio.create_task(
                    ask(router, f"r{i}", loras[i % 3], [None, prefill][i % 2], **long)
                )
                for i in range(6)
            ]
            await router.until(lambda: all(router.tokens.get(f"r{i}", {}).get(0) for i in range(6)))
            few = {"max_tokens": 2, "prompt": PROMPT[:4]}
            for i in range(3, 8):
                await ask(router, f"load {i}", adapter(i, tmp_path), **few)
            assert not any(task.done() for task in running), "loaded while they ran"
            assert await asyncio.gather(*running) == [alone[i % 3] for i in range(6)]
            await router.baseline()


async def test_one_that_cannot_be_loaded_ends_its_request_alone(tmp_path):
    bad = adapter(9, tmp_path / "gone")
    async with workers("prefill-0", "decode-0") as (prefill, decode), routed(decode) as router:
        for number, peer in enumerate((None, prefill)):
            await router.submit(f"bad {number}", PROMPT, peer, adapter=bad)
            good = await ask(router, f"good {number}", adapter(1, tmp_path), peer)
            assert len(good) == 8
            end = await router.ended(f"bad {number}")
            assert end.error.code == "adapter_load_failed"
            assert "is not a directory" in end.error.message
            assert not end.error.retryable
        await router.baseline()


async def test_cancelled_while_it_waits_for_its_adapter(tmp_path):
    async with workers("decode-0", max_adapters=1, emulated_token_s=0.02) as (decode,):
        async with routed(decode) as router:
            long = {"max_tokens": 60}
            await router.submit("long", PROMPT[:8], adapter=adapter(1, tmp_path), sampling=long)
            await router.submit("waits", PROMPT, adapter=adapter(2, tmp_path))
            await router.until(lambda: len(router.tokens["long"].get(0, [])) > 2)
            assert adapters_in_use(decode) == (
                'engine="0",max_lora="1",model_name="emulated",running_lora_adapters="a1",'
                'waiting_lora_adapters="a2"'
            )
            await router.send(cancel=pb.Cancel(request_id="waits", attempt=1))
            end = await router.ended("waits", 1.0)
            assert end.error.code == "cancelled"
            assert "long" not in router.ends
            await router.ended("long")
            await router.baseline()
            assert adapters_in_use(decode).endswith(
                'running_lora_adapters="",waiting_lora_adapters=""'
            )


async def test_where_adapters_are_off_they_are_refused(tmp_path):
    async with workers("decode-0", max_adapters=0) as (decode,), routed(decode) as router:
        await router.submit("a", PROMPT, adapter=adapter(1, tmp_path))
        end = await router.ended("a")
        assert "serves no adapters" in end.error.message


async def test_a_new_life_loads_again_on_demand(tmp_path):
    async with workers("decode-0") as (decode,), routed(decode) as router:
        want = await ask(router, "first life", adapter(1, tmp_path))
        decode.signal_all(signal.SIGKILL)
    async with workers("decode-0", epoch=2) as (decode,), routed(decode) as router:
        assert await ask(router, "second life", adapter(1, tmp_path)) == want
