"""The pulling side of the experimental two-rank group.

Receives are posted in the order in which the control stream reports sends. If one times out, the
group ends: the helper process is killed, and waiting pulls fall back.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any

import grpc
import grpc.aio
from batonpb import prefill_pb2 as pb

from baton.addresses import join_address, split_address
from baton.telemetry.tasks import BackgroundTasks
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from kvtransfer.chunk import ByteFrame, PoolView
from kvtransfer.kv_slice import KvSlice
from kvtransfer.pair.helper import RECEIVER, SLOT_BYTES, SLOTS, START_S, Helper
from kvtransfer.pair.sending import CONTROL, NAME
from kvtransfer.transport import Frame, FrameStream, Peer, TransportError, TransportGoneError

RECEIVE_S = 2.0  # timeout of one frame whose send was posted
_Posted = tuple[pb.PairReply, int, "asyncio.Future[None] | None"]


class PairTransport:
    """Experimental: a group and a helper process for each peer.

    Args:
        channels: Channels of this worker, for control streams; their owner closes them.
    """

    frame_bytes = SLOT_BYTES

    def __init__(self, channels: Channels, token: FleetToken) -> None:
        self._channels = channels
        self._token = token
        self._edges: dict[bytes, _ReceivingEdge] = {}  # by incarnation
        self._tasks = BackgroundTasks("pair")

    def reaches(self, peer: Peer) -> bool:
        """Return whether the peer offers groups."""
        return peer.offer(NAME) is not None

    def pull(self, peer: Peer, request: pb.PullRequest) -> FrameStream:
        """Request frames from a peer; the first pull opens the group, which takes seconds."""
        incarnation = peer.target.incarnation
        edge = self._edges.get(incarnation)
        if edge is None:
            edge = self._edges[incarnation] = _ReceivingEdge(peer)
            self._tasks.spawn(self._keep(edge, incarnation), "edge")
        return _PostedFrames(edge, request)

    async def _keep(self, edge: "_ReceivingEdge", incarnation: bytes) -> None:
        method: Any = self._channels.to(edge.peer.target.address).stream_stream(
            CONTROL,
            request_serializer=pb.PairRequest.SerializeToString,
            response_deserializer=pb.PairReply.FromString,
        )
        try:
            await edge.run(method(metadata=self._token.metadata))
        finally:
            self._edges.pop(incarnation, None)

    async def close(self) -> None:
        """End all groups and their helper processes."""
        await self._tasks.close()


class _ReceivingEdge:
    """Edge from a sender: its control stream, the group, and the pulls under way."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.stands: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests: asyncio.Queue[pb.PairRequest] = asyncio.Queue()
        self._serials = count(1)
        self._posted: asyncio.Queue[_Posted] = asyncio.Queue()
        self._broken: asyncio.Future[TransportError] = asyncio.get_running_loop().create_future()
        self._pulls: dict[int, asyncio.Queue[_Came]] = {}
        self._over: TransportError | None = None
        self._in_slots = 0  # frames that were received and not stored yet

    def ask(self, request: pb.PullRequest) -> tuple[int, "asyncio.Queue[_Came]"]:
        """Request frames; return the pull's number and the queue of frames, None after the last."""
        serial = next(self._serials)
        frames: asyncio.Queue[_Came] = asyncio.Queue()
        if self._over is not None:
            frames.put_nowait(self._over)
        else:
            self._pulls[serial] = frames
            self._requests.put_nowait(pb.PairRequest(serial=serial, pull=request))
        return serial, frames

    def forget(self, serial: int) -> None:
        """Drop a pull; frames that were posted for it are received all the same."""
        frames = self._pulls.pop(serial, None)
        while frames is not None and not frames.empty():
            came = frames.get_nowait()
            if isinstance(came, _SlotFrame):
                came.let_go()

    async def run(self, call: Any) -> None:
        tasks = BackgroundTasks("pair")
        helper = Helper(tasks)
        over = TransportError("the worker is closing")
        try:
            await self._open(call, helper)
            tasks.spawn(self._write(call), "ask")
            tasks.spawn(self._until_it_breaks(self._listen(call, helper)), "listen")
            tasks.spawn(self._until_it_breaks(self._deliver(helper)), "deliver")
            over = await self._broken
        except TransportError as error:
            over = error
        except grpc.aio.AioRpcError as error:
            over = TransportGoneError(f"the control stream broke: {error.details()}")
        finally:
            self._over = over
            call.cancel()
            await helper.kill()
            await tasks.close()
            if not self.stands.done():
                self.stands.set_exception(over)
                self.stands.exception()
            for frames in self._pulls.values():
                frames.put_nowait(over)

    async def _open(self, call: Any, helper: Helper) -> None:
        host, _ = split_address(self.peer.target.address)
        opening = pb.PairOpen(incarnation=self.peer.target.incarnation, host=host)
        await call.write(pb.PairRequest(open=opening))
        opened = await call.read()
        if not isinstance(opened, pb.PairReply):
            raise TransportError("the peer opened no group")
        try:
            async with asyncio.timeout(START_S):
                await helper.start(RECEIVER, join_address(host, opened.store_port), host)
                await helper.until_it_stands()
        except TimeoutError as error:
            raise TransportError(f"the group did not form within {START_S:.0f} s") from error
        self.stands.set_result(None)

    async def _until_it_breaks(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
            why = TransportError("the peer ended the group")
        except TransportError as error:
            why = error
        except grpc.aio.AioRpcError as error:
            why = TransportGoneError(f"the control stream broke: {error.details()}")
        if not self._broken.done():
            self._broken.set_result(why)

    async def _write(self, call: Any) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await self._requests.get())

    async def _listen(self, call: Any, helper: Helper) -> None:
        """Post a receive for each send that was posted."""
        while isinstance(reply := await call.read(), pb.PairReply):
            if not reply.HasField("posted_bytes"):
                self._posted.put_nowait((reply, 0, None))
                continue
            if reply.posted_bytes > SLOT_BYTES:
                raise TransportError(f"frame of {reply.posted_bytes} bytes, limit {SLOT_BYTES}")
            slot = await helper.credit()
            self._posted.put_nowait((reply, slot, helper.order(slot, reply.posted_bytes)))

    async def _deliver(self, helper: Helper) -> None:
        while True:
            reply, slot, received = await self._posted.get()
            frame: _Came = None
            if received is not None:
                try:
                    async with asyncio.timeout(RECEIVE_S):
                        await received
                except TimeoutError as error:
                    raise TransportError(f"no frame within {RECEIVE_S:.0f} s") from error
                frame = self._in_slot(helper, slot, reply.posted_bytes)
            elif reply.HasField("failed"):
                frame = TransportGoneError(reply.failed.message)
            frames = self._pulls.get(reply.serial)
            if frames is not None:
                frames.put_nowait(frame)
            elif isinstance(frame, _SlotFrame):
                frame.let_go()

    def _in_slot(self, helper: Helper, slot: int, size_bytes: int) -> "_SlotFrame":
        """Return a frame in its slot, or a copy if half of the slots are in use."""

        def give_back() -> None:
            self._in_slots -= 1
            helper.give_back(slot)

        self._in_slots += 1
        frame = _SlotFrame(helper.slot(slot, size_bytes), give_back)
        if self._in_slots > SLOTS // 2:
            frame.keep()
        return frame


class _SlotFrame:
    """A frame in the memory into which the helper process received it.

    Storing it frees the slot. A frame that is not stored when the next one is wanted is copied, so
    that a puller that keeps frames does not block others.
    """

    def __init__(self, frame: memoryview, give_back: Callable[[], None]) -> None:
        self._frame: bytes | memoryview = frame
        self._loop = asyncio.get_running_loop()
        self._give_back: Callable[[], None] | None = give_back
        self._reading = threading.Lock()

    def store(self, pool: PoolView, blocks: Sequence[int], kv_slice: KvSlice, bound: bytes) -> None:
        """Store the frame (``transport.Frame``); runs in a thread."""
        with self._reading:
            try:
                ByteFrame(self._frame).store(pool, blocks, kv_slice, bound)
            finally:
                self._loop.call_soon_threadsafe(self.let_go)

    def keep(self) -> None:
        """Copy the frame and free its slot, unless it is being stored already."""
        if self._give_back is not None and self._reading.acquire(blocking=False):
            self._frame = bytes(self._frame)
            self._reading.release()
            self.let_go()

    def let_go(self) -> None:
        give_back = self._give_back
        self._give_back = None
        if give_back is not None:
            give_back()


_Came = _SlotFrame | TransportError | None
"""Next item of a pull's queue; None after the last frame."""


class _PostedFrames:
    def __init__(self, edge: _ReceivingEdge, request: pb.PullRequest) -> None:
        self._edge = edge
        self._request = request
        self._serial = 0
        self._frames: asyncio.Queue[_Came] | None = None
        self._last: _SlotFrame | None = None

    async def read(self) -> Sequence[Frame]:
        if self._frames is None:
            await asyncio.shield(self._edge.stands)
            self._serial, self._frames = self._edge.ask(self._request)
        if self._last is not None:
            self._last.keep()
        frame = await self._frames.get()
        if isinstance(frame, TransportError):
            self._frames.put_nowait(frame)
            raise frame
        self._last = frame
        return [] if frame is None else [frame]

    def close(self) -> None:
        self._edge.forget(self._serial)
        if self._last is not None:
            self._last.keep()
