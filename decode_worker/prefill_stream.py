"""Decode side of the control stream of one hand-off to one prefill worker.

    greet ──▶ start ──▶ events, while renewals go out ──▶ release or cancel ──▶ read to the end
      └─────────┴─────────┴── broken, silent, refused ──▶ the listener is notified, once

After ``close`` the listener gets no more events of this stream.
"""

import asyncio
import contextlib
from typing import Protocol

import grpc
import grpc.aio
from batonpb import prefill_pb2 as pb
from batonpb.decode_pb2 import PrefillTarget

from baton.telemetry.alive_clock import ALIVE
from baton.telemetry.tasks import BackgroundTasks
from decode_worker.peers import ControlCall, PeerGoneError, PeerRefusedError, Peers

HEARTBEAT_S = 0.5
SILENCE_S = 3.0  # a prefill worker sends something at least every HEARTBEAT_S


class StreamListener(Protocol):
    """Receiver of a prefill worker's events."""

    def on_event(self, event: pb.PrefillEvent) -> None:
        """Handle an event of the prefill worker."""

    def on_stream_lost(self, peer_gone: bool, reason: str) -> None:
        """Handle a lost stream; ``peer_gone``: the incarnation has ended, too."""

    def on_refused(self, reason: str) -> None:
        """Handle a refusal of the prefill worker, which is not known to be dead."""


class PrefillStream:
    """Control stream. ``run`` it once, then ``close`` it."""

    def __init__(
        self,
        target: PrefillTarget,
        start: pb.PrefillStart,
        peers: Peers,
        listener: StreamListener,
        tasks: BackgroundTasks,
    ) -> None:
        self._target = target
        self._start = start
        self._peers = peers
        self._listener = listener
        self._tasks = tasks
        self._closed = False
        self._call: ControlCall | None = None
        self._write_lock = asyncio.Lock()  # several tasks write, gRPC takes one write at a time

    def close(self) -> None:
        """Stop notifying the listener. Reading continues until the far end closes."""
        self._closed = True

    def cancel(self) -> None:
        """End the call without a last message."""
        if self._call is not None:
            self._call.cancel()

    async def send_last(self, message: pb.PrefillControl) -> None:
        """Send the last message; if that fails, the lease lapses instead."""
        call = self._call
        if call is None:
            return
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._write(call, message)
            async with self._write_lock:
                await call.done_writing()

    def broke(self, error: Exception) -> None:
        """Handle an exception of ``run``, which a prefill worker's message caused."""
        self.cancel()
        self._notify_refused(f"{self._target.worker_id}: {type(error).__name__}: {error}")

    async def run(self) -> None:
        """Shake hands, start, and pass events on until the stream ends."""
        worker_id = self._target.worker_id
        try:
            await self._peers.greet(self._target)
            if self._closed:
                return
            self._call = self._peers.prefill(self._target)
            await self._talk(self._call)
            await self._lost(f"{worker_id} ended the stream")
        except PeerGoneError as gone:
            self._notify_lost(True, str(gone))
        except PeerRefusedError as refused:
            self._notify_refused(str(refused))
        except TimeoutError:
            self._notify_refused(f"{worker_id} was silent for {SILENCE_S:.0f} s")
        except grpc.aio.AioRpcError as error:
            await self._lost(f"stream to {worker_id} broke: {error.details()}")
        except (asyncio.CancelledError, asyncio.InvalidStateError):
            # We closed the call, or another hand-off closed its channel.
            await self._lost(f"the connection to {worker_id} was closed")

    async def _talk(self, call: ControlCall) -> None:
        await self._write(call, pb.PrefillControl(start=self._start))
        async with self._tasks.beside(self._renew(call), "renew"):
            while True:
                async with ALIVE.timeout(SILENCE_S):
                    event = await call.read()
                if not isinstance(event, pb.PrefillEvent):
                    return  # gRPC's end of stream
                if not self._closed:
                    self._listener.on_event(event)

    async def _write(self, call: ControlCall, message: pb.PrefillControl) -> None:
        async with self._write_lock:
            await call.write(message)

    async def _renew(self, call: ControlCall) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            for sequence in range(1, 1 << 30):
                await asyncio.sleep(HEARTBEAT_S)
                await self._write(call, pb.PrefillControl(renew=pb.Renew(sequence=sequence)))

    async def _lost(self, reason: str) -> None:
        if self._closed:
            return
        try:
            await self._peers.greet(self._target, again=True)
        except PeerGoneError as gone:
            self._notify_lost(True, str(gone))
        except PeerRefusedError as refused:
            self._notify_refused(str(refused))
        else:
            self._notify_lost(False, reason)

    def _notify_lost(self, peer_gone: bool, reason: str) -> None:
        if not self._closed:
            self._listener.on_stream_lost(peer_gone, reason)

    def _notify_refused(self, reason: str) -> None:
        if not self._closed:
            self._listener.on_refused(reason)
