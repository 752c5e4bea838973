"""`baton doctor --edges`: each pair of workers, each transport that both have."""

import pytest

from baton.registry.redis_store import Registry
from fleet.cli.doctor_edges import EdgeFigure, measure_edges
from fleet.local.redis_server import EmbeddedRedis
from tests.workers.harness import TOKEN, workers


async def ready(redis_url: str, count: int) -> None:
    registry = Registry(redis_url, "test")
    while len((await registry.records())[1]) < count:
        pass
    await registry.close()


@pytest.mark.slow
async def test_every_edge_is_measured_by_every_transport_that_both_ends_have(
    redis_server: EmbeddedRedis,
) -> None:
    # 512 tokens of an emulated model are 128 KiB: enough to tell
    url = redis_server.url
    async with workers("prefill-0", "prefill-1", "decode-0", redis_url=url):
        await ready(url, 3)
        figures = await measure_edges(url, "test", TOKEN)
    assert [(figure.prefill_id, figure.decode_id, figure.transport) for figure in figures] == [
        (prefill, "decode-0", transport)
        for prefill in ("prefill-0", "prefill-1")
        for transport in ("shared_memory", "tcp", "grpc")
    ]
    assert all(figure.bytes_per_s > 1e5 and not figure.why for figure in figures), figures
    assert len({figure.bytes_per_s for figure in figures}) == 6


@pytest.mark.slow
async def test_an_edge_that_does_not_work_says_why(redis_server: EmbeddedRedis) -> None:
    url = redis_server.url
    async with workers(
        *("prefill-0", "decode-0"),
        redis_url=url,
        prefill_transports=("grpc",),
        prefill_damage="flip:1",
    ):
        await ready(url, 2)
        figures = await measure_edges(url, "test", TOKEN)
    assert [figure.transport for figure in figures] == ["grpc"]
    assert figures[0] == EdgeFigure("prefill-0", "decode-0", "grpc", why=figures[0].why)
    assert "damaged" in figures[0].why
