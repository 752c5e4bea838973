"""Figures of one request, in seconds; None if the request did not get that far.

Time counts from the intended send: a client or a server that is busy at that moment cannot hide it
(coordinated omission).
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from loadtest.client.records import CallRecord

FORMULAS = {
    "ttft_s": "first chunk with text − intended send; time to first token",
    "ttft_from_send_s": "first chunk with text − actual send (includes connecting)",
    "second_token_s": "second chunk with text − intended send",
    "itl_s": "time between two chunks of one response, pooled over all responses",
    "itl_mean_s": "mean ITL of one response",
    "itl_worst_tenth_s": "mean of the worst 10 % of a response's ITLs (Mooncake's TBT)",
    "itl_longest_s": "longest ITL of a response",
    "tpot_s": "(last chunk − first chunk) ÷ (output tokens − 1)",
    "e2e_s": "end − intended send",
}


def ttft_s(record: CallRecord) -> float | None:
    """Return the time to the first token, from the intended send."""
    return record.chunk_s[0] - record.intended_s if record.chunk_s else None


def ttft_from_send_s(record: CallRecord) -> float | None:
    """Return the time to the first token, from the actual send."""
    return record.chunk_s[0] - record.sent_s if record.chunk_s else None


def second_token_s(record: CallRecord) -> float | None:
    """Return the time to the second chunk, which shows the cost of a KV transfer."""
    return record.chunk_s[1] - record.intended_s if len(record.chunk_s) > 1 else None


def gaps_s(record: CallRecord) -> NDArray[np.float64]:
    """Return the times between chunks, shape (chunks - 1,)."""
    return np.diff(np.array(record.chunk_s, dtype=np.float64))


def itl_mean_s(record: CallRecord) -> float | None:
    """Return the mean time between chunks."""
    gaps = gaps_s(record)
    return float(gaps.mean()) if gaps.size else None


def itl_worst_tenth_s(record: CallRecord) -> float | None:
    """Return the mean of the longest tenth of the times between chunks (at least one)."""
    gaps = np.sort(gaps_s(record))
    if not gaps.size:
        return None
    return float(gaps[-math.ceil(gaps.size / 10) :].mean())


def itl_longest_s(record: CallRecord) -> float | None:
    """Return the longest time between chunks."""
    gaps = gaps_s(record)
    return float(gaps.max()) if gaps.size else None


def tpot_s(record: CallRecord) -> float | None:
    """Return the time per output token after the first; a chunk may contain several tokens.

    Without token counts from the server, chunks are counted.
    """
    tokens = answer_tokens(record)
    if len(record.chunk_s) < 2 or tokens < 2:
        return None
    return (record.chunk_s[-1] - record.chunk_s[0]) / (tokens - 1)


def tpot_from_second_s(record: CallRecord) -> float | None:
    """Return the time per output token after the second chunk, without the KV transfer."""
    tokens = answer_tokens(record)
    if len(record.chunk_s) < 3 or tokens < 3:
        return None
    return (record.chunk_s[-1] - record.chunk_s[1]) / (tokens - 2)


def e2e_s(record: CallRecord) -> float | None:
    """Return the time from the intended send to the end of a complete response."""
    return record.ended_s - record.intended_s if record.end == "ok" else None


def answer_tokens(record: CallRecord) -> int:
    """Return the output tokens as counted by the server, else the number of chunks."""
    return len(record.chunk_s) if record.answer_tokens is None else record.answer_tokens


def late_s(record: CallRecord) -> float:
    """Return the client's delay before it started to connect, which excludes connecting."""
    return record.sent_s - record.intended_s


PER_REQUEST: dict[str, Callable[[CallRecord], float | None]] = {
    "ttft_s": ttft_s,
    "ttft_from_send_s": ttft_from_send_s,
    "second_token_s": second_token_s,
    "itl_mean_s": itl_mean_s,
    "itl_worst_tenth_s": itl_worst_tenth_s,
    "itl_longest_s": itl_longest_s,
    "tpot_s": tpot_s,
    "e2e_s": e2e_s,
}
