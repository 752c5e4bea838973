"""Workers with the emulated engine of a fleet: real shells, one process each, and no mixture."""

import time
from pathlib import Path

import psutil

from baton.engine.emulated_timing import EPYC_135M
from baton.engine.settings import EmulatedModel
from tests.workers.harness import routed, workers

PROMPT = list(range(300, 500))
MODEL = EmulatedModel(
    timing="epyc-135m", vocab_size=49152, eos_token_ids=(2,), max_context_tokens=8192
)


async def test_one_process_a_worker_hands_over_and_keeps_the_time_of_its_model():
    async with workers("prefill-0", "decode-0", emulated=MODEL) as (prefill, decode):
        for worker in (prefill, decode):
            assert worker.record.pid == worker.process.pid
            assert not psutil.Process(worker.process.pid).children()
            mapped = psutil.Process(worker.record.pid).memory_maps()
            assert not [file.path for file in mapped if "torch" in Path(file.path).name]
        async with routed(decode) as router:
            long = {"max_tokens": 40, "ignore_eos": True}
            began_s = time.monotonic()
            await router.submit("a", PROMPT, prefill, sampling=long)
            end = await router.ended("a")
            took_s = time.monotonic() - began_s
            assert not end.HasField("error"), end.error.message
            assert router.routes["a"].mode == "disaggregated"
            assert end.times.transfer_bytes == len(PROMPT) * 128
            await router.submit("b", PROMPT, None, sampling=long)
            await router.ended("b")
            assert router.tokens["a"] == router.tokens["b"]
            await router.baseline()
    least_s = EPYC_135M.prompt_s(200) + 40 * EPYC_135M.step_s
    assert took_s > least_s, "steps may not be shorter than the model says"


async def test_a_decode_worker_reports_the_line_of_its_steps_and_the_tokens_in_them():
    async with workers("prefill-0", "decode-0", emulated=MODEL) as (prefill, decode):
        async with routed(decode) as router:
            await router.submit("a", PROMPT, prefill, sampling={"max_tokens": 200})
            await router.until(lambda: router.status.answering_context > len(PROMPT))
            status = router.status
            assert len(PROMPT) < status.answering_context <= len(PROMPT) + 200
            line_s = status.decode_base_s + status.decode_row_s
            predicted_s = line_s + status.decode_context_s * status.answering_context
            true_s = EPYC_135M.step_s + EPYC_135M.answer_s + EPYC_135M.answer_context_s * 300
            assert 0.9 * true_s < predicted_s < 4 * true_s, "a busy machine makes it longer"
            await router.ended("a")
            await router.baseline()


async def test_a_prefix_is_pulled_from_another_worker():
    async with workers("decode-0", "decode-1", emulated=MODEL) as (a, b):
        async with routed(a) as router:
            await router.submit("first", PROMPT, sampling={"max_tokens": 4})
            await router.ended("first")
        async with routed(b) as router:
            await router.submit("pulled", PROMPT, prefix=(a, 12), sampling={"max_tokens": 4})
            end = await router.ended("pulled")
            assert not end.HasField("error"), end.error.message
            assert router.routes["pulled"].cached_tokens == 12 * 16


async def test_emulated_and_real_workers_refuse_each_other_by_name():
    async with workers("prefill-0", "decode-0", decode_emulated=MODEL) as (prefill, decode):
        async with routed(decode) as router:
            await router.submit("a", PROMPT, prefill, sampling={"max_tokens": 4})
            await router.until(lambda: router.asks)
    assert (
        "the engines differ: real here and emulated (epyc-135m) there"
        in router.asks[0].reason.message
    )


async def test_what_it_cannot_do_ends_with_the_reason():
    async with workers("decode-0", emulated=MODEL) as (decode,), routed(decode) as router:
        await router.submit("a", PROMPT, None, sampling={"max_tokens": 4, "logprobs": 2})
        end = await router.ended("a")
        assert end.error.code == "invalid_request"
        assert end.error.message == "logprobs are not served by an emulated engine"
