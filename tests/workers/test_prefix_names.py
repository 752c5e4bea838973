"""Pulls of a prefix that follow each other faster than the engine reads its commands."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from batonpb import common_pb2
from batonpb import prefill_pb2 as pb

from baton.engine.core.blocks import BlockPool
from baton.engine.core.scheduler import Scheduler, SchedulerConfig
from baton.engine.core.sequence import EngineRequest
from baton.engine.process import messages
from baton.engine.process.handle import EngineHandle
from baton.types.geometry import KvGeometry
from baton.wire.tokens import pack_tokens, unpack_tokens
from decode_worker.prefix_pull import begin_pull, prefix_links
from kvtransfer.chunk import PoolView

GEOMETRY = KvGeometry(num_layers=2, num_blocks=32, num_kv_heads=2, head_dim=16, dtype="bf16")


class Client:
    """The socket to a step loop that reads its commands when the test says so."""

    ready = SimpleNamespace(geometry=GEOMETRY, hand_off="")

    def __init__(self) -> None:
        self.scheduler = Scheduler(BlockPool(32), SchedulerConfig(), (2,))
        self._commands: list = []

    def listen(self, on_report) -> None:
        self._report = on_report

    def send(self, *commands) -> None:
        self._commands += commands

    def step(self) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            match command:
                case messages.Submit():
                    request = EngineRequest(
                        request_id=command.request_id,
                        prompt=unpack_tokens(command.prompt_token_ids),
                        spec=command.spec,
                    )
                    self.scheduler.submit(request, 1)
                case messages.Cancel():
                    self.scheduler.cancel(command.request_id, command.choices, command.reason)
                case messages.PagesDrained():
                    self.scheduler.drained(command.request_id, command.generation)
        self.scheduler.plan(2)
        for event in self.scheduler.batch.take_events():
            self._report(event)


async def test_a_pull_that_is_cancelled_and_opened_again_at_once_leaves_no_reservation() -> None:
    """Both had one name at the engine: the first one's end took the second one's handler."""
    client = Client()
    engine = EngineHandle(client)
    identity = common_pb2.WorkerIdentity(worker_id="prefill-0", incarnation=b"0" * 16)
    parts = SimpleNamespace(
        engine=engine,
        pool=PoolView(bytearray(GEOMETRY.pool_bytes), GEOMETRY),
        peers=Mock(),
        metrics=Mock(),
        pacer=Mock(),
        identity=identity,
        count_task_failure=Mock(),
    )
    parts.peers.edge.return_value.bytes_per_s = 1e9
    source = common_pb2.PrefixSource(
        worker_id="prefill-9", incarnation=b"9" * 16, address="x:1", blocks=8
    )
    start = pb.PrefillStart(
        request_id="r1",
        attempt=1,
        generation=1,
        prompt_tokens=pack_tokens(range(100, 260)),
        hash_seed=b"s" * 16,
        sampling=common_pb2.SamplingParams(n=1, max_tokens=8),
        prefix=source,
    )
    first = begin_pull(parts, start, Mock())
    client.step()
    first.stop()
    start.generation = 2
    second = begin_pull(parts, start, Mock())
    client.step()
    second.stop()
    for _ in range(3):
        client.step()
    assert client.scheduler.batch.reservations.reserved_blocks == 0
    assert not engine.has_work


@pytest.mark.parametrize("named", [False, True])
def test_blocks_of_an_adapter_are_pulled_with_its_name_where_engines_need_it(named: bool) -> None:
    request = pb.PrefillStart(
        prompt_tokens=pack_tokens(range(40)),
        adapter=common_pb2.Adapter(name="french"),
        prefix=common_pb2.PrefixSource(worker_id="a", incarnation=b"a", blocks=2),
    )
    (link,) = prefix_links(request, b"own", named)
    assert link.adapter.name == ("french" if named else "")
