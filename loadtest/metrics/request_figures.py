"""The figures of one request. All are seconds; None where the request never came so far.

The clock starts at the moment the plan wanted the request sent: a client or a server that was busy
at that moment cannot hide it (coordinated omission).
"""

import math

import numpy as np
from numpy.typing import NDArray

from loadtest.client.records import RequestRecord

FORMULAS = {
    "ttft_s": "first chunk with text − intended send; time to first token",
    "ttft_from_send_s": "first chunk with text − actual send (to connect is part of it)",
    "second_token_s": "second chunk with text − intended send",
    "itl_s": "every gap between two chunks of one answer, pooled over all answers",
    "itl_mean_s": "mean gap of one answer",
    "itl_worst_tenth_s": "mean of the worst 10 % of an answer's gaps (Mooncake's TBT)",
    "itl_longest_s": "an answer's longest gap",
    "tpot_s": "(last chunk − first chunk) ÷ (answer tokens − 1)",
    "e2e_s": "end − intended send",
}


def ttft_s(record: RequestRecord) -> float | None:
    """Time to the first token, from the intended send."""
    return record.chunk_s[0] - record.intended_s if record.chunk_s else None


def ttft_from_send_s(record: RequestRecord) -> float | None:
    """Time to the first token, from the actual send."""
    return record.chunk_s[0] - record.sent_s if record.chunk_s else None


def second_token_s(record: RequestRecord) -> float | None:
    """Time to the second chunk, where the hand-off between prefill and decode shows."""
    return record.chunk_s[1] - record.intended_s if len(record.chunk_s) > 1 else None


def gaps_s(record: RequestRecord) -> NDArray[np.float64]:
    """Gaps between chunks, shape (chunks - 1,)."""
    return np.diff(np.array(record.chunk_s, dtype=np.float64))


def itl_mean_s(record: RequestRecord) -> float | None:
    """Mean gap."""
    gaps = gaps_s(record)
    return float(gaps.mean()) if gaps.size else None


def itl_worst_tenth_s(record: RequestRecord) -> float | None:
    """Mean of the worst tenth of the gaps, of one gap at least."""
    gaps = np.sort(gaps_s(record))
    if not gaps.size:
        return None
    return float(gaps[-math.ceil(gaps.size / 10) :].mean())


def itl_longest_s(record: RequestRecord) -> float | None:
    """The longest gap."""
    gaps = gaps_s(record)
    return float(gaps.max()) if gaps.size else None


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token after the first one; a chunk may hold several tokens.

    Where the server did not count its tokens, its chunks are counted.
    """
    tokens = answer_tokens(record)
    if len(record.chunk_s) < 2 or tokens < 2:
        return None
    return (record.chunk_s[-1] - record.chunk_s[0]) / (tokens - 1)


def e2e_s(record: RequestRecord) -> float | None:
    """From the intended send to the end, of requests that were answered."""
    return record.ended_s - record.intended_s if record.end == "ok" else None


def answer_tokens(record: RequestRecord) -> int:
    """Tokens of the answer as the server counted them, else its chunks."""
    return len(record.chunk_s) if record.answer_tokens is None else record.answer_tokens


def late_s(record: RequestRecord) -> float:
    """How late the client turned to the request; how long connecting took is the server's."""
    return record.sent_s - record.intended_s
