"""Properties of a vLLM that are read before its first request, and the errors about them."""

import itertools
import json
from dataclasses import replace

import pytest

from baton.engine.process.step_rates import StepRates
from baton.engine.remote.attached import UnfitServerError
from baton.engine.remote.http import HttpOrigin
from baton.engine.vllm.attached import ModelCard, VllmServers, _served
from baton.engine.vllm.metrics_page import past_step, server_load
from baton.types.errors import UnavailableError
from benchmarks.emulated_vllm import GENERATE, EmulatedServer, Emulation

LIKE = Emulation(model="org/smol", root="/models/smol")


async def examined(emulation: Emulation, key: str = "", **more: object):  # type: ignore[no-untyped-def]
    server = EmulatedServer(emulation)
    url = await server.start()
    options = {"names": ["smol"], "artifact": None, **more}
    try:
        return await VllmServers(**options).examine(HttpOrigin.of_url(url, key))  # type: ignore[arg-type]
    finally:
        await server.stop()


async def test_the_properties_are_read() -> None:
    facts = await examined(replace(LIKE, ranks=2, key="k"), "k")
    assert (facts.engine, facts.model, facts.root) == ("vllm/0.32.0", "org/smol", "/models/smol")
    assert (facts.block_tokens, facts.blocks, facts.ranks) == (32, 2048, 2)
    assert facts.max_context_tokens == 8192


def test_a_server_with_several_names_has_one_of_them_in_any_order() -> None:
    """Another order looked like another server in its place."""
    cards = [ModelCard(name, "/models/smol") for name in ("org/smol", "smol", "alias")]
    origin = HttpOrigin.of_url("http://gpu-1:8000")
    found = {_served(origin, order, ["smol"]).id for order in itertools.permutations(cards)}
    assert len(found) == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"missing": frozenset(["--enable-scale-out"])}, "add `--enable-scale-out`"),
        (
            {"missing": frozenset(["--enable-prompt-tokens-details"])},
            "add `--enable-prompt-tokens-details`",
        ),
        ({"missing": frozenset(["/version"])}, "is no vLLM server .*`engine: llama-server`"),
        ({"block_tokens": 24}, "add `--block-size`"),
        ({"key": "k"}, "`key_file`.*`--api-key`"),
        ({"block_tokens": 0}, "odd properties: .*block_tokens=0"),
        ({"block_tokens": 10**10}, "reports block_size="),
        ({"blocks": 9 * 10**9}, "odd properties"),
        ({"max_model_len": -1}, "odd properties"),
        ({"max_model_len": 1 << 70}, "odd properties"),
        ({"root": "/models/a\nforged line/smol"}, "odd properties"),
        ({"model": "other", "root": "other"}, "--served-model-name smol"),
    ],
)
async def test_what_a_server_lacks_is_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(UnfitServerError, match=named):
        await examined(replace(LIKE, **changes))  # type: ignore[arg-type]


async def test_adapters_need_a_server_that_loads_them() -> None:
    with pytest.raises(UnfitServerError, match="--enable-lora"):
        await examined(LIKE, max_adapters=1)


async def test_a_server_without_a_prefix_cache_has_no_blocks() -> None:
    facts = await examined(replace(LIKE, missing=frozenset(["--no-enable-prefix-caching"])))
    assert facts.blocks == 0


async def test_an_unhealthy_server_is_not_unfit() -> None:
    with pytest.raises(UnavailableError, match="503"):
        await examined(replace(LIKE, fault="dead"))


def page_of(*ranks: tuple[int, int, float]) -> str:
    """Return vLLM's metrics of ranks with so many prompts, computed tokens and seconds."""
    lines = ["# TYPE vllm:request_prefill_time_seconds histogram"]
    for rank, (prompts, tokens, seconds) in enumerate(ranks):
        of = f'{{engine="{rank}",model_name="smol"}}'
        lines += [
            f'vllm:request_prefill_time_seconds_bucket{{engine="{rank}",le="0.3"}} {prompts}.0',
            f"vllm:request_prefill_time_seconds_count{of} {prompts}.0",
            f"vllm:request_prefill_time_seconds_sum{of} {seconds}",
            f"vllm:request_prefill_kv_computed_tokens_count{of} {prompts}.0",
            f"vllm:request_prefill_kv_computed_tokens_sum{of} {tokens}.0",
        ]
    return "\n".join(lines) + "\n"


def test_the_speed_of_past_prompts_is_that_of_their_sums() -> None:
    rates = StepRates()
    rates.add(past_step(page_of((6, 6000, 1.5), (2, 2000, 0.5))))
    assert rates.prefill_tokens_per_s == pytest.approx(4000)
    assert rates.prompt_fit.token_s == pytest.approx(1 / 4000)


@pytest.mark.parametrize(
    "page",
    [
        "",
        page_of((0, 0, 0.0)),
        page_of((3, 3000, 1.0)),
        page_of((90, 9000, 9.0)),
        page_of((9, 9000, 0.0)),
        *(page_of((9, 9000, float(odd))) for odd in ("nan", "inf", "-1")),
        page_of((9, 9000, 1.0)).replace("9000.0", "many"),
    ],
)
def test_few_short_or_senseless_prompts_show_no_speed(page: str) -> None:
    assert past_step(page) is None


def test_the_load_is_the_sum_over_ranks() -> None:
    gauges = ["num_requests_running", "num_requests_waiting", "generation_tokens_total"]
    lines = [f'vllm:{name}{{engine="{rank}"}} {rank + 2}.0' for name in gauges for rank in (0, 1)]
    page = "\n".join(lines) + "\n" + page_of((6, 6000, 1.5))
    load = server_load(page)
    assert (load.running, load.waiting, load.computed_tokens) == (5, 5, 1000)
    assert load.prompt_tokens == 1000  # at least what was computed
    odd = server_load(page.replace("2.0", "-7").replace(" 3.0", " 1e300"))
    assert (odd.running, odd.waiting) == (10_000_000, 10_000_000)
    with pytest.raises(UnavailableError, match="odd values"):
        server_load(page.replace("2.0", "nan"))


async def test_the_speed_is_read_from_a_server_with_a_past() -> None:
    server = EmulatedServer(LIKE)
    url = await server.start()
    try:
        origin = HttpOrigin.of_url(url, "")
        kind = VllmServers(("smol",), artifact=None)  # type: ignore[arg-type]
        assert await kind.past_step(origin) is None
        body = {"sampling_params": {"max_tokens": 1}, "model": LIKE.model}
        for first in range(4):
            tokens = list(range(1000 * first, 1000 * first + 400))
            raw = json.dumps({"token_ids": tokens, **body}).encode()
            await origin.fetch("POST", GENERATE, 5, raw)
        step = await kind.past_step(origin)
        assert step is not None and step.prompt_tokens == 400
        assert step.prompt_tokens / step.duration_ns * 1e9 == pytest.approx(20_000)
    finally:
        await server.stop()
