"""Decides by predicted latencies which requests are served now, later or not at all. Sans-IO.

    request ── on time ───────────────────────────────────────────────▶ placed
       └────── late ──▶ lane ── on time after all, or a worker idle ──▶ placed
                │         └──── after ``LANE_WAIT`` times the limit ──▶ 429
                └─ lane full ─────────────────────────────────────────▶ 429, with Retry-After
    client that comes again after it ── late ──▶ front of the lane

Without it, an overloaded fleet serves all requests late. A request is judged by
the cost that placement has computed for it, before anything is booked or sent. The prediction is
corrected by what was learnt of its error.

The limit of the time to first token applies to the time that a request waits, not to its prompt's
own time: a limit in absolute seconds would refuse long prompts for ever.
"""

from collections import deque
from collections.abc import Hashable
from enum import Enum
from itertools import islice
from math import ceil, exp, expm1, inf
from typing import NamedTuple

from baton.types.slo import Slo
from baton.types.step_lines import STEP_SHARE_PER_STREAM
from router.routing.admission.promises import Promises
from router.routing.placement.cost import Candidate

HEADROOM = 0.8
"""Share of the limits up to which a request is predicted to be on time."""

OVER_SHARE = 0.5
"""Further share for tenants with more than their part: others find room below the limit."""

LANE_WORK = 1.0
"""Prompt work in the lane at most, in multiples of what the workers compute within the limit."""

LANE_WAIT = 6.0
"""Time in the lane at most, in multiples of the limit."""

YIELD_WAIT = 0.25
"""Share of its limit of waiting that a new request leaves to clients that are about to come again,
when these have enough work for the whole fleet."""

YIELD_STEP = 0.05
"""The same share of the ITL limit."""

CALM = 0.1
"""Time without new late requests until those of the lane run beside others, in multiples of the
limit: under lasting overload they would take the place of requests on time."""

STEP_QUANTILE = 0.95
"""Quantile of the errors of predicted steps by which predictions are corrected: the share of
responses to keep the ITL limit when the fleet is full."""

_IDLE = 0.01  # a worker with a shorter queue, in multiples of the limit, takes late requests
_ASKED = 4  # requests of the lane at once: each is priced anew
_SAMPLES = 500  # in the quantile of errors
_LEAST_SAMPLES = 32
_LEAST_TOKENS = 16  # of a response whose ITL counts: in short ones the transfer dominates
_MAX_RETRY_AFTER_S = 600.0


class GateRequest(NamedTuple):
    """A request at the gate.

    Attributes:
        slo: Its limits.
        waited_s: Time since its arrival.
        caller: Name by which its client is recognised when it comes again.
        over_share: Whether its tenant has more than its part of the fleet.
    """

    id: str
    slo: Slo
    waited_s: float
    caller: Hashable
    over_share: bool = False


class Prediction(NamedTuple):
    """Latencies of a request on the workers that placement has chosen for it.

    Attributes:
        wait_s: Time from placement until its prompt is computed, without the computation.
        compute_s: Time to compute what is not cached of the prompt.
        streams: Responses that the decode worker will generate when it begins this one.
        step_s: Time of a decode step then.
        begun: Requests that the decode worker has now, including prompts computed elsewhere.
    """

    wait_s: float
    compute_s: float
    streams: float
    step_s: float
    begun: int = 0


class SloDecision(Enum):
    """Decision on a request."""

    PLACE = "place"
    WAIT = "wait"
    REFUSE = "refuse"


class _Late(NamedTuple):
    work_s: float
    until_ns: int
    caller: Hashable
    returned: bool  # the client has come again at its time


class SloGate:
    """Decides on the requests of one router, and keeps the lane of late ones.

    Args:
        max_streams: Number of responses that a worker generates at once.
        max_late: Number of requests in the lane at most, however little work they are.
    """

    def __init__(self, max_streams: int, max_late: int) -> None:
        self._max_streams = max_streams
        self._max_late = max_late
        self._wait_errors_s = _Quantile(0.9, prior=0.0)
        self._firsts_s = _Quantile(0.5, prior=inf)
        self._prompts_tokens = _Quantile(0.5, prior=inf)
        self._step_ratios = _Quantile(STEP_QUANTILE, prior=1.0)
        self._lane: dict[str, _Late] = {}  # in the order of arrival
        self._returned: dict[str, int] = {}  # those of the lane that came again: until when on time
        self._work_s = 0.0
        self._late_ns = -(10**18)  # when a new request was last found late
        self.promises = Promises()

    def predict(self, chosen: Candidate, prompt_tokens: int, answer_tokens: float) -> Prediction:
        """Predict the latencies of a placement.

        Responses that run now have ended in part when the prompt is done, and prompts before it
        have become responses. Responses are assumed to end at random. A prompt that takes longer
        than usual finds as many responses as a usual one: later requests overtake it. Its own
        context counts as a usual one, or long prompts would be refused as long as short ones come;
        later requests are judged by all of it.

        ``prompt_tokens``: length of the prompt, times the number of its choices. ``answer_tokens``:
        mean length of responses.
        """
        terms = chosen.terms
        decode = chosen.decode
        first_s = terms.first_token_s
        running = decode.streams if decode.answering is None else decode.answering
        coming = max(decode.streams - running, 0)
        answer_s = max(answer_tokens * decode.decode_step_s, 1e-3)
        answers = max(min(first_s, self._firsts_s.value) / answer_s, 1e-6)
        still = exp(-answers)
        begun = -expm1(-answers) / answers
        streams = running * still + coming * begun
        if any(decode.decode_line):
            before = decode.answering_context * still + decode.coming_context * begun
            own_tokens = min(prompt_tokens, self._prompts_tokens.value)
            step_s = decode.decode_line.seconds(streams + 1, before + own_tokens)
        else:  # a worker that does not report it
            more = max(streams + 1 - running, 0.0)
            step_s = decode.decode_step_s * (1.0 + STEP_SHARE_PER_STREAM * more)
        return Prediction(
            wait_s=first_s - terms.compute_s,
            compute_s=terms.compute_s,
            streams=streams,
            step_s=step_s,
            begun=decode.streams,
        )

    def judge(
        self,
        request: GateRequest,
        prediction: Prediction,
        *,
        workers: int,
        now_ns: int,
    ) -> SloDecision:
        """Decide on a request that came now, or on one in the lane, which leaves it if placed.

        ``prediction``: its latencies on the workers that placement would choose. ``workers``:
        number of workers that compute prompts.
        """
        slo = request.slo
        caller = request.caller
        over_share = request.over_share
        late = self._lane.get(request.id)
        due = None if late is not None else self.promises.due(caller, now_ns)
        # A tenant that has more than its part gains nothing by coming again.
        returned = bool(due) and not over_share if late is None else late.returned
        early = due is False
        # Another client may send the same prompt, so an early call is not refused for that alone.
        pressure = 1.0 if early else 0.0 if returned else self.promises.pressure(now_ns)
        strict = over_share or early
        behind = not returned and self._is_awaited(now_ns)
        on_time = not behind and self._is_on_time(prediction, request, strict, pressure)
        if late is None and not on_time:
            self._late_ns = now_ns
        if on_time or (late is not None and self._may_run_late(prediction, slo, now_ns)):
            self.leave(request.id)
            self.promises.came(caller)
            self.promises.placed(prediction.compute_s, now_ns)
            return SloDecision.PLACE
        if late is not None:
            return SloDecision.WAIT
        if early:
            return SloDecision.REFUSE
        entry = _Late(
            work_s=prediction.compute_s,
            until_ns=now_ns + round(LANE_WAIT * slo.ttft_s * 1e9),
            caller=caller,
            returned=returned,
        )
        if self._defer(request.id, entry, LANE_WORK * slo.ttft_s * workers):
            if returned:
                self._returned[request.id] = now_ns + round(HEADROOM * slo.ttft_s * 1e9)
            self.promises.came(caller)
            return SloDecision.WAIT
        return SloDecision.REFUSE

    def _is_awaited(self, now_ns: int) -> bool:
        """Return whether a client that came again can still be on time: it goes first."""
        return any(until_ns > now_ns for until_ns in islice(reversed(self._returned.values()), 1))

    def _is_on_time(
        self,
        prediction: Prediction,
        request: GateRequest,
        strict: bool,
        pressure: float,
    ) -> bool:
        share = HEADROOM * (OVER_SHARE if strict else 1.0) * (1.0 - YIELD_WAIT * pressure)
        wait_s = request.waited_s + prediction.wait_s + self._wait_errors_s.value
        on_time = wait_s <= request.slo.ttft_s * share
        return on_time and self._keeps_step(prediction, request.slo, pressure)

    def _may_run_late(self, prediction: Prediction, slo: Slo, now_ns: int) -> bool:
        """Return whether the chosen workers are idle, or idle enough while no others are late."""
        alone = prediction.streams < 1
        idle = prediction.wait_s <= _IDLE * slo.ttft_s
        calm = now_ns - self._late_ns >= CALM * slo.ttft_s * 1e9
        return idle and (alone or (calm and self._keeps_step(prediction, slo)))

    def _keeps_step(self, prediction: Prediction, slo: Slo, pressure: float = 0.0) -> bool:
        step_s = prediction.step_s * self._step_ratios.value
        # A full decode worker lets the prompt wait, and until then prefill's load lacks it.
        has_room = prediction.begun + 1 <= self._max_streams
        return has_room and step_s <= slo.itl_s * (1.0 - YIELD_STEP * pressure)

    def learn_wait(self, predicted_s: float, actual_s: float, prompt_tokens: int) -> None:
        """Note the time from a placement to its first token, as predicted and as it was."""
        self._prompts_tokens.add(prompt_tokens)
        self._wait_errors_s.add(max(actual_s - predicted_s, 0.0))
        self._firsts_s.add(actual_s)

    def learn_step(self, predicted_s: float, actual_s: float, tokens: int) -> None:
        """Note the mean ITL of a response after its second token, as predicted and as it was."""
        if tokens >= _LEAST_TOKENS and predicted_s:
            self._step_ratios.add(actual_s / predicted_s)

    # --- the lane --------------------------------------------------------------------------------

    @property
    def late(self) -> int:
        """Number of requests in the lane."""
        return len(self._lane)

    def next(self) -> list[str]:
        """Return the requests of the lane to judge now: those that came again, then the newest.

        Under lasting overload the oldest cannot be good any more, and the newest can.
        """
        returned = islice(reversed(self._returned), _ASKED)
        return list(dict.fromkeys([*returned, *islice(reversed(self._lane), _ASKED)]))

    def _defer(self, request_id: str, entry: _Late, most_work_s: float) -> bool:
        work_s = self._work_s + entry.work_s
        too_much = work_s > most_work_s and not entry.returned
        if self._lane and (too_much or len(self._lane) >= self._max_late):
            return False
        self._lane[request_id] = entry
        self._work_s = work_s
        return True

    def leave(self, request_id: str) -> None:
        """Take a request out of the lane; ignore others."""
        late = self._lane.pop(request_id, None)
        self._returned.pop(request_id, None)
        if late is not None:
            self._work_s = self._work_s - late.work_s if self._lane else 0.0

    def expired(self, now_ns: int) -> list[str]:
        """Return the requests whose time in the lane is over."""
        return [name for name, late in self._lane.items() if late.until_ns <= now_ns]

    def retry_after_s(
        self, prediction: Prediction, workers: int, now_ns: int, caller: Hashable
    ) -> float:
        """Return when a refused client should come again, in whole seconds.

        That is when the work of those before it is done. It is let in then before new requests
        (`router.routing.admission.promises`).
        """
        lane_s = self._work_s / max(workers, 1)
        begin_ns = now_ns + round((lane_s + prediction.wait_s) * 1e9)
        after_s = self.promises.promise(
            caller, prediction.compute_s, max(workers, 1), begin_ns, now_ns, _MAX_RETRY_AFTER_S
        )
        return float(max(ceil(after_s), 1))

    def expire(self, request_id: str, workers: int, now_ns: int) -> float:
        """Take out a request whose time in the lane is over; return its `retry_after_s`."""
        late = self._lane[request_id]
        self.leave(request_id)
        alone = Prediction(wait_s=0.0, compute_s=late.work_s, streams=0.0, step_s=0.0)
        return self.retry_after_s(alone, workers, now_ns, late.caller)


class _Quantile:
    """Quantile of the last samples, computed again after every eighth of them."""

    def __init__(self, share: float, *, prior: float) -> None:
        self.value = prior
        self._share = share
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._new = 0

    def add(self, sample: float) -> None:
        self._samples.append(sample)
        self._new += 1
        if self._new >= 8 and len(self._samples) >= _LEAST_SAMPLES:
            self._new = 0
            ordered = sorted(self._samples)
            self.value = ordered[int(self._share * (len(ordered) - 1))]
