"""A fleet in front of a real vLLM with two data-parallel ranks (`make test-vllm`)."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fleet.attached.rig import AttachedFleet, neighbours
from tests.fleet.attached.test_data_parallel import converse
from tests.fleet.test_up import wait_for
from tests.registry.redis_servers import free_ports
from tests.vllm.places import PYTHON
from tests.vllm.test_attached import NEEDED, READY_S, Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
CONVERSATIONS = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, list[str]]]:
    """A vLLM with two ranks, and where their KV events are."""
    folder = tmp_path_factory.mktemp("ranks")
    stream = neighbours(2)
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{stream}"}
    more = ("--data-parallel-size", "2", "--kv-events-config", json.dumps(events))
    one = Server(folder, free_ports(1)[0], *NEEDED, *more)
    try:
        wait_for(one.is_healthy, READY_S)
        yield one, [f"tcp://127.0.0.1:{stream + rank}" for rank in range(2)]
    finally:
        one.kill()


@pytest.mark.parametrize("has_events", [True, False], ids=["events", "no-events"])
def test_turns_go_to_the_rank_that_has_their_prefix(
    server: tuple[Server, list[str]], tmp_path: Path, *, has_events: bool
) -> None:
    one, streams = server
    entry = {"url": one.url, "events": streams if has_events else []}
    fleet = AttachedFleet(tmp_path, [entry], served_model_name="smol")
    try:
        fleet.wait_ready()
        log = (tmp_path / "attached" / "logs" / "attached.log").read_text()
        assert (streams[1] in log) == has_events
        firsts = [1000 * number + 100 * has_events for number in range(1, CONVERSATIONS + 1)]
        with ThreadPoolExecutor(2) as pool:
            cached = list(pool.map(lambda first: converse(fleet.url, first, "smol"), firsts))
    finally:
        fleet.close()
    assert min(cached) >= 600, cached  # of 320 and 384 tokens of the two later turns
