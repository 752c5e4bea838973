"""Bodies that come packed, marked, or in another encoding than UTF-8."""

import gzip
import json
import time
import tracemalloc

import pytest

from baton.types.errors import InvalidRequestError, UnsupportedMediaError
from router.frontend.http.encodings import Gunzip, utf8_of
from tests.router.conftest import MODEL

BODY = json.dumps({"prompt": "Hello, world!", "model": MODEL}).encode()
LIMIT = 64 * 1024


PACKED = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("GZIP", gzip.compress),
    ("gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
    ("identity", bytes),
    ("", bytes),
]


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": None}, max_body_bytes=LIMIT)


async def post(fleet, content: bytes, encoding: str):
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    return await fleet.http.post("/tokenize", content=content, headers=headers)


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
async def test_a_packed_body_is_read_as_the_plain_one(fleet, encoding, pack):
    response = await post(fleet, pack(BODY), encoding)
    assert response.status_code == 200, response.text
    assert response.json()["tokens"] == [19556, 28, 905, 17]


@pytest.mark.parametrize(("encoding", "pack"), PACKED[:-2])
def test_a_packed_body_may_come_in_any_pieces(encoding, pack):
    packed = pack(BODY)
    for size in (1, 2, 7, len(packed)):
        unfolder, found = Gunzip.of(encoding), b""
        for begin in range(0, len(packed), size):
            found += unfolder.feed(packed[begin : begin + size], LIMIT - len(found))
        unfolder.end()
        assert found == BODY


@pytest.mark.parametrize(("encoding", "pack"), [PACKED[0]])
async def test_what_unfolds_beyond_the_limit_is_413_and_costs_little(fleet, encoding, pack):
    whole = json.dumps({"prompt": "a" * (LIMIT - 14)}).encode()
    assert len(whole) == LIMIT
    assert (await post(fleet, pack(whole), encoding)).status_code == 200
    assert (await post(fleet, pack(whole + b" "), encoding)).status_code == 413
    bomb = pack(b" " * 30_000_000)  # 30 KB of gzip
    assert len(bomb) < LIMIT
    began_s = time.process_time()
    tracemalloc.start()
    refused = await post(fleet, bomb, encoding)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "payload_too_large"
    assert str(LIMIT) in refused.json()["error"]["message"]
    assert peak_bytes < 6_000_000
    assert time.process_time() - began_s < 1.0


@pytest.mark.parametrize(("encoding", "pack"), [PACKED[0]])
def test_what_unfolds_to_nothing_for_ever_ends(encoding, pack):
    many = pack(b"") * 5000
    with pytest.raises(InvalidRequestError, match=f"not valid {encoding}"):
        Gunzip.of(encoding).feed(many, LIMIT)
    assert len(Gunzip.of(encoding).feed(pack(b"abc" * 1000), 2)) == 3


@pytest.mark.parametrize("encoding", ["gzip"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[:-3],
        lambda packed: b"this is no such thing",
        lambda packed: packed[:12] + bytes([packed[12] ^ 0xFF]) + packed[13:],
    ],
)
async def test_a_damaged_body_is_400_and_names_the_encoding(fleet, encoding, damage):
    refused = await post(fleet, damage(gzip.compress(BODY * 20)), encoding)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert encoding in error["message"] or "JSON" in error["message"]


async def test_garbage_behind_the_end_is_refused(fleet):
    for encoding, packed in (("gzip", gzip.compress(BODY) + b"garbage"),):
        refused = await post(fleet, packed, encoding)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "content-encoding")


@pytest.mark.parametrize("encoding", ["br", "zstd", "deflate", "gzip, gzip", "compress", "x" * 500])
async def test_other_encodings_are_415_and_the_answer_lists_ours(fleet, encoding):
    refused = await post(fleet, BODY, encoding)
    assert refused.status_code == 415
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_media_type", "content-encoding")
    assert "send gzip" in error["message"]
    assert len(error["message"]) < 200
    with pytest.raises(UnsupportedMediaError):
        Gunzip.of(encoding)


async def test_a_byte_order_mark_of_utf8_is_read_over(fleet):
    for content, encoding in ((b"\xef\xbb\xbf" + BODY, ""), (gzip.compress(BODY), "gzip")):
        assert (await post(fleet, content, encoding)).json()["count"] == 4
    assert utf8_of(b"") == b""
    assert utf8_of(b"\xef\xbb\xbf") == b""


@pytest.mark.parametrize(
    "spelled", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
async def test_utf16_is_refused_and_the_message_says_what_to_send(fleet, spelled):
    refused = await post(fleet, BODY.decode().encode(spelled), "")
    assert refused.status_code == 400
    assert "send it as UTF-8" in refused.json()["error"]["message"]
