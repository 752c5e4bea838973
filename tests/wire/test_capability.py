"""A pull's capability is for one request, one holder, one reader, and not for ever."""

import pytest

from baton.wire.capability import VALID_S, refusal, sign
from baton.wire.fleet_token import FleetToken

TOKEN = FleetToken("the-token-of-the-fleet")
NOW_S = 1_000_000.5
RIGHT = {"request_id": "r", "holder": b"h" * 16, "reader": b"d" * 16}


def judged(capability: bytes, token: FleetToken = TOKEN, now_s: float = NOW_S, **asked) -> str:
    asked = {**RIGHT, **asked}
    return refusal(capability, token, asked["request_id"], asked["holder"], asked["reader"], now_s)


def signed(token: FleetToken = TOKEN) -> bytes:
    return sign(token, RIGHT["request_id"], RIGHT["holder"], RIGHT["reader"], NOW_S)


def test_it_opens_what_it_says() -> None:
    assert judged(signed()) == ""
    assert judged(signed(), now_s=NOW_S + VALID_S - 1) == ""
    assert judged(signed(), now_s=NOW_S - 900) == "", "the router's clock may be early"


@pytest.mark.parametrize(
    "asked",
    [
        {"request_id": "other"},
        {"holder": b"x" * 16},
        {"reader": b"x" * 16},
        {"reader": b""},
        {"request_id": "r\0", "holder": b"h" * 15},
    ],
)
def test_it_opens_nothing_else(asked: dict) -> None:
    assert judged(signed(), **asked) == "forged"


def test_time_and_shape() -> None:
    assert judged(signed(), now_s=NOW_S + VALID_S + 1) == "expired"
    assert judged(b"") == "missing"
    assert judged(signed()[:-1]) == judged(b"x") == "malformed"
    later = (int(NOW_S) + 10 * VALID_S).to_bytes(8, "big") + signed()[8:]
    assert judged(later) == "forged"
    for bit in range(0, len(signed()) * 8, 7):
        bent = bytearray(signed())
        bent[bit // 8] ^= 1 << bit % 8
        assert judged(bytes(bent)) == "forged"


def test_two_tokens_are_valid_while_one_follows_the_other() -> None:
    old, new = "the-token-of-the-fleet", "the-next-token-of-the-fleet"
    assert judged(signed(), FleetToken(new, old)) == ""
    assert judged(signed(FleetToken(new, old)), FleetToken(old, new)) == ""
    assert judged(signed(), FleetToken(new)) == "forged"


def test_without_a_token_there_is_none() -> None:
    for none in (FleetToken(), FleetToken("")):
        assert signed(none) == b""
        assert judged(b"", none) == judged(b"whatever", none) == ""
