"""A line of a batch is a request, or it is said what is wrong with it."""

import json

import pytest

from router.frontend.batch.lines import (
    LOWEST_PRIORITY,
    LineFault,
    LineRequest,
    answer_line,
    fault_line,
    number_of,
    read_line,
)
from router.frontend.batch.record import BatchRecord

CHAT = "/v1/chat/completions"
BATCH = "batch_" + "a" * 32
GOOD = {"custom_id": "one", "method": "POST", "url": CHAT, "body": {"model": "m"}}


def read(line, number=2, seen=None):
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    return read_line(raw, number, CHAT, set() if seen is None else seen, 1000)


def test_a_line_is_a_request_at_the_lowest_priority():
    for body in ({"model": "m"}, {"model": "m", "priority": -5}):
        found = read({**GOOD, "body": body})
        assert isinstance(found, LineRequest)
        assert json.loads(found.body) == {"model": "m", "priority": LOWEST_PRIORITY}
    assert isinstance(read(b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), number=1), LineRequest)


@pytest.mark.parametrize("body", [b"{}", b'{ "a" : 1e22 , "b":100000000000000000000000.10 } '])
def test_numbers_of_a_line_keep_their_digits(body: bytes):
    line = b'{"url": "%b", "body": %b, "custom_id": "one"}' % (CHAT.encode(), body)
    found = read(line)
    assert isinstance(found, LineRequest)
    assert found.body.startswith(body.rstrip()[:-1])
    assert json.loads(found.body)["priority"] == LOWEST_PRIORITY


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"garbage", "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (b"[1]", "invalid_json_line"),
        (b'"text"', "invalid_json_line"),
        (b"x" * 1001, "line_too_long"),
        ({**GOOD, "custom_id": None}, "invalid_custom_id"),
        ({**GOOD, "custom_id": ""}, "invalid_custom_id"),
        ({**GOOD, "custom_id": "x" * 513}, "invalid_custom_id"),
        ({**GOOD, "method": "GET"}, "invalid_method"),
        ({**GOOD, "url": "/v1/embeddings"}, "mismatched_endpoint"),
        ({**GOOD, "url": 5}, "mismatched_endpoint"),
        ({**GOOD, "body": "text"}, "invalid_body"),
        ({**GOOD, "body": {"stream": True}}, "invalid_body"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_number(line, code):
    found = read(line)
    assert isinstance(found, LineFault)
    assert found.code == code
    assert found.message.startswith("line 2: ")


def test_two_lines_of_one_name_are_one_request():
    seen: set[bytes] = set()
    assert isinstance(read(GOOD, 1, seen), LineRequest)
    again = read(GOOD, 2, seen)
    assert (again.code, again.custom_id) == ("duplicate_custom_id", "one")


def test_a_line_of_answers_tells_which_line_it_answers():
    whole = answer_line(BATCH, 17, "one", status=200, request_id="r", body=b'{"id": "x"}')
    assert number_of(whole) == 17
    told = json.loads(whole)
    assert told["id"] == f"batch_req_{'a' * 32}_17"
    assert told["response"] == {"status_code": 200, "request_id": "r", "body": {"id": "x"}}
    assert told["error"] is None
    failed = fault_line(BATCH, 3, LineFault(None, "c", "m"))
    assert number_of(failed) == 3
    assert json.loads(failed)["error"] == {"code": "c", "message": "m"}
    for torn in (whole[:-1], whole[:40], whole[40:], b"", b"\n"):
        assert number_of(torn) is None


def record(**fields) -> BatchRecord:
    return BatchRecord(
        id=BATCH,
        tenant="t",
        endpoint=CHAT,
        input_file_id="file-1",
        completion_window="24h",
        created_s=100,
        expires_s=200,
        **fields,
    )


def test_a_batch_ends_once_and_says_how():
    done = record()
    done.begin(2, 101.5)
    assert (done.state, done.shown()["in_progress_at"]) == ("in_progress", 101)
    done.completed, done.failed = 1, 1
    done.finish(105)
    assert (done.state, done.ended, done.ended_s) == ("completed", True, 105)
    done.cancel(106)
    done.fail("late", "m")
    done.finish(107)
    assert done.state == "completed"
    late = record()
    late.begin(2, 101)
    late.finish(201)
    assert late.state == "expired"
    cancelled = record()
    cancelled.cancel(101)
    cancelled.begin(2, 102)
    assert cancelled.state == "cancelling"
    cancelled.finish(103)
    assert cancelled.state == "cancelled"
    failed = record()
    failed.fail("empty_file", "m")
    failed.finish(102)
    assert failed.state == "failed"
    waited = record()
    waited.finish(201)
    assert waited.state == "expired"
    assert failed.shown()["errors"]["data"][0]["code"] == "empty_file"
