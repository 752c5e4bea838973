"""Capability of a pull: signed permission of one decode worker to read the KV of one request.

The router that places the request signs it. It names the request and both incarnations, so a leaked
capability exposes one prompt to one reader, for a limited time. The key is derived from the fleet
token: a process that has the token can sign. A fleet without a token uses no capabilities.

    8 bytes   expiry, seconds since 1970
    32 bytes  HMAC-SHA256 over expiry, request id, and both incarnations
"""

import hmac
import struct
from hashlib import sha256

from baton.wire.fleet_token import FleetToken

VALID_S = 3600
"""Validity beyond the request's deadline: clocks of hosts differ by minutes."""

_KEY_OF = b"baton pull capability 1"
_END = struct.Struct(">Q")
_SIZE = _END.size + sha256().digest_size


def sign(token: FleetToken, request_id: str, holder: bytes, reader: bytes, now_s: float) -> bytes:
    """Return a capability of ``reader`` to pull from ``holder``; empty if the fleet has no token.

    Both are incarnations. ``now_s`` is Unix time plus the time that the request may take.
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
    """Return why a capability does not permit a pull, as a metric label; "" if it does."""
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
    signed = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    return hmac.digest(key, end + signed, sha256)
