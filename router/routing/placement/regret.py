"""How much a choice of workers cost more than the best one would have. Sans-IO.

Regret is known only afterwards. Every candidate that was compared is priced again by the same
cost model, fitted to what has come to light since:

- the answer's real length instead of the expected one;
- the rates that the workers report now instead of those of then;
- where the request itself measured something, that figure, for **every** candidate that shares the
  worker or the pair: the wait and the computing of the prompt for all candidates that compute on
  the same worker, the decoding for all with the same decode worker, the exposed transfer for the
  same pair.

The regret is the price of the choice made less that of the cheapest. What is measured counts for
all whom it concerns, so that one noisy step is no regret. What nobody can measure, the delay of
others (slowdown and crowding), is part of both prices as it was when the choice was made: a request
that waited longer so that others wait less was placed well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from router.routing.placement.cost import Candidate, Terms, WorkerLoad, price

REPRICED_CANDIDATES = 12
"""So many of the cheapest are priced again: the event loop pays for it at each request's end."""

_REGRETS_AT_ONCE = 64
_REGRETS_PER_S = 16.0


class Allowance:
    """Which requests are priced again: all while few end, and of many so many a second. Sans-IO.

    A regret takes as long as the rest of a request's end twice over. Which ones are left out does
    not depend on what their regret would be, so that the mean and the distribution stay true.
    """

    def __init__(self) -> None:
        self._left = float(_REGRETS_AT_ONCE)
        self._since_ns = 0

    def take(self, now_ns: int) -> bool:
        """Whether the one that ended now is among them."""
        gained = max(now_ns - self._since_ns, 0) / 1e9 * _REGRETS_PER_S
        self._since_ns = max(now_ns, self._since_ns)
        self._left = min(self._left + gained, _REGRETS_AT_ONCE)
        if self._left < 1:
            return False
        self._left -= 1
        return True


class FittedRates(NamedTuple):
    """What a worker reports of itself when the request is over; 0 where it has not measured."""

    prefill_tokens_per_s: float
    decode_step_s: float
    prefill_token_s: float = 0.0
    prefill_context_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one request took on the workers chosen.

    Attributes:
        queue_s: Waited at the worker that computed the prompt.
        compute_s: Computing the prompt.
        exposed_s: Transfer that the client waited for.
        decode_s: First token to last, without ``exposed_s``.
        answer_tokens: Of one choice.
    """

    queue_s: float
    compute_s: float
    exposed_s: float
    decode_s: float
    answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """``seconds`` is 0 where the choice was the best one; ``best`` is that one."""

    seconds: float
    chosen_s: float
    best_s: float
    best: Candidate


def regret(
    chosen: Candidate,
    compared: Sequence[Candidate],
    measured: Measured,
    fitted: Callable[[str], FittedRates | None],
    *,
    prompt_tokens: int,
    choices: int,
) -> Regret:
    """What the choice cost more than the best of the candidates, in seconds.

    Args:
        chosen: The placement that the request ran on.
        compared: Those that were priced when it was chosen, the cheapest first.
        measured: What it took.
        fitted: Asked for a worker's rates; workers that are gone keep those of then.
        prompt_tokens: Length of the prompt.
        choices: Answers that ran at once.
    """
    refitted_workers: dict[str, WorkerLoad] = {}

    def refit(worker: WorkerLoad) -> WorkerLoad:
        known = refitted_workers.get(worker.worker_id)
        if known is None:
            known = refitted_workers[worker.worker_id] = _refit(worker, fitted)
        return known

    def cost_s(candidate: Candidate) -> float:
        refitted = price(
            prefill=None if candidate.prefill is None else refit(candidate.prefill),
            decode=refit(candidate.decode),
            prompt_tokens=prompt_tokens,
            expected_tokens=measured.answer_tokens,
            choices=choices,
            moves_kv=measured.answer_tokens > 1,
        )
        return _with_measured(refitted, chosen, measured).total_s

    chosen_s = cost_s(chosen)
    best_s = chosen_s
    best = chosen
    for candidate in compared[:REPRICED_CANDIDATES]:
        if (other_s := cost_s(candidate)) < best_s:
            best_s = other_s
            best = candidate
    return Regret(seconds=chosen_s - best_s, chosen_s=chosen_s, best_s=best_s, best=best)


def _refit(worker: WorkerLoad, fitted: Callable[[str], FittedRates | None]) -> WorkerLoad:
    rates = fitted(worker.worker_id)
    if rates is None:
        return worker
    if rates.prefill_tokens_per_s:
        worker = msgspec.structs.replace(
            worker,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            prefill_token_s=rates.prefill_token_s,
            prefill_context_s=rates.prefill_context_s,
        )
    return msgspec.structs.replace(
        worker, decode_step_s=rates.decode_step_s or worker.decode_step_s
    )


def _with_measured(candidate: Candidate, chosen: Candidate, measured: Measured) -> Terms:
    """A candidate's terms, with what the request measured on the workers that both share."""
    terms = candidate.terms
    if candidate.computes.worker_id == chosen.computes.worker_id:
        terms = terms._replace(
            queue_s=measured.queue_s,
            compute_s=measured.compute_s,
            crowding_s=measured.compute_s * candidate.computes.crowding,
        )
    if candidate.decode.worker_id == chosen.decode.worker_id:
        terms = terms._replace(decode_s=measured.decode_s)
        if candidate.mode == chosen.mode == "disaggregated" and (
            candidate.computes.worker_id == chosen.computes.worker_id
        ):
            terms = terms._replace(transfer_s=measured.exposed_s)
    return terms
