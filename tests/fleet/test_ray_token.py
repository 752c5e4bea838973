"""A Ray that answers calls without a token is refused; ``test_ray_fleet.py`` has a real one."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fleet.pools.nodes import CapacityError
from fleet.pools.ray_runtime import insist_on_token


class Answers(grpc.GenericRpcHandler):
    """Answers every call as a head without or with the fence would."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def service(self, handler_call_details: object) -> grpc.RpcMethodHandler:
        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            if self._code is not grpc.StatusCode.OK:
                context.abort(self._code, "said the head")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def head() -> Iterator[Callable[[grpc.StatusCode], str]]:
    servers = []

    def start(code: grpc.StatusCode) -> str:
        server = grpc.server(ThreadPoolExecutor(1), handlers=(Answers(code),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


def test_a_head_that_refuses_is_taken(head: Callable[[grpc.StatusCode], str]) -> None:
    insist_on_token(head(grpc.StatusCode.UNAUTHENTICATED))


@pytest.mark.parametrize(
    ("code", "said"),
    [(grpc.StatusCode.OK, "accepted it"), (grpc.StatusCode.UNKNOWN, "returned UNKNOWN")],
)
def test_any_other_answer_is_an_error(
    head: Callable[[grpc.StatusCode], str], code: grpc.StatusCode, said: str
) -> None:
    with pytest.raises(CapacityError, match=f"{said}.*Ray 2.52 or newer"):
        insist_on_token(head(code))
