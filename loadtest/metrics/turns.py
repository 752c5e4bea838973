"""Figures of agents' turns: time to first token, and how much of the prompt was cached."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

import msgspec

from loadtest.client.records import CallRecord
from loadtest.metrics.request_figures import answer_tokens, ttft_s
from loadtest.metrics.summary import Distribution


class TurnFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one turn over all sessions, or of all turns from the second on.

    A share is None without the server's counts.

    Attributes:
        turn: Number from 1, or "from 2".
        cached_share: Cached ÷ prompt tokens, mean over sessions.
        cached_share_min: The same of the session with the lowest share.
        repeated_share: Share of prompt tokens that the previous turn's prompt and response already
            had, over all sessions: a server that forgets nothing can have these cached.
        ttft_to_alone: Median of TTFT ÷ TTFT of the same turn of a session alone.
    """

    turn: str
    requests: int
    ttft_s: Distribution | None
    cached_share: float | None
    cached_share_min: float | None
    repeated_share: float | None
    ttft_to_alone: float | None


Key = tuple[int | None, int]
"""Session and number of a turn."""


def turn_figures(
    records: Sequence[CallRecord], alone: Sequence[CallRecord] = ()
) -> list[TurnFigures]:
    """Return the figures of each turn, and of all turns from the second on.

    ``alone`` has the records of a session that ran alone.
    """
    by_key = {(record.session, record.turn): record for record in records}
    first_s = {record.turn: ttft_s(record) for record in alone}
    numbers = sorted({record.turn for record in records})
    turns = [
        _figures(str(number), [r for r in records if r.turn == number], by_key, first_s)
        for number in numbers
    ]
    later = [record for record in records if record.turn > 1]
    return [*turns, _figures("from 2", later, by_key, first_s)] if later else turns


def _figures(
    turn: str,
    records: Sequence[CallRecord],
    by_key: Mapping[Key, CallRecord],
    alone_s: Mapping[int, float | None],
) -> TurnFigures:
    shares = _cached_shares(records)
    ratios = [
        found_s / reference_s
        for record in records
        if (found_s := ttft_s(record)) is not None and (reference_s := alone_s.get(record.turn))
    ]
    return TurnFigures(
        turn=turn,
        requests=len(records),
        ttft_s=Distribution.of(s for s in map(ttft_s, records) if s is not None),
        cached_share=fmean(shares) if shares else None,
        cached_share_min=min(shares, default=None),
        repeated_share=_repeated_share(records, by_key),
        ttft_to_alone=median(ratios) if ratios else None,
    )


def _cached_shares(records: Iterable[CallRecord]) -> list[float]:
    """Return the share of each session with counted requests."""
    cached: dict[int | None, int] = defaultdict(int)
    prompts: dict[int | None, int] = defaultdict(int)
    for record in records:
        if record.cached_tokens is not None and record.prompt_tokens:
            cached[record.session] += record.cached_tokens
            prompts[record.session] += record.prompt_tokens
    return [cached[session] / tokens for session, tokens in prompts.items()]


def _repeated_share(
    records: Iterable[CallRecord], by_key: Mapping[Key, CallRecord]
) -> float | None:
    repeated = 0
    prompts = 0
    for record in records:
        before = by_key.get((record.session, record.turn - 1))
        if before is not None and before.prompt_tokens and record.prompt_tokens:
            repeated += min(before.prompt_tokens + answer_tokens(before), record.prompt_tokens)
            prompts += record.prompt_tokens
    return repeated / prompts if prompts else None
