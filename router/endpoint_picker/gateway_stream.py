"""State of a gateway's request, as its external processing stream describes it. Sans-IO.

    request headers, body ──▶ question ──chosen──▶ the gateway sends the request to the endpoint
                                       ──refused─▶ the gateway responds with the error
    response headers, body ──▶ passed on as they are; the last bytes have the usage

A gateway streams bodies in both directions (FULL_DUPLEX_STREAMED), or sends the whole body of a
request (BUFFERED). In other modes it passes the headers on before there is a body.
"""

import re
from collections.abc import Mapping
from typing import Any

from batonpb import ext_proc_pb2 as pb
from google.protobuf.json_format import MessageToDict

from baton.types.errors import PayloadTooLargeError

DESTINATION = "x-gateway-destination-endpoint"
SUBSET = f"{DESTINATION}-subset"
_BUFFERED = (pb.BUFFERED, pb.BUFFERED_PARTIAL)
_DUPLEX = pb.FULL_DUPLEX_STREAMED
_TAIL_BYTES = 8 * 1024
_PIECE_BYTES = 60_000  # of a body that is passed on: gateways take at most 64 KiB at once
# In generated text quotes are escaped, so it cannot contain the name of a field.
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,9})\b')
_COMPLETION = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})\b')

Reply = pb.ProcessingResponse


class GatewayStream:
    """State of one stream.

    Attributes:
        path: Path of the request without its query.
        subset: Endpoints among which the choice must be, each ADDRESS:PORT or ADDRESS; None: all.
        body: The request's body until the choice; empty if the gateway does not wait for it.
        status: Status of the response; 0 before it.
        tail: Last bytes of the response's body, as far as it has come.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.path = ""
        self.subset: tuple[str, ...] | None = None
        self.body = bytearray()
        self.status = 0
        self.tail = b""
        self._max_body_bytes = max_body_bytes
        self._modes = pb.ProtocolConfiguration(
            request_body_mode=_DUPLEX, response_body_mode=_DUPLEX
        )
        self._held: list[Reply] = []  # until an endpoint is chosen
        self._asked = False
        self._refused = False

    def usage(self) -> list[int | None]:
        """Return the cached prompt tokens, and the response's tokens; None: not reported."""
        reported = (pattern.findall(self.tail) for pattern in (_CACHED, _COMPLETION))
        return [int(numbers[-1]) if numbers else None for numbers in reported]

    def receive(self, message: pb.ProcessingRequest) -> list[Reply] | None:
        """Return the replies to a message; None: first the request needs an endpoint.

        Raises:
            PayloadTooLargeError: The request's body exceeds the limit.
        """
        if self._refused:
            return []
        if message.HasField("protocol_config"):
            self._modes = message.protocol_config
        match message.WhichOneof("request"):
            case "request_headers":
                return self._take_headers(message)
            case "request_body":
                return self._take_body(message.request_body)
            case "request_trailers":
                last = Reply(request_trailers=pb.TrailersResponse())
                return self._end_request(*_pieces(self.body, ends=False), last)
            case "response_headers":
                status = _headers(message.response_headers).get(":status", "")
                self.status = int(status) if re.fullmatch("[1-9][0-9]{2}", status) else 0
                return [Reply(response_headers=pb.HeadersResponse())]
            case "response_body":
                part = message.response_body
                self.tail = (self.tail + part.body)[-_TAIL_BYTES:]
                return [Reply(response_body=_passed(part, self._modes.response_body_mode))]
        return [Reply(response_trailers=pb.TrailersResponse())]

    def chosen(self, endpoint: str) -> list[Reply]:
        """Return the replies that send the request to an endpoint."""
        replies = self._held
        self._forget()
        mutation = pb.HeaderMutation(set_headers=[_header(DESTINATION, endpoint)])
        common = pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)
        first = replies[0]
        if not first.HasField("request_trailers"):  # whose reply changes only them
            getattr(first, first.WhichOneof("response")).response.MergeFrom(common)
        first.dynamic_metadata.update({"envoy.lb": {DESTINATION: endpoint}})
        return replies

    def refused(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:
        """Return the reply that responds to the request with an error."""
        self._forget()
        self._refused = True
        immediate = pb.ImmediateResponse(
            status=pb.HttpStatus(code=status),
            headers=pb.HeaderMutation(set_headers=[_header(*pair) for pair in headers.items()]),
            body=body,
        )
        return [Reply(immediate_response=immediate)]

    def _forget(self) -> None:
        self._held = []
        self.body = bytearray()

    def _take_headers(self, message: pb.ProcessingRequest) -> list[Reply] | None:
        headers = message.request_headers
        self.path = _headers(headers).get(":path", "").partition("?")[0]
        self.subset = _subset(message)
        reply = Reply(request_headers=pb.HeadersResponse())
        mode = self._modes.request_body_mode
        if headers.end_of_stream or mode not in (*_BUFFERED, _DUPLEX):
            return self._end_request(reply)
        if mode in _BUFFERED:
            return [reply]
        self._held.append(reply)
        return []

    def _take_body(self, part: pb.HttpBody) -> list[Reply] | None:
        mode = self._modes.request_body_mode
        reply = Reply(request_body=_passed(part, mode))
        if self._asked:
            return [reply]
        self.body += part.body
        if len(self.body) > self._max_body_bytes:
            raise PayloadTooLargeError(f"the body is larger than {self._max_body_bytes} bytes")
        if mode in _BUFFERED:
            return self._end_request(reply)
        return self._end_request(*_pieces(self.body, ends=True)) if part.end_of_stream else []

    def _end_request(self, *last: Reply) -> list[Reply] | None:
        if self._asked:
            return list(last)
        self._asked = True
        self._held += last
        return None


def _pieces(body: bytearray, *, ends: bool) -> list[Reply]:
    """Return the replies that pass a whole body on: a client may have sent it byte by byte."""
    parts = [body[at : at + _PIECE_BYTES] for at in range(0, len(body), _PIECE_BYTES)]
    parts = parts or [body] * ends
    whole = [pb.HttpBody(body=bytes(part)) for part in parts]
    if ends:
        whole[-1].end_of_stream = True
    return [Reply(request_body=_passed(part, _DUPLEX)) for part in whole]


def _passed(part: pb.HttpBody, mode: int) -> pb.BodyResponse:
    """Return the reply that leaves a part of a body as it is."""
    if mode != _DUPLEX:
        return pb.BodyResponse()
    same = pb.StreamedBodyResponse(body=part.body, end_of_stream=part.end_of_stream)
    mutation = pb.BodyMutation(streamed_response=same)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=mutation))


def _headers(message: pb.HttpHeaders) -> dict[str, str]:
    pairs = message.headers.headers
    return {each.key.lower(): each.raw_value.decode("latin-1") or each.value for each in pairs}


def _header(name: str, value: str) -> pb.HeaderValueOption:
    return pb.HeaderValueOption(
        header=pb.HeaderValue(key=name, raw_value=value.encode()),
        append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _subset(message: pb.ProcessingRequest) -> tuple[str, ...] | None:
    """Return the endpoints of the gateway's hint, which is a list, or a text with commas."""
    known = MessageToDict(message.metadata_context).get("filterMetadata", {})
    hint: Any = known.get("envoy.lb.subset_hint", {}).get(SUBSET)
    if hint is None:
        return None
    texts = hint if isinstance(hint, list) else [hint]
    return tuple(part.strip() for text in texts for part in str(text).split(",") if part.strip())
