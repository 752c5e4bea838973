"""Regret: cost of the chosen placement minus cost of the best one. Sans-IO.

Regret is known only afterwards. Every candidate is priced again by the same cost model, with what
has become known since:

- the actual length of the response instead of the expected one;
- the rates that the workers report now;
- the request's own measurements, for **every** candidate that shares the worker or the pair: queue
  and compute time of the prompt for all candidates that compute on the same worker, decode time for
  all with the same decode worker, exposed transfer for the same pair.

Measurements count for all candidates that they concern, so that one noisy step is no regret. The
delay of other requests (slowdown and crowding) cannot be measured and is part of both prices as it
was at the choice: a request that waited longer so that others wait less was placed well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from batonpb.common_pb2 import WorkerStatus

from baton.types.step_lines import DecodeLine
from router.routing.placement.cost import Candidate, Terms, WorkerLoad, price

REPRICED_CANDIDATES = 12
"""Number of cheapest candidates that are priced again at each request's end, in the event loop."""

_REGRETS_AT_ONCE = 64
_REGRETS_PER_S = 16.0


class Allowance:
    """Rate limit of repricing: all requests while few end, a fixed rate otherwise. Sans-IO.

    A regret takes twice as long as the rest of a request's end. The choice of requests does not
    depend on their regret, so that mean and distribution are unbiased.
    """

    def __init__(self) -> None:
        self._left = float(_REGRETS_AT_ONCE)
        self._since_ns = 0

    def take(self, now_ns: int) -> bool:
        """Return whether the request that ended now is priced again."""
        gained = max(now_ns - self._since_ns, 0) / 1e9 * _REGRETS_PER_S
        self._since_ns = max(now_ns, self._since_ns)
        self._left = min(self._left + gained, _REGRETS_AT_ONCE)
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRequest:
    """Measurements of one request on the chosen workers.

    Attributes:
        exposed_s: Transfer time that the client waited for.
        decode_s: First token to last, without ``exposed_s``.
        answer_tokens: Output tokens of one choice.
    """

    queue_s: float
    compute_s: float
    exposed_s: float
    decode_s: float
    answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """Regret of one choice; ``seconds`` is 0 if it was ``best``."""

    seconds: float
    chosen_s: float
    best_s: float
    best: Candidate


def regret(
    chosen: Candidate,
    compared: Sequence[Candidate],
    measured: MeasuredRequest,
    fitted: Callable[[str], WorkerStatus | None],
    *,
    prompt_tokens: int,
    choices: int,
) -> Regret:
    """Return the regret of a choice among ``compared``, which is sorted.

    ``fitted`` gives a worker's last report; None for one that is gone, whose old rates are used.
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


def _refit(worker: WorkerLoad, fitted: Callable[[str], WorkerStatus | None]) -> WorkerLoad:
    rates = fitted(worker.worker_id)
    if rates is None:
        return worker
    line = DecodeLine(rates.decode_base_s, rates.decode_row_s, rates.decode_context_s)
    if rates.prefill_tokens_per_s:
        worker = msgspec.structs.replace(
            worker,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            prefill_token_s=rates.prefill_token_s,
            prefill_context_s=rates.prefill_context_s,
        )
    return msgspec.structs.replace(
        worker,
        decode_step_s=rates.decode_step_s or worker.decode_step_s,
        decode_line=line if any(line) else worker.decode_line,
    )


def _with_measured(candidate: Candidate, chosen: Candidate, measured: MeasuredRequest) -> Terms:
    """Return a candidate's terms, with the measurements on workers shared with the choice."""
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
