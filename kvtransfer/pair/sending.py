"""The sending side of a two-rank group: posts sends, and says so, in one order.

Each reader's control stream has a group and a helper process of its own; they end with it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from batonpb import common_pb2
from batonpb import prefill_pb2 as pb

from baton.telemetry.tasks import BackgroundTasks
from kvtransfer.pair.helper import SENDER, SLOT_BYTES, Helper
from kvtransfer.transport import FrameSource, ServingSide, TransportError

NAME = "pair"
SERVICE = "baton.v1.KvPair"
CONTROL = f"/{SERVICE}/Control"


class PairServer:
    """Opens a group for whoever asks.

    Args:
        side: Of this worker.
    """

    def __init__(self, side: ServingSide) -> None:
        self._side = side
        self._tasks = BackgroundTasks("pair")

    @property
    def offer(self) -> common_pb2.TransportOffer | None:
        """By its name; the worker's address is enough, from anywhere."""
        return common_pb2.TransportOffer(name=NAME)

    async def start(self, source: FrameSource) -> None:
        """Add the control stream to the server."""

        async def control(
            requests: AsyncIterator[pb.PairRequest], context: Any
        ) -> AsyncIterator[pb.PairReply]:
            first = await anext(aiter(requests), None)
            if first is None or first.open.incarnation != self._side.incarnation:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another life was meant")
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
        """End all groups."""
        await self._tasks.close()


class _SendingEdge:
    """One reader.

    Args:
        source: Of frames.
        host: Address of the interface that the reader can reach.
    """

    def __init__(self, source: FrameSource, host: str) -> None:
        self.replies: asyncio.Queue[pb.PairReply | None] = asyncio.Queue()  # None behind the last
        self._source = source
        self._host = host

    async def run(self, requests: AsyncIterator[pb.PairRequest]) -> None:
        """Serve pulls, one after the other, until the stream or the group ends."""
        tasks = BackgroundTasks("pair")
        helper = Helper(tasks)
        try:
            with contextlib.suppress(grpc.RpcError, TransportError):
                await helper.start(SENDER, f"{self._host}:0", self._host)
                self.replies.put_nowait(pb.PairReply(store_port=helper.store_port))
                await helper.until_it_stands()
                async for request in requests:
                    await self._post(request, helper, tasks)
        finally:
            self.replies.put_nowait(None)
            await helper.kill()
            await tasks.close()

    async def _post(self, request: pb.PairRequest, helper: Helper, tasks: BackgroundTasks) -> None:
        """Order sends and say so; nothing comes between the two."""
        serial = request.serial
        slots = _Slots(helper)
        try:
            async for size_bytes in self._source.frames(request.pull, slots.room):
                slot = slots.take()
                tasks.spawn(_free(helper, slot, helper.order(slot, size_bytes)), "sent")
                self.replies.put_nowait(pb.PairReply(serial=serial, posted_bytes=size_bytes))
        except Exception as error:  # noqa: BLE001 - of the source: other pulls go on
            said = common_pb2.Error(code="internal_error", message=type(error).__name__)
            self.replies.put_nowait(pb.PairReply(serial=serial, failed=said))
        else:
            self.replies.put_nowait(pb.PairReply(serial=serial, ended=pb.Release()))
        finally:
            slots.give_back()


class _Slots:
    """Room for one frame at a time, in the memory that the helper process sends from."""

    def __init__(self, helper: Helper) -> None:
        self._helper = helper
        self._slot: int | None = None

    async def room(self, size_bytes: int) -> memoryview:
        """See ``transport.Room``."""
        if size_bytes > SLOT_BYTES:
            raise ValueError(f"a frame of {size_bytes} bytes")
        if self._slot is None:
            self._slot = await self._helper.credit()
        return self._helper.slot(self._slot, size_bytes)

    def take(self) -> int:
        """The slot in which the frame is."""
        slot = self._slot
        self._slot = None
        if slot is None:
            raise RuntimeError("a frame without room")
        return slot

    def give_back(self) -> None:
        """What was asked for and holds no frame."""
        if self._slot is not None:
            self._helper.give_back(self.take())


async def _free(helper: Helper, slot: int, sent: "asyncio.Future[None]") -> None:
    with contextlib.suppress(TransportError):
        await sent
        helper.give_back(slot)
