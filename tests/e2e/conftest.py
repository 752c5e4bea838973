"""Two fleets for all tests that leave their workers alive; they end with the last of them."""

from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from openai import OpenAI
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.fleet_processes import Fleet, chat, fleet, free_port
from tests.telemetry.otlp_collector import Collector, over_grpc

PAIR_BLOCKS = 96
Pages = dict[str, dict[str, Metric]]


@pytest.fixture(scope="package")
def shared(tmp_path_factory):
    with fleet(tmp_path_factory.mktemp("f"), "prefill-0", "prefill-1", "decode-0") as running:
        yield running


class Pair(NamedTuple):
    """A prefill and a decode worker with small pools, whose spans are collected.

    Attributes:
        pages: Families with ``vllm:`` in their names, without it, after the first three requests:
            of the router's monitoring port and of both workers.
    """

    fleet: Fleet
    collector: Collector
    pages: Pages


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    port = free_port()
    also = f"clients: {{monitoring: {{port: {port}}}}}\n"
    folder = tmp_path_factory.mktemp("f")
    with pytest.MonkeyPatch.context() as patch, over_grpc() as (collector, endpoint):
        patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        with fleet(folder, "prefill-0", "decode-0", also=also, kv_blocks=PAIR_BLOCKS) as running:
            patch.undo()
            for text in ("Name a river. " * 20, "Name a river. " * 20, "Another."):
                body = chat(text, max_tokens=6)
                sent = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
                assert sent.status_code == 200
            addresses = [worker.record.metrics_address for worker in running.workers.values()]
            pages = map(families, (f"127.0.0.1:{port}", *addresses))
            names = ("router", "prefill", "decode")
            yield Pair(running, collector, dict(zip(names, pages, strict=True)))


def families(address: str) -> dict[str, Metric]:
    page = httpx.get(f"http://{address}/metrics", timeout=10).text
    return {
        family.name.removeprefix("vllm:"): family
        for family in text_string_to_metric_families(page)
        if family.name.startswith("vllm:")
    }


@pytest.fixture(
    scope="module", params=["disaggregated", pytest.param("colocated", marks=pytest.mark.slow)]
)
def client(request, shared):
    """The official client, in each mode. That the modes answer alike is `tests/matrix`' to show."""
    headers = {"x-baton-mode": request.param}
    with OpenAI(base_url=f"{shared.url}/v1", api_key="none", default_headers=headers) as made:
        yield made


@pytest.fixture(scope="module")
def anywhere(shared):
    """For what the mode has no part in."""
    with OpenAI(base_url=f"{shared.url}/v1", api_key="none") as made:
        yield made
