"""Places requests: finds eligible workers, prices the choices, and books the load."""

import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic_ns
from typing import NamedTuple

from batonpb.common_pb2 import Capabilities

from baton.telemetry.running_mean import RunningMean
from baton.types.errors import UnavailableError
from baton.types.geometry import context_tokens
from baton.wire.compatibility import external_engine
from router.request import GenerationRequest
from router.routing.placement.block_table import Hashes, packed
from router.routing.placement.booked_load import Booking, LoadBook
from router.routing.placement.computing_prompts import LEAST_S, ComputingPrompts, is_soon_there
from router.routing.placement.congestion import Crowding
from router.routing.placement.context_room import is_among, with_room
from router.routing.placement.cost import (
    PAIRED_OF_A_ROLE,
    Candidate,
    WorkerLoad,
    candidates,
    choose,
)
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.placement.prefix_sources import Source
from router.routing.placement.pricing import Asked
from router.routing.placement.prompt_hashes import HashSeedCache, prompt_hashes
from router.routing.placement.resident_sessions import BEGINS, PromptSession, ResidentSessions
from router.routing.placement.shortlist import PromptToPlace, Shortlist, described
from router.routing.placement.worker_columns import Workers
from router.routing.placement.worker_load import NO_TIERS, LoadReader, Rates, Reports, loads_of
from router.routing.workers.slot import WorkerSlot
from router.settings import LaneSettings

_INITIAL_OUTPUT_TOKENS = 128.0
_OUTPUT_WEIGHT = 0.05  # of one response in the mean of their lengths
_STEP_S = 0.03
_NEVER_NS = 1 << 62  # no report shows a request past Baton


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Workers that serve a request.

    Attributes:
        prefix: Sources that the computing worker pulls leading blocks from, in order.
        candidates: Cheapest candidates, for ``GET /fleet/requests/{id}``.
        placed_ns: Time of the decision and the booking, on the monotonic clock.
        spread: Whether a worker with fewer recent sessions was preferred to a cheaper one.
    """

    chosen: Candidate
    candidates: Sequence[Candidate]
    placed_ns: int
    prefix: Sequence[Source] = ()
    spread: bool = False

    @property
    def decode_id(self) -> str:
        """Worker that holds the request."""
        return self.chosen.decode.worker_id

    @property
    def prefill_id(self) -> str | None:
        """Worker that computes the prompt; None if the decode worker does."""
        return self.chosen.prefill.worker_id if self.chosen.prefill is not None else None


class Quote(NamedTuple):
    """A placement that is not booked yet, and the packed hashes of the prompt's full blocks.

    ``session`` is the one that the prompt continues or begins.
    """

    placement: Placement
    hashes: bytes
    session: PromptSession = BEGINS
    may_pull: bool = False  # leading blocks, if the computing worker lacks them


class Placer:
    """Chooses workers for requests and books the load; sends nothing.

    Args:
        hashes_of: Hash function of a prompt's full blocks; None for that of the workers.
    """

    def __init__(
        self,
        settings: LaneSettings,
        workers: Workers,
        prefix_index: PrefixIndex,
        *,
        clock_ns: Callable[[], int] = monotonic_ns,
        random_source: random.Random | None = None,
        hashes_of: Callable[[GenerationRequest, Sequence[WorkerSlot]], Hashes] | None = None,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._prefix_index = prefix_index
        self.book = LoadBook()
        self.computing = ComputingPrompts(prefix_index, self.book)
        self._sessions = ResidentSessions()
        self._seeds = HashSeedCache()
        self.chain_of = self._seeds.chain  # for prompts that are placed next
        self._news = workers.news()
        self._reports = Reports()
        self._crowding = Crowding()
        self.clock_ns = clock_ns
        self._random = random_source or random.Random()
        self._shortlist = Shortlist(self._reports, self._crowding, self._random.getrandbits(32))
        self._hashes_of = hashes_of or partial(prompt_hashes, seeds=self._seeds)
        self._output_tokens = RunningMean(_OUTPUT_WEIGHT, prior=_INITIAL_OUTPUT_TOKENS)

    @property
    def answer_tokens(self) -> float:
        """Expected length of one response."""
        return self._output_tokens.value

    @property
    def answer_s(self) -> float:
        """Approximate expected time to generate one response."""
        return self._output_tokens.value * _STEP_S

    def check_served(self, request: GenerationRequest) -> None:
        """Refuse a request that no ready worker could serve.

        Raises:
            UnavailableError: The message lists the workers, or the missing role.
        """
        usable = self._workers.usable
        if not usable:
            states = sorted(f"{slot.worker_id} is {slot.state}" for slot in self._workers)
            raise UnavailableError(f"no worker is ready ({', '.join(states[:8]) or 'none known'})")
        if request.mode != "disaggregated":
            return
        for role in ("prefill", "decode"):
            if all(slot.role != role for slot in usable):
                raise UnavailableError(
                    f"x-baton-mode is disaggregated, but no {role} worker is ready"
                )

    def awaits_start(self, request: GenerationRequest) -> bool:
        """Return whether no worker is ready, or one starts without which the mode is impossible."""
        usable = self._workers.usable
        if not usable or request.mode != "disaggregated":
            return not usable
        missing = {"prefill", "decode"} - {slot.role for slot in usable}
        return any(slot.role in missing and slot.state == "starting" for slot in self._workers)

    def cost_tokens(self, request: GenerationRequest, uncached_tokens: int) -> float:
        """Return the work of a request: prompt tokens to compute plus expected output tokens."""
        usual_tokens = round(self._output_tokens.value)  # hints of clients move no request forward
        return uncached_tokens + request.sampling.n * min(request.sampling.max_tokens, usual_tokens)

    def _expected_tokens(self, request: GenerationRequest) -> int:
        expected_tokens = request.expected_tokens or round(self._output_tokens.value)
        return min(request.sampling.max_tokens, expected_tokens)

    def learn(self, request: GenerationRequest, completion_tokens: int) -> None:
        """Add the length of a complete response to the running mean."""
        if request.pooling or request.prompt_logprobs_only:
            return
        self._output_tokens.add(completion_tokens / request.sampling.n)

    def eligible(self, request: GenerationRequest, avoid: bytes = b"") -> list[WorkerSlot]:
        """Return workers that may serve the request; ``avoid`` is an incarnation that failed."""
        usable = list(self._workers.usable)
        if avoid:
            usable = [slot for slot in usable if slot.incarnation != avoid]
        among = request.among
        if request.pinned is not None:
            among = frozenset(filter(None, (request.pinned.prefill, request.pinned.decode)))
        if among is not None:
            usable = [slot for slot in usable if slot.worker_id in among]
        if self._settings.attached:
            most = self._expected_tokens(request)
            return with_room(request, most, usable, self._workers.usable)
        return usable

    def could_place(self, request: GenerationRequest, avoid: bytes) -> bool:
        """Return whether workers other than the incarnation ``avoid`` can serve the request now."""
        roles = {slot.role for slot in self.eligible(request, avoid)}
        return roles >= {"prefill", "decode"} if request.mode == "disaggregated" else bool(roles)

    def hash_seed(self, request: GenerationRequest, capabilities: Capabilities) -> bytes:
        """Return the seed of the request's block hashes on a worker with these capabilities."""
        return self._seeds.seed(request, capabilities)

    def place(
        self, request: GenerationRequest, avoid: bytes = b"", quote: Quote | None = None
    ) -> Placement:
        """Choose workers, not the incarnation ``avoid``, and book the load for the next choice.

        With a ``quote``, which must be the last one, they are chosen already.

        Raises:
            UnavailableError: No ready worker can serve the request in its mode.
        """
        if quote is None:
            quote = self.quote(request, avoid)
        self._book_quote(request, quote)
        return quote.placement

    def quote(
        self, request: GenerationRequest, avoid: bytes = b"", *, may_spread: bool = True
    ) -> Quote:
        """Choose workers as `place` does, but book nothing.

        Without ``may_spread``, the number of sessions at a worker does not count.

        Raises:
            UnavailableError: No ready worker can serve the request in its mode.
        """
        request = self._on_one_engine(request)
        now_ns = self.clock_ns()
        rates = self._shortlist.update(self._workers, now_ns, self._news)
        usable = self._shortlist.usable
        if not usable:
            raise UnavailableError("no worker is ready")
        hashes = packed(self._hashes_of(request, usable))
        reusable = b"" if request.whole_prompt else hashes
        held = self._prefix_index.prefixes(reusable, now_ns) if reusable else {}
        sources: tuple[Source, ...] = ()
        may_pull = self._settings.pull_prefixes and request.pinned is None and not request.images
        # Blocks that a worker is only expected to store soon cannot be pulled.
        there = self._prefix_index.prefixes(reusable) if held else {}
        if may_pull and there:
            sources = self._shortlist.sources(there)
        if reusable and self.computing:
            may_spread &= self.computing.add_held(reusable, held) <= max(there.values(), default=0)
        session = self._sessions.find(hashes, max(held.values(), default=0))
        prompt = PromptToPlace(request, reusable, held, sources, avoid, session)
        may_spread = session.continues if session.is_cached else may_spread
        choice = self._cheapest_of_all(prompt, rates, now_ns, may_spread=may_spread)
        if self._settings.attached:
            rooms = frozenset(slot.worker_id for slot in self.eligible(request, avoid))
            if choice is None or not is_among(choice[0], rooms):
                prompt = prompt._replace(request=replace(request, among=rooms))
                choice = None
        if choice is None:
            choice = self._cheapest_of_few(prompt, rates, now_ns)
        chosen, compared = choice
        is_cheapest = chosen.terms.total_s < compared[0].terms.total_s + self._settings.tie_s
        placement = Placement(
            chosen=chosen,
            candidates=compared,
            placed_ns=now_ns,
            prefix=chosen.links,
            spread=not is_cheapest,
        )
        return Quote(placement, hashes, session, may_pull)

    def _on_one_engine(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with the mode that an external engine can serve it in.

        Such an engine takes over the KV of a prompt and its first token, but no other output, and
        no images.
        """
        must = request.goes_on or request.whole_prompt or request.sampling.tracks_output
        must = must or bool(request.images)
        if request.mode != "auto" or not (self._settings.external and must):
            return request
        return replace(request, mode="colocated")

    def _book_quote(self, request: GenerationRequest, quote: Quote) -> None:
        chosen = quote.placement.chosen
        at_ns = quote.placement.placed_ns
        self._book_load(request, chosen, at_ns)
        if request.probe:
            return
        computes = chosen.computes
        length = len(request.prompt)
        self._crowding.placed(length, chosen.uncached_tokens, self._sessions.continued_share.value)
        is_long = computes.prompt_s(length, context_tokens(0, length)) >= LEAST_S
        session = quote.session
        self._sessions.note(quote.hashes, session.tip, computes.worker_id, at_ns, is_long=is_long)
        if is_long and session.continues:
            self._sessions.turn_s.add(chosen.terms.compute_s)
        if self.computing.begin(request.request_id, quote.hashes, chosen, at_ns):
            return
        self._prefix_index.expect(computes.incarnation, quote.hashes, at_ns)
        if chosen.prefill is not None and is_soon_there(chosen.decode, length):
            self._prefix_index.expect(chosen.decode.incarnation, quote.hashes, at_ns)

    def computed(self, request_id: str, now_ns: int) -> None:
        """Note the first token of a request: its prompt is computed, its blocks appear soon."""
        self.book.computed(request_id, now_ns)
        prompt = self.computing.end(request_id, now_ns)
        if prompt is not None:
            self._prefix_index.expect(prompt.worker.incarnation, prompt.hashes, now_ns)

    def release(self, request_id: str, now_ns: int | None = None) -> None:
        """End a placement; ``now_ns`` is set if the request ran to its end."""
        self.book.release(request_id, now_ns)
        self.computing.end(request_id)

    def _cheapest_of_all(
        self, prompt: PromptToPlace, rates: Rates, now_ns: int, *, may_spread: bool
    ) -> tuple[Candidate, Sequence[Candidate]] | None:
        """Return the choice and the candidates; None if not all workers can be priced at once."""
        request = prompt.request
        limited = request.pinned is not None or request.among is not None
        if limited or request.goes_on or request.adapter_digest:
            return None
        asked = Asked(
            mode=request.mode,
            prompt_tokens=len(request.prompt),
            expected_tokens=self._expected_tokens(request),
            choices=request.sampling.n,
            moves_kv=request.sampling.max_tokens > 1,
            sources=prompt.sources,
            continues=prompt.session.continues,
        )
        placed = self._shortlist.cheapest(asked, prompt.held, self.book, now_ns, avoid=prompt.avoid)
        if placed is None:
            return None
        if not placed:
            raise _unmet(request)
        wait_per_s = partial(self._crowding.wait_per_s, continues=asked.continues)
        waits = {role: wait_per_s(role) for role in ("prefill", "decode")}
        compared = described(placed, asked, rates, waits)
        ties: Sequence[int] = range(
            bisect_left(placed.costs_s, placed.costs_s[0] + self._settings.tie_s)
        )
        if not prompt.session.tip and len(ties) > 1:
            equal = placed[: len(ties)]
            ties = self._sessions.with_fewest([one.computes.slot.worker_id for one in equal])
        if may_spread and prompt.cached_blocks:
            workers = [placement.computes.slot.worker_id for placement in placed]
            priced = zip(workers, placed.costs_s, strict=True)
            ties = self._with_few_sessions(priced, compared[0], prompt) or ties
        return compared[self._random.choice(ties)], compared

    def _with_few_sessions(
        self, priced: Iterable[tuple[str, float]], cheapest: Candidate, prompt: PromptToPlace
    ) -> list[int]:
        """Return the best placements of a session's turn, if later turns count as well.

        Without a long common prefix the list is empty: nothing draws sessions to one worker.
        """
        tokens = prompt.cached_blocks * cheapest.computes.block_tokens
        if cheapest.computes.prompt_s(tokens, context_tokens(0, tokens)) < LEAST_S:
            return []
        workers, alone_s = zip(*priced, strict=True)
        turn_s = max(cheapest.terms.compute_s, self._sessions.turn_s.value)
        tip = prompt.session.tip if prompt.session.is_cached else b""
        delays = zip(alone_s, self._sessions.expected_delays(workers, tip), strict=True)
        costs_s = [cost_s + turn_s * turns for cost_s, turns in delays]
        limit_s = min(costs_s) + self._settings.tie_s
        return [index for index, cost_s in enumerate(costs_s) if cost_s < limit_s]

    def _cheapest_of_few(
        self, prompt: PromptToPlace, rates: Rates, now_ns: int
    ) -> tuple[Candidate, Sequence[Candidate]]:
        """Choose among the workers of the shortlist, or those that the request is limited to."""
        request = prompt.request
        if request.pinned is None and request.among is None:
            loads = self._worth_pricing(prompt, rates, now_ns)
        else:
            slots = self.eligible(request, prompt.avoid)
            loads = loads_of(slots, prompt.hashes, self._prefix_index, self.book, now_ns)
        compared = candidates(
            loads,
            mode=request.mode,
            prompt_tokens=len(request.prompt),
            expected_tokens=self._expected_tokens(request),
            choices=request.sampling.n,
            moves_kv=request.sampling.max_tokens > 1,
        )
        if not compared:
            raise _unmet(request)
        return choose(compared, tie_s=self._settings.tie_s, pick=self._random.choice), compared

    def _worth_pricing(self, prompt: PromptToPlace, rates: Rates, now_ns: int) -> list[WorkerLoad]:
        """Return the few workers that may be the best, as input of the cost model."""
        request = prompt.request
        usable = self._shortlist.usable
        below = self._shortlist.tiers(prompt.held)
        tiers = {usable[index].worker_id: tier for index, tier in below.items()}
        best = self._shortlist.best(prompt, self.book, now_ns, keep=PAIRED_OF_A_ROLE)
        reader = LoadReader(self.book, rates, self._reports, self._crowding)
        return [
            reader.of(
                slot,
                cached_blocks,
                request.adapter_digest,
                prompt.sources,
                tiers.get(slot.worker_id, NO_TIERS),
            )
            for slot, cached_blocks in best
        ]

    def _book_load(self, request: GenerationRequest, chosen: Candidate, now_ns: int) -> None:
        computes = chosen.computes
        decodes = chosen.decode
        length = len(request.prompt)
        tokens = chosen.uncached_tokens
        context = context_tokens(length - tokens, length)
        book = partial(self.book.book, request_id=request.request_id)
        slot = self._workers.get(computes.worker_id)
        link = slot.link if slot is not None else None
        whole = link is not None and bool(external_engine(link.capabilities))
        load = partial(Booking, adapter=request.adapter_digest, whole=whole)
        # The engine gets the request after the pulls, and prefill after a step of decode.
        delay_s = chosen.terms.queue_s + chosen.terms.pull_s if chosen.links else 0.0
        if computes is not decodes:
            before_s = decodes.decode_step_s + _place_wait_s(
                decodes, self._settings.window_requests, self.answer_tokens
            )
            seen_ns = now_ns + round((delay_s + before_s) * 1e9)
            prompt = load(tokens=tokens, context=context, streams=0, at_ns=seen_ns)
            book(computes.worker_id, booking=prompt)
            tokens = context = 0
            delay_s = 0.0
        streams = request.sampling.n
        seen_ns = _NEVER_NS if request.past_baton else now_ns + round(delay_s * 1e9)
        rest = load(
            tokens=tokens,
            context=context,
            streams=streams,
            stream_tokens=streams * length,
            at_ns=seen_ns,
        )
        book(decodes.worker_id, booking=rest)


def _place_wait_s(decodes: WorkerLoad, places: int, answer_tokens: float) -> float:
    """Return how long a prompt waits for a place in a full batch, before prefill has it."""
    ahead = max(decodes.streams + 1 - places, 0)
    return ahead / places * answer_tokens * decodes.decode_step_s


def _unmet(request: GenerationRequest) -> UnavailableError:
    return UnavailableError(f"x-baton-mode is {request.mode}, which the ready workers cannot serve")
