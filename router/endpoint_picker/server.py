"""gRPC server of the endpoint picker: Envoy's external processing, and health."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from batonpb import ext_proc_pb2_grpc as pb_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.addresses import join_address
from baton.telemetry.tasks import BackgroundTasks
from baton.types.errors import BatonError, SlowRequestError
from baton.wire.grpc_options import listen_for_gateways
from router.endpoint_picker.gateway_stream import GatewayStream, Reply
from router.endpoint_picker.picker import Picked, Picker
from router.frontend.api.messages.errors import MESSAGES_ERRORS
from router.frontend.errors import OPENAI_ERRORS, error_response, new_id
from router.process import Process

_READINESS = ("", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor")
_LOOK_S = 0.1
_LONGEST_MESSAGE = 4  # times the largest body, which is refused with a reason up to here
_CLIENT_GONE = 499


class PickerServer:
    """Endpoint picker of a router's process, whose settings have the port."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._picker = Picker(process)
        self._tasks = BackgroundTasks("endpoint picker", process.observer.task_failed)
        self._health = health.aio.HealthServicer()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve within the context, at whose end placed requests get their time to end."""
        settings = self._process.settings
        most_bytes = _LONGEST_MESSAGE * settings.max_body_bytes
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", most_bytes),
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),  # of gateways
            ],
            maximum_concurrent_rpcs=settings.clients.max_connections,
        )
        pb_grpc.add_ExternalProcessorServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        address = join_address(settings.host, settings.picker_port)
        listen_for_gateways(server, address, *settings.picker_tls)
        following = self._tasks.keep(self._show_health, "health")
        await server.start()
        try:
            yield
        finally:
            following.cancel()
            await self._health.enter_graceful_shutdown()
            stopping = self._process.lanes.first.gateway.stopping
            await server.stop(None if stopping else settings.default_timeout_s)
            await self._tasks.close()

    async def _show_health(self) -> None:
        states = health_pb2.HealthCheckResponse
        await self._health.set("liveness", states.SERVING)
        while True:
            state = states.SERVING if self._picker.is_ready else states.NOT_SERVING
            for name in _READINESS:
                await self._health.set(name, state)
            await asyncio.sleep(_LOOK_S)

    async def Process(self, messages: Any, context: Any) -> None:  # noqa: N802 - gRPC's name
        """Follow one request of a gateway."""
        stream = GatewayStream(self._process.settings.max_body_bytes)
        picked: Picked | None = None
        error: BatonError | None = None
        limit_s = self._process.settings.clients.body_timeout_s
        try:
            async with asyncio.timeout(limit_s) as until_asked:
                async for message in messages:
                    try:
                        replies = stream.receive(message)
                        if replies is None:
                            until_asked.reschedule(None)
                            picked = await self._picker.pick(stream)
                            replies = stream.chosen(picked.endpoint)
                    except BatonError as refusal:
                        error = refusal
                        replies = _refused(stream, error)
                    if picked is not None:
                        picked.follow(stream)  # before the last reply: then the gateway leaves
                    for reply in replies:
                        await context.write(reply)
        except TimeoutError:
            why = f"the request was not complete within {limit_s:g} s (clients.body_timeout_s)"
            error = error or SlowRequestError(why)
            for reply in _refused(stream, error):
                await context.write(reply)
        finally:
            if picked is not None:
                picked.end(stream)
            status = error.status if error is not None else stream.status or _CLIENT_GONE
            self._process.observer.answered("picker", status, "all")
            if error is not None:
                self._process.metrics.inc("baton_rejections", code=error.code, tenant="all")


def _refused(stream: GatewayStream, error: BatonError) -> list[Reply]:
    """Return the replies of an error in the format of the API that was called."""
    shape = MESSAGES_ERRORS if stream.path == "/v1/messages" else OPENAI_ERRORS
    response = error_response(error, new_id(), shape)
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    return stream.refused(response.status_code, headers, bytes(response.body))
