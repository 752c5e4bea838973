"""What fits is said before anything starts, and is what is then measured."""

import asyncio
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from baton.config.fleet_file import DEFAULT_MODEL, FleetConfig, PoolsConfig
from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.core.speculative.proposers import SpeculationSettings
from baton.engine.cpu.native import library
from baton.engine.loading.memory import EngineShape, automatic_blocks, footprint, pool_geometry
from baton.engine.process import messages
from baton.engine.process.client import EngineClient
from baton.engine.process.handle import EngineHandle
from baton.engine.settings import EngineSettings
from baton.model.artifact import ModelError, resolve_model
from baton.model.model_config import ModelConfig
from baton.types import events as ev
from baton.types.params import SamplingParams
from baton.wire.tokens import pack_tokens
from fleet.cli.capacity_options import CapacityOptions
from fleet.cli.main import app
from fleet.cli.memory_estimate import Capacity, plan_capacity
from fleet.local.checks.preflight import notes
from fleet.pools.resources import engine_settings
from tests.engine.cpu.integer_kernel import needs_integer_products

GIB = 1 << 30
PLAIN = {"dtype": "bf16", "weights": "none", "kv": "none", "numerics": "exact"}


def planned(
    config: ModelConfig, *, free_bytes: int, draft: ModelConfig | None = None, **options: Any
) -> Capacity:
    return plan_capacity(config, CapacityOptions(**options), free_bytes, draft)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return resolve_model(DEFAULT_MODEL).config


def test_kv_grows_with_context_and_requests_and_shrinks_with_its_format(
    config: ModelConfig,
) -> None:
    def kv_bytes(context: int, concurrency: int, kv: str = "none") -> int:
        fields = {**PLAIN, "kv": kv}
        return planned(
            config,
            context=context,
            concurrency=concurrency,
            free_bytes=8 * GIB,
            **fields,
        ).kv_bytes

    assert kv_bytes(1000, 1) == 63 * 16 * 30 * 2 * 3 * 64 * 2  # whole blocks
    assert kv_bytes(2048, 4) == 8 * kv_bytes(1024, 1)
    assert kv_bytes(1024, 1, "int8") == kv_bytes(1024, 1, "fp8") == kv_bytes(1024, 1) * 68 // 128


def test_weights_are_counted_as_they_are_kept(config: ModelConfig) -> None:
    plain, int8, int4 = (
        footprint(EngineShape(config, quantisation=kind)).layers
        for kind in ("none", "int8", "int4")
    )
    assert 0.5 < int8 / plain < 0.52
    assert 0.31 < int4 / plain < 0.32  # 4 bits, and 1 for scale and offset
    assert (
        footprint(EngineShape(config, dtype="fp32")).weights
        > 1.99 * footprint(EngineShape(config)).weights
    )


def test_as_many_requests_fit_as_it_says(config: ModelConfig) -> None:
    found = planned(config, context=4096, concurrency=1, free_bytes=4 * GIB, **PLAIN)
    most = found.fitting_requests
    for concurrency, fits in ((most, True), (most + 2, False)):  # a batch needs workspace too
        asked = planned(
            config,
            context=4096,
            concurrency=concurrency,
            free_bytes=4 * GIB + 64 * (1 << 20) * fits,
            **PLAIN,
        )
        assert asked.fits is fits
    with pytest.raises(ModelError, match="--context 9000 exceeds the model's limit, 8192"):
        planned(config, context=9000, concurrency=1, free_bytes=GIB, **PLAIN)


def test_the_command_answers_in_words_in_json_and_in_its_exit_code() -> None:
    fits = CliRunner().invoke(app, ["capacity", "--context", "4096", "--memory", "4", "--json"])
    assert fits.exit_code == 0
    shown = json.loads(fits.output)
    assert shown["fits"] is True
    assert shown["total"] == shown["kv_bytes"] + shown["weights"] + sum(
        shown["need"][part] for part in ("process", "workspace")
    )
    many = ["capacity", "--concurrency", "64", "--memory", "4"]
    refused = CliRunner().invoke(app, many)
    assert refused.exit_code == 1
    assert "64 requests of 8192 tokens do not fit" in refused.output


def test_the_pool_takes_half_of_a_workers_share_of_what_is_free(config: ModelConfig) -> None:
    need = footprint(EngineShape(config))
    block = 368_640
    alone = automatic_blocks(need, block, 8 * GIB, 1, useful_blocks=1 << 20)
    assert math.isclose(alone * block, (8 * GIB - need.total - need.loading) / 2, rel_tol=0.01)
    pair = automatic_blocks(need, block, 8 * GIB, 2, useful_blocks=1 << 20)
    assert 2 * (pair * block + need.total) < 8 * GIB
    assert automatic_blocks(need, block, 8 * GIB, 1, useful_blocks=100) == 100
    assert automatic_blocks(need, block, 0, 1, useful_blocks=1 << 20) == 64


def test_auto_reaches_the_engine_and_a_number_stays_a_number(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kv_blocks(fleet: FleetConfig) -> int:
        return pool_geometry(engine_settings(fleet, "decode"), config).num_blocks

    monkeypatch.setattr("fleet.pools.resources.usable_cpus", lambda: 2)
    monkeypatch.setattr("baton.engine.loading.memory.free_memory_bytes", lambda: 6 * GIB)
    assert kv_blocks(FleetConfig(kv_blocks_per_worker=200)) == 200
    pair = kv_blocks(FleetConfig())
    many = kv_blocks(FleetConfig(pools=PoolsConfig(prefill=4, decode=4)))
    assert 64 < pair < 6 * GIB // 368_640 // 2
    assert many == pair  # the cores hold two; the others are elsewhere
    assert kv_blocks(FleetConfig(max_context_tokens=160)) == 320  # 32 requests of 10 blocks


def test_a_pool_that_holds_less_than_the_context_is_noted_with_auto_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.engine.loading.memory.free_memory_bytes", lambda: GIB)
    [text] = notes(FleetConfig(kv_blocks_per_worker="auto"))
    assert "= 8192 does not fit into kv_blocks_per_worker = auto = 64 (1024 tokens)" in text
    [text] = notes(FleetConfig(kv_blocks_per_worker=96, max_context_tokens=8192))
    assert "= 8192 does not fit into kv_blocks_per_worker = 96 (1536 tokens)" in text
    assert notes(FleetConfig(kv_blocks_per_worker=96, max_context_tokens=1536)) == []


def test_a_restarted_worker_takes_as_many_blocks_as_before_if_half_of_the_free_memory_holds_them(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks(free_bytes: int, before: int) -> int:
        monkeypatch.setattr("baton.engine.loading.memory.free_memory_bytes", lambda: free_bytes)
        settings = EngineSettings(
            model=DEFAULT_MODEL,
            kv_blocks=0,
            kv_blocks_before=before,
            workers_on_host=2,
            max_step_tokens=512,
        )
        return pool_geometry(settings, config).num_blocks

    first = blocks(8 * GIB, 0)
    others = footprint(EngineShape(config)).total + first * 368_640
    left = 8 * GIB - others
    assert blocks(left, 0) < first  # what the other worker holds was subtracted, and then halved
    assert blocks(left, first) == first
    assert blocks(3 * GIB, first) > 2 * blocks(3 * GIB, 0)
    assert blocks(3 * GIB, first) < first
    assert blocks(16 * GIB, first) > first  # the memory was short at the first start


def test_heads_that_cannot_hold_an_aligned_scale_are_refused_by_name(config: ModelConfig) -> None:
    odd = dataclasses.replace(config, head_dim=66)
    settings = EngineSettings(model=DEFAULT_MODEL, kv_dtype="int8")
    with pytest.raises(ModelError, match="int8: heads of 66 values"):
        pool_geometry(settings, odd)


def test_ranks_share_the_weights_and_a_draft_has_weights_and_a_pool_of_its_own(
    config: ModelConfig,
) -> None:
    def plan(**more: Any) -> Capacity:
        return planned(
            config,
            context=1024,
            concurrency=4,
            free_bytes=8 * GIB,
            **{**PLAIN, **more},
        )

    alone = plan()
    for ranks in (2, 3):
        split = plan(tensor_parallel=ranks)
        assert split.kv_bytes == alone.kv_bytes
        assert split.need.head == alone.need.head
        assert alone.need.layers <= split.need.layers < 1.02 * alone.need.layers  # norms; whole KV
        assert split.need.embedding == alone.need.embedding * (2 * ranks - 1) // ranks
        assert split.need.process > (ranks - 0.2) * alone.need.process
    drafted = plan(draft=config)
    assert drafted.kv_bytes == 2 * alone.kv_bytes
    assert drafted.need.draft == alone.need.weights + alone.need.workspace
    assert drafted.need.process == alone.need.process  # its products have the same shapes
    with pytest.raises(ModelError, match="int4 weights cannot be split"):
        plan(tensor_parallel=2, weights="int4")
    with pytest.raises(ModelError, match="tensor_parallel = 10"):
        plan(tensor_parallel=10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "weights", "kv", "ranks", "draft"),
    [
        ("bf16", "none", "none", 1, False),
        ("fp32", "none", "none", 1, False),
        pytest.param(*("bf16", "int8", "none", 1, False), marks=needs_integer_products),
        pytest.param(*("bf16", "int8", "int8", 1, False), marks=needs_integer_products),
        pytest.param(*("bf16", "int4", "fp8", 1, False), marks=needs_integer_products),
        ("bf16", "none", "none", 2, False),
        ("bf16", "none", "none", 3, False),
        pytest.param(*("bf16", "int8", "int8", 2, False), marks=needs_integer_products),
        ("bf16", "none", "none", 1, True),
        pytest.param(*("bf16", "int8", "int8", 1, True), marks=needs_integer_products),
    ],
)
async def test_a_full_engine_takes_what_was_said(
    config: ModelConfig, dtype: str, weights: str, kv: str, ranks: int, draft: bool
) -> None:
    context, concurrency = 512, 16
    said = planned(
        config,
        context=context,
        concurrency=concurrency,
        dtype=dtype,
        weights=weights,
        kv=kv,
        numerics="exact",
        free_bytes=8 * GIB,
        tensor_parallel=ranks,
        draft=config if draft else None,
    )
    speculation = SpeculationSettings(mode="draft", draft=DEFAULT_MODEL) if draft else None
    settings = EngineSettings(
        model=DEFAULT_MODEL,
        dtype=dtype,
        weight_quantisation=weights,
        kv_dtype="" if kv == "none" else kv,
        kv_blocks=said.kv_blocks,
        max_batch_requests=concurrency,
        tensor_parallel=ranks,
        speculation=speculation or SpeculationSettings(),
    )
    engine = EngineHandle(await EngineClient.start(settings))
    try:
        await asyncio.gather(*(_fill(engine, number, context) for number in range(concurrency)))
        leader = psutil.Process(engine.client.pid)
        pids = [leader.pid, *(rank.pid for rank in leader.children())]
        measured = sum(map(_private_bytes, pids)) + _shared_bytes(leader.pid)
    finally:
        await engine.client.stop()
    assert len(pids) == ranks
    assert engine.load.blocks.free < 0.1 * said.kv_blocks, "the pool was filled"
    untouched = said.kv_bytes // 2 if draft else 0  # most of its pool: few drafts pay in a batch
    assert 0.90 * (said.total - untouched) < measured < 1.05 * said.total, (
        f"measured {measured / 2**20:.0f} MiB, said {said.total / 2**20:.0f}"
    )


def _resident(pid: int, kind: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split(f"{kind}:")[1].split()[0])


def _private_bytes(pid: int) -> int:
    """All but the KV pool."""
    return _resident(pid, "RssAnon") + _resident(pid, "RssFile")


def _shared_bytes(pid: int) -> int:
    """The KV pool, one for all ranks."""
    return _resident(pid, "RssShmem")


async def _fill(engine: EngineHandle, number: int, context: int) -> None:
    ended = asyncio.get_running_loop().create_future()

    def on_report(report: object) -> None:
        if isinstance(report, ev.Ended):
            ended.set_result(report.error_message)

    prompt = [number + 5, *((7 * i) % 40_000 for i in range(context - 17))]
    params = SamplingParams(max_tokens=16, temperature=0.7, ignore_eos=True, seed=number)
    packed = pack_tokens(prompt)
    spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=bytes(16), ticket=number)
    command = messages.Submit(request_id=f"r{number}", prompt_token_ids=packed, spec=spec)
    engine.submit(command, on_report)
    async with asyncio.timeout(300):
        assert not await ended


def test_an_estimate_compiles_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_now() -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("baton.engine.cpu.native.library.compiled", lambda *_, **__: compile_now())
    library.load.cache_clear()
    library._path.cache_clear()
    assert plan_capacity(resolve_model(DEFAULT_MODEL).config, CapacityOptions(), 0).need.total > 0
    library._path.cache_clear()
