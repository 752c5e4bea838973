"""A pull's capability: who may read the KV of which request, signed by the router that placed it.

A prefill worker hands KV to whoever shows one for its own life, for that request, and for the life
of the decode worker that the hand-off began with. One that leaks opens one prompt, for a while, to
one reader. It is signed with a key that the fleet's token gives, so it protects from nobody who
has that: such a one can sign. Where there is no token there is none.

    8 bytes   end, seconds since 1970
    32 bytes  HMAC-SHA256 over all that it says
"""

import hmac
import struct
from hashlib import sha256

from baton.wire.fleet_token import FleetToken

VALID_S = 3600
"""Beyond the request's deadline: clocks of hosts differ by minutes, and nobody resumes later."""

_KEY_OF = b"baton pull capability 1"
_END = struct.Struct(">Q")
_SIZE = _END.size + sha256().digest_size


def sign(token: FleetToken, request_id: str, holder: bytes, reader: bytes, now_s: float) -> bytes:
    """Let a decode worker read a prompt's KV; empty where the fleet has no token.

    Args:
        token: The fleet's.
        request_id: Whose KV.
        holder: Incarnation of the prefill worker.
        reader: Incarnation of the decode worker.
        now_s: Seconds since 1970, plus what the request may take.
    """
    if not token.shown:
        return b""
    end = _END.pack(int(now_s) + VALID_S)
    return end + _mac(token.shown, end, request_id, holder, reader)


def refusal(
    capability: bytes,
    token: FleetToken,
    request_id: str,
    holder: bytes,
    reader: bytes,
    now_s: float,
) -> str:
    """Why a capability does not let a reader have KV, in a word for a metric; "" if it does.

    Args:
        capability: As shown.
        token: The fleet's; whichever of them it was signed with.
        request_id: Whose KV is asked for.
        holder: Incarnation of this worker.
        reader: Incarnation of the decode worker that asks.
        now_s: Seconds since 1970.
    """
    if not token.accepted:
        return ""
    if not capability:
        return "missing"
    if len(capability) != _SIZE:
        return "malformed"
    end = capability[: _END.size]
    shown = capability[_END.size :]
    macs = [_mac(each, end, request_id, holder, reader) for each in token.accepted]
    matches = [hmac.compare_digest(shown, mac) for mac in macs]
    if not any(matches):
        return "forged"
    return "expired" if _END.unpack(end)[0] < now_s else ""


def _mac(token: str, end: bytes, request_id: str, holder: bytes, reader: bytes) -> bytes:
    key = hmac.digest(token.encode(), _KEY_OF, sha256)
    parts = (request_id.encode(), holder, reader)
    said = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    return hmac.digest(key, end + said, sha256)
