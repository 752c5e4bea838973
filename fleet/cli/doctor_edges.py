"""Bandwidth of each edge of a running fleet, by each transport that both workers have.

Each figure comes from a real hand-off, a probe that metrics and caches ignore. The decode worker
measures it.
"""

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
from batonpb import common_pb2, decode_pb2_grpc
from batonpb import decode_pb2 as pb

from baton.registry.redis_store import Registry
from baton.registry.types import WorkerRecord
from baton.wire.capability import sign
from baton.wire.compatibility import own_wire
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_options import open_channel
from baton.wire.tls import FleetTls
from baton.wire.tokens import pack_tokens
from kvtransfer.edge import FALLBACK
from kvtransfer.transports import TRANSPORTS

PROMPT_TOKENS = 512
PROBE_S = 30.0
_TOKEN_IDS = range(3, 200)  # in every vocabulary


@dataclass(frozen=True, slots=True)
class EdgeFigure:
    """Bandwidth of one edge by one transport; 0 if not measured, with the reason in ``why``."""

    prefill_id: str
    decode_id: str
    transport: str
    bytes_per_s: float = 0.0
    why: str = ""


@dataclass(slots=True)
class _Line:
    """A router's stream to one worker, as far as a probe needs it."""

    record: WorkerRecord
    call: Any
    router_id: str
    token: FleetToken
    capabilities: common_pb2.Capabilities = field(default_factory=common_pb2.Capabilities)

    async def greet(self) -> None:
        """Introduce this process as a router, and receive the worker's capabilities."""
        hello = pb.Hello(router_id=self.router_id, wire=own_wire())
        await self.call.write(pb.RouterFrame(hello=hello))
        frame = await self._until(lambda frame: frame.HasField("status"))
        self.capabilities = frame.status.capabilities

    async def probe(self, prefill: WorkerRecord, transport: str) -> EdgeFigure:
        """Measure one hand-off from a prefill worker to this worker."""
        name = f"doctor-{secrets.token_hex(8)}"
        reader = self.record.incarnation
        capability = sign(self.token, name, prefill.incarnation, reader, time.time())
        tokens = min(PROMPT_TOKENS, self.capabilities.max_context_tokens // 2)
        submission = pb.Submission(
            request_id=name,
            attempt=1,
            prompt_tokens=pack_tokens([random.choice(_TOKEN_IDS) for _ in range(tokens)]),
            sampling=common_pb2.SamplingParams(
                max_tokens=2, n=1, top_p=1.0, repetition_penalty=1.0, logprobs=-1, ignore_eos=True
            ),
            hash_seed=secrets.token_bytes(16),
            prefill=pb.PrefillTarget(
                worker_id=prefill.worker_id,
                incarnation=prefill.incarnation,
                address=prefill.address,
                transport=transport,
                capability=capability,
            ),
            router_id=self.router_id,
            lease_ms=int(PROBE_S * 1000),
            probe=True,
        )
        await self.call.write(pb.RouterFrame(submit=submission))
        figure = EdgeFigure(prefill.worker_id, self.record.worker_id, transport)
        why = ""
        ended = await self._until(
            lambda frame: (
                any(n.request_id == name for n in frame.prefill_needed)
                or any(end.request_id == name for end in frame.ends)
            )
        )
        for needed in ended.prefill_needed:
            if needed.request_id == name:
                why = needed.reason.message
                cancel = pb.Cancel(request_id=name, attempt=1)
                await self.call.write(pb.RouterFrame(cancel=cancel))
        for end in ended.ends:
            if end.request_id == name and end.HasField("error"):
                why = end.error.message
        if why:
            return replace(figure, why=why)
        status = (await self._until(lambda frame: frame.HasField("status"))).status
        for edge in status.edges:
            if edge.prefill_worker_id == prefill.worker_id:
                return replace(figure, bytes_per_s=edge.bytes_per_s)
        return replace(figure, why="too few bytes were transferred to measure")

    async def _until(self, there: Callable[[pb.WorkerFrame], bool]) -> pb.WorkerFrame:
        async with asyncio.timeout(PROBE_S):
            while True:
                frame = await self.call.read()
                if not isinstance(frame, pb.WorkerFrame):
                    raise ConnectionError(f"{self.record.worker_id} closed the stream")
                if there(frame):
                    return frame


async def measure_edges(
    redis_url: str, fleet: str, fleet_token: str, tls: FleetTls | None = None
) -> list[EdgeFigure]:
    """Measure all pairs of a prefill and a decode worker, one after another."""
    registry = Registry(redis_url, fleet)
    try:
        _, records = await registry.records()
    finally:
        await registry.close()
    router_id = f"doctor-{secrets.token_hex(4)}"
    async with AsyncExitStack() as undo:
        lines = [
            await undo.enter_async_context(_line(record, router_id, fleet_token, tls))
            for record in sorted(records.values(), key=lambda record: record.worker_id)
            if record.state == "ready"
        ]
        pairs = [
            (prefill, decode)
            for decode in lines
            for prefill in lines
            if (prefill.record.role, decode.record.role) == ("prefill", "decode")
        ]
        return [
            await _measure(prefill, decode, transport)
            for prefill, decode in pairs
            for transport in _common(prefill.capabilities, decode.capabilities)
        ]


async def _measure(prefill: _Line, decode: _Line, transport: str) -> EdgeFigure:
    try:
        return await decode.probe(prefill.record, transport)
    except TimeoutError:
        why = f"no result within {PROBE_S:.0f} s"
        return EdgeFigure(prefill.record.worker_id, decode.record.worker_id, transport, why=why)


def _common(prefill: common_pb2.Capabilities, decode: common_pb2.Capabilities) -> list[str]:
    """Return the transports that both workers have, and that lead to the same place.

    Workers whose engine moves KV by itself have no choice.
    """
    if decode.hand_off.startswith("nixl/"):
        return [decode.hand_off]
    ours = {(offer.name, offer.place) for offer in decode.transports}
    both = {offer.name for offer in prefill.transports if (offer.name, offer.place) in ours}
    return [name for name in TRANSPORTS if name in both or name == FALLBACK]


@asynccontextmanager
async def _line(
    record: WorkerRecord, router_id: str, fleet_token: str, tls: FleetTls | None
) -> AsyncIterator[_Line]:
    channel = open_channel(record.address, tls)
    try:
        token = FleetToken(fleet_token)
        call: Any = decode_pb2_grpc.DecodeStub(channel).Serve(metadata=token.metadata)
        line = _Line(record, call, router_id, token)
        await line.greet()
        yield line
    except grpc.aio.AioRpcError as error:
        raise ConnectionError(f"{record.worker_id}: {error.details()}") from error
    finally:
        await channel.close()
