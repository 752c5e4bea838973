"""The sending side of the experimental two-rank group: posts sends, and reports them, in one order.

Each reader's control stream has its own group and helper process, which end with it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from batonpb import common_pb2
from batonpb import prefill_pb2 as pb

from baton.addresses import join_address
from baton.telemetry.tasks import BackgroundTasks
from kvtransfer.pair.helper import SENDER, SLOT_BYTES, Helper
from kvtransfer.pool_source import PoolSource
from kvtransfer.transport import ServingSide, TransportError

NAME = "pair"
SERVICE = "baton.v1.KvPair"
CONTROL = f"/{SERVICE}/Control"


class PairServer:
    """Experimental: opens a group for each reader."""

    def __init__(self, side: ServingSide) -> None:
        self._side = side
        self._tasks = BackgroundTasks("pair")

    @property
    def offer(self) -> common_pb2.TransportOffer | None:
        """Name of the transport; the worker's address is enough."""
        return common_pb2.TransportOffer(name=NAME)

    async def start(self, source: PoolSource) -> None:
        """Add the control stream to the server."""

        async def control(
            requests: AsyncIterator[pb.PairRequest], context: Any
        ) -> AsyncIterator[pb.PairReply]:
            first = await anext(aiter(requests), None)
            if first is None or first.open.incarnation != self._side.incarnation:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "wrong incarnation")
                return
            edge = _SendingEdge(source, first.open.host)
            serving = self._tasks.spawn(edge.run(requests), "edge")
            try:
                while reply := await edge.replies.get():
                    yield reply
            finally:
                serving.cancel()

        rpc: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            control,
            request_deserializer=pb.PairRequest.FromString,
            response_serializer=pb.PairReply.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Control": rpc})
        self._side.grpc_server.add_generic_rpc_handlers((handler,))

    async def close(self) -> None:
        """End all groups and their helper processes."""
        await self._tasks.close()


class _SendingEdge:
    """Connection of one reader.

    Args:
        host: Address of the interface that the reader can reach.
    """

    def __init__(self, source: PoolSource, host: str) -> None:
        self.replies: asyncio.Queue[pb.PairReply | None] = asyncio.Queue()  # None after the last
        self._source = source
        self._host = host

    async def run(self, requests: AsyncIterator[pb.PairRequest]) -> None:
        tasks = BackgroundTasks("pair")
        helper = Helper(tasks)
        try:
            with contextlib.suppress(grpc.RpcError, TransportError):
                await helper.start(SENDER, join_address(self._host, 0), self._host)
                self.replies.put_nowait(pb.PairReply(store_port=helper.store_port))
                await helper.until_it_stands()
                async for request in requests:
                    await self._post(request, helper, tasks)
        finally:
            self.replies.put_nowait(None)
            await helper.kill()
            await tasks.close()

    async def _post(self, request: pb.PairRequest, helper: Helper, tasks: BackgroundTasks) -> None:
        """Order and report sends, always both together."""
        serial = request.serial
        slots = _Slots(helper)
        try:
            async for size_bytes in self._source.frames(request.pull, slots.room):
                slot = slots.take()
                tasks.spawn(_free(helper, slot, helper.order(slot, size_bytes)), "sent")
                self.replies.put_nowait(pb.PairReply(serial=serial, posted_bytes=size_bytes))
        except Exception as error:  # noqa: BLE001 - of the source: other pulls continue
            failure = common_pb2.Error(code="internal_error", message=type(error).__name__)
            self.replies.put_nowait(pb.PairReply(serial=serial, failed=failure))
        else:
            self.replies.put_nowait(pb.PairReply(serial=serial, ended=pb.Release()))
        finally:
            slots.give_back()


class _Slots:
    """Slots, one at a time, of the memory from which the helper process sends."""

    def __init__(self, helper: Helper) -> None:
        self._helper = helper
        self._slot: int | None = None

    async def room(self, size_bytes: int) -> memoryview:
        if size_bytes > SLOT_BYTES:
            raise ValueError(f"frame of {size_bytes} bytes, limit {SLOT_BYTES}")
        if self._slot is None:
            self._slot = await self._helper.credit()
        return self._helper.slot(self._slot, size_bytes)

    def take(self) -> int:
        slot = self._slot
        self._slot = None
        if slot is None:
            raise RuntimeError("a frame was yielded without room for it")
        return slot

    def give_back(self) -> None:
        """Free the slot if it holds no frame."""
        if self._slot is not None:
            self._helper.give_back(self.take())


async def _free(helper: Helper, slot: int, sent: "asyncio.Future[None]") -> None:
    with contextlib.suppress(TransportError):
        await sent
        helper.give_back(slot)
