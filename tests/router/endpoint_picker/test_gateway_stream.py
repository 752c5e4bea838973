"""The gateway's stream, without one: orders of messages in each mode, and the usage."""

from typing import Any

import pytest
from batonpb import ext_proc_pb2 as pb

from baton.types.errors import PayloadTooLargeError
from router.endpoint_picker.gateway_stream import DESTINATION, SUBSET, GatewayStream

ENDPOINT = "10.0.0.1:8000"


def headers(mode: int | None, *, ends: bool = False, response_mode: int = pb.STREAMED) -> Any:
    pairs = {":path": "/v1/completions?a=b", "Content-Type": "application/json"}
    values = [pb.HeaderValue(key=k, raw_value=v.encode()) for k, v in pairs.items()]
    message = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=values), end_of_stream=ends)
    )
    if mode is not None:
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = response_mode
    return message


def part(body: bytes, *, ends: bool = False) -> Any:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=ends))


def answered(body: bytes, status: str = "200") -> list[Any]:
    value = pb.HeaderValue(key=":status", raw_value=status.encode())
    begin = pb.HttpHeaders(headers=pb.HeaderMap(headers=[value]))
    return [
        pb.ProcessingRequest(response_headers=begin),
        pb.ProcessingRequest(response_body=pb.HttpBody(body=body)),
    ]


def destination(reply: Any) -> tuple[str, str, str]:
    """Return the kind of a reply, and the endpoint in its headers and its metadata."""
    kind = reply.WhichOneof("response")
    common = getattr(reply, kind).response
    (option,) = common.header_mutation.set_headers
    assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    assert option.header.key == DESTINATION
    assert common.clear_route_cache
    return kind, option.header.raw_value.decode(), reply.dynamic_metadata["envoy.lb"][DESTINATION]


@pytest.mark.parametrize("mode", [pb.FULL_DUPLEX_STREAMED, None])
def test_a_streamed_body_is_held_back_until_the_choice(mode: int | None) -> None:
    """Also of a gateway that does not tell its mode. The first reply has the endpoint."""
    stream = GatewayStream(100)
    assert stream.receive(headers(mode, response_mode=pb.FULL_DUPLEX_STREAMED)) == []
    assert stream.receive(part(b"one ")) == []
    assert stream.receive(part(b"two", ends=True)) is None
    assert (stream.path, bytes(stream.body)) == ("/v1/completions", b"one two")
    first, *others = stream.chosen(ENDPOINT)
    assert destination(first) == ("request_headers", ENDPOINT, ENDPOINT)
    passed = [reply.request_body.response.body_mutation.streamed_response for reply in others]
    assert [(one.body, one.end_of_stream) for one in passed] == [(b"one two", True)]
    _, body = [stream.receive(message) for message in answered(b"text")]
    assert body is not None
    assert body[0].response_body.response.body_mutation.streamed_response.body == b"text"


def test_a_body_that_came_byte_by_byte_goes_on_in_large_pieces() -> None:
    """Each byte was held as a reply of 900 bytes: one client could fill the memory."""
    stream = GatewayStream(200_000)
    stream.receive(headers(pb.FULL_DUPLEX_STREAMED))
    for _ in range(130_000):
        stream.receive(part(b"x"))
    assert len(stream._held) == 1
    assert stream.receive(part(b"", ends=True)) is None
    _, *others = stream.chosen(ENDPOINT)
    passed = [reply.request_body.response.body_mutation.streamed_response for reply in others]
    sizes = [(len(one.body), one.end_of_stream) for one in passed]
    assert sizes == [(60_000, False), (60_000, False), (10_000, True)]


def test_trailers_without_a_body_behind_passed_headers_have_the_endpoint_beside_them() -> None:
    stream = GatewayStream(100)
    stream.receive(headers(pb.BUFFERED))
    assert stream.receive(pb.ProcessingRequest(request_trailers=pb.HttpTrailers())) is None
    (reply,) = stream.chosen(ENDPOINT)
    assert reply.HasField("request_trailers")
    assert reply.dynamic_metadata["envoy.lb"][DESTINATION] == ENDPOINT


@pytest.mark.parametrize("status", ["", "abc", "200.0", "9" * 5000])
def test_an_odd_status_is_none(status: str) -> None:
    stream = GatewayStream(100)
    stream.receive(headers(pb.FULL_DUPLEX_STREAMED, ends=True))
    stream.chosen(ENDPOINT)
    for message in answered(b"text", status):
        stream.receive(message)
    assert stream.status == 0


def test_trailers_end_a_body() -> None:
    stream = GatewayStream(100)
    stream.receive(headers(pb.FULL_DUPLEX_STREAMED))
    stream.receive(part(b"one"))
    trailers = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())
    assert stream.receive(trailers) is None
    kinds = [reply.WhichOneof("response") for reply in stream.chosen(ENDPOINT)]
    assert kinds == ["request_headers", "request_body", "request_trailers"]


def test_a_buffered_body_comes_after_the_headers_were_passed_on() -> None:
    stream = GatewayStream(100)
    replies = stream.receive(headers(pb.BUFFERED))
    assert replies == [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]
    assert stream.receive(part(b"{}", ends=True)) is None
    (reply,) = stream.chosen(ENDPOINT)
    assert destination(reply) == ("request_body", ENDPOINT, ENDPOINT)
    assert not reply.request_body.response.HasField("body_mutation")


@pytest.mark.parametrize(
    ("mode", "ends"), [(pb.NONE, False), (pb.STREAMED, False), (pb.FULL_DUPLEX_STREAMED, True)]
)
def test_without_a_body_to_wait_for_headers_are_enough(mode: int, ends: bool) -> None:
    stream = GatewayStream(100)
    assert stream.receive(headers(mode, ends=ends)) is None
    (reply,) = stream.chosen(ENDPOINT)
    assert destination(reply) == ("request_headers", ENDPOINT, ENDPOINT)
    if mode == pb.STREAMED:
        assert stream.receive(part(b"x" * 200)) == [
            pb.ProcessingResponse(request_body=pb.BodyResponse())
        ]


def test_a_refusal_ends_the_stream() -> None:
    stream = GatewayStream(10)
    stream.receive(headers(pb.FULL_DUPLEX_STREAMED))
    with pytest.raises(PayloadTooLargeError, match="larger than 10 bytes"):
        stream.receive(part(b"x" * 11))
    (reply,) = stream.refused(413, {"content-type": "application/json"}, b"{}")
    immediate = reply.immediate_response
    assert (immediate.status.code, immediate.body) == (413, b"{}")
    assert immediate.headers.set_headers[0].header.raw_value == b"application/json"
    assert stream.receive(part(b"more", ends=True)) == []
    assert bytes(stream.body) == b""


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        (["10.0.0.1:80", "10.0.0.2:80"], ("10.0.0.1:80", "10.0.0.2:80")),
        ("10.0.0.1:80, 10.0.0.2", ("10.0.0.1:80", "10.0.0.2")),
        ([], ()),
        ("", ()),
        (None, None),
    ],
)
def test_the_subset_of_the_gateway(hint: Any, subset: tuple[str, ...] | None) -> None:
    """An empty one is not the same as none: nothing may be chosen."""
    message = headers(pb.NONE)
    fields = {} if hint is None else {SUBSET: hint}
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(fields)
    stream = GatewayStream(100)
    stream.receive(message)
    assert stream.subset == subset


COUNTED = b'"usage":{"prompt_tokens":40,"completion_tokens":3,'


@pytest.mark.parametrize(
    ("text", "usage"),
    [
        (COUNTED + b'"prompt_tokens_details": {"cached_tokens": 32}}}', [32, 3]),
        (COUNTED + b'"prompt_tokens_details":null}}', [None, 3]),
        (b'{"usage":{"input_tokens_details":{"cached_tokens":16},"output_tokens":2}}', [16, 2]),
        (b'"usage":{"cache_read_input_tokens":8,"output_tokens":1}', [8, 1]),
        (b'{"text":"say \\"cached_tokens\\": 7 and \\"completion_tokens\\": 9"}', [None, None]),
        (b"\x1f\x8b not text", [None, None]),
    ],
)
def test_the_usage_is_in_the_last_bytes(text: bytes, usage: list[int | None]) -> None:
    """From each API, in pieces, and behind a long text that may contain the same field names."""
    stream = GatewayStream(100)
    for at in range(0, len(text), 7):
        for message in answered(b"x" * 3000 * (at == 0) + text[at : at + 7]):
            stream.receive(message)
    assert stream.usage() == usage
    assert stream.status == 200
