"""Listens to all that passes a rig's switch, and says what of certain words was heard.

Runs in the switch's network. The words come as one line of JSON on standard input, name to hex; the
answer is one line: name to how many connections had it, and how many packets were missed.
"""

import json
import select
import socket
import struct
import sys
from collections import defaultdict

_ALL = 3  # ETH_P_ALL
_OUTGOING = 4  # the copy of a frame that leaves by another port
_BUFFER_BYTES = 128 << 20
_FORCE, _PACKET, _STATISTICS = 33, 263, 6  # SO_RCVBUFFORCE, SOL_PACKET, PACKET_STATISTICS
_IPV4, _TCP = 0x0800, 6

Flow = tuple[bytes, bytes]


def payload(frame: bytes) -> tuple[Flow, int, bytes] | None:
    """Both ends, sequence number and bytes of a TCP segment."""
    if len(frame) < 34 or struct.unpack_from("!H", frame, 12)[0] != _IPV4 or frame[23] != _TCP:
        return None
    header = 14 + (frame[14] & 15) * 4
    total = struct.unpack_from("!H", frame, 16)[0]
    end = 14 + total if total else len(frame)
    data = header + (frame[header + 12] >> 4) * 4
    (sequence,) = struct.unpack_from("!I", frame, header + 4)
    return (frame[26:34], frame[header : header + 4]), sequence, frame[data:end]


def main() -> None:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
    link.setsockopt(socket.SOL_SOCKET, _FORCE, _BUFFER_BYTES)
    print("listening", flush=True)
    heard: dict[Flow, bytearray] = defaultdict(bytearray)
    behind: dict[Flow, int] = {}  # sequence number that comes next: what was heard is not again
    while True:
        ready, _, _ = select.select([link, sys.stdin], [], [])
        if link in ready:
            frame, (_, _, kind, *_) = link.recvfrom(1 << 17)
            segment = payload(frame) if kind != _OUTGOING else None
            if segment is not None and segment[2]:
                flow, sequence, said = segment
                expected = behind.get(flow)
                if expected is None or (sequence - expected) & 0x80000000 == 0:
                    heard[flow] += said
                    behind[flow] = (sequence + len(said)) & 0xFFFFFFFF
        elif sys.stdin in ready:
            words = json.loads(sys.stdin.readline())
            break
    missed = struct.unpack("II", link.getsockopt(_PACKET, _STATISTICS, 8))[1]
    found = {
        name: sum(bytes.fromhex(word) in said for said in heard.values())
        for name, word in words.items()
    }
    total = sum(map(len, heard.values()))
    print(json.dumps({"found": found, "missed": missed, "bytes": total}), flush=True)


if __name__ == "__main__":
    main()
