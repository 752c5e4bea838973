"""Places a request: which workers can serve it, what each choice costs, and the booking."""

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import NamedTuple, Protocol

from batonpb.common_pb2 import Capabilities

from baton.registry.types import TIERS, tier_incarnation
from baton.telemetry.running_mean import RunningMean
from baton.types.errors import UnavailableError
from baton.types.geometry import context_tokens
from router.request import GenerationRequest
from router.routing.placement.block_table import HASH_BYTES, Hashes, packed
from router.routing.placement.booked_load import LoadBook
from router.routing.placement.chain import Giver
from router.routing.placement.cost import (
    PAIRED_OF_A_ROLE,
    Candidate,
    WorkerLoad,
    candidates,
    choose,
)
from router.routing.placement.crowding import Crowding
from router.routing.placement.placed import Described
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.placement.pricing import Asked
from router.routing.placement.prompt_hashes import HashSeedCache, prompt_hashes
from router.routing.placement.shortlist import Shortlist
from router.routing.placement.worker_load import NO_TIERS, Rates, Reports, load_of, loads_of
from router.routing.workers.table import Slot
from router.settings import RouterSettings

_INITIAL_ANSWER_TOKENS = 128.0
_ANSWER_WEIGHT = 0.05  # of one answer in the mean of their lengths
_STEP_S = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a request is to run.

    Attributes:
        chosen: The workers, and what they are predicted to cost.
        prefix: From which workers whoever computes the prompt is to pull leading blocks, in order.
        candidates: The cheapest of those that were compared, for ``GET /fleet/requests/{id}``.
        placed_ns: When it was decided and booked, on the monotonic clock.
    """

    chosen: Candidate
    candidates: Sequence[Candidate]
    placed_ns: int
    prefix: Sequence[Giver] = ()

    @property
    def decode_id(self) -> str:
        """The worker that holds the request."""
        return self.chosen.decode.worker_id

    @property
    def prefill_id(self) -> str | None:
        """The worker that computes the prompt for it; None where it does so itself."""
        return self.chosen.prefill.worker_id if self.chosen.prefill is not None else None


class _Prompt(NamedTuple):
    """What is to be placed: its hashes, who holds how many of them, and who gives which."""

    request: GenerationRequest
    hashes: bytes
    held: Mapping[bytes, int]
    givers: tuple[Giver, ...]
    avoid: bytes


class Workers(Protocol):
    """The workers of the fleet; ``router.routing.workers.table.WorkerTable`` is it."""

    @property
    def usable(self) -> list[Slot]:
        """Those that take new requests."""

    def __iter__(self) -> Iterator[Slot]:
        """All."""

    def get(self, worker_id: str) -> Slot | None:
        """The one of that name."""

    def news(self) -> set[str] | None:
        """A set that gets the names of workers that change; None: nobody tells, so look at all."""


class Placer:
    """Chooses workers for requests and books the load; sends nothing.

    Args:
        settings: Which difference in cost is a tie.
        workers: The workers and their last reports.
        prefix_index: Which incarnation holds which blocks.
        book: Load that reports do not show yet.
        clock_ns: Monotonic; the simulator has its own.
        random_source: Draws among equals.
        hashes_of: Names the full blocks of a prompt; None: as the workers compute them.
    """

    def __init__(
        self,
        settings: RouterSettings,
        workers: Workers,
        prefix_index: PrefixIndex,
        book: LoadBook,
        *,
        clock_ns: Callable[[], int] = monotonic_ns,
        random_source: random.Random | None = None,
        hashes_of: Callable[[GenerationRequest, Sequence[Slot]], Hashes] | None = None,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._prefix_index = prefix_index
        self._book = book
        self._seeds = HashSeedCache()
        self._news = workers.news()
        self._reports = Reports()
        self._crowding = Crowding()
        self._clock_ns = clock_ns
        self._random = random_source or random.Random()
        self._shortlist = Shortlist(self._reports, self._crowding, self._random.getrandbits(32))
        self._hashes_of = hashes_of or partial(prompt_hashes, seeds=self._seeds)
        self._answer_tokens = RunningMean(_ANSWER_WEIGHT, prior=_INITIAL_ANSWER_TOKENS)

    @property
    def answer_s(self) -> float:
        """How long one answer is expected to take, roughly."""
        return self._answer_tokens.value * _STEP_S

    def check_served(self, request: GenerationRequest) -> None:
        """Refuse what no worker that is ready could serve.

        Raises:
            UnavailableError: Says which workers there are, or what role is missing.
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
                    f"x-baton-mode is disaggregated, and no {role} worker is ready"
                )

    def cost_tokens(self, request: GenerationRequest, uncached_tokens: int) -> float:
        """What a request takes of the fleet: prompt tokens to compute, answer tokens expected."""
        return uncached_tokens + request.sampling.n * self._expected_tokens(request)

    def _expected_tokens(self, request: GenerationRequest) -> int:
        return min(request.sampling.max_tokens, round(self._answer_tokens.value))

    def learn(self, request: GenerationRequest, completion_tokens: int) -> None:
        """A request is complete: the length of its answers enters the running mean."""
        if request.pooling or request.prompt_logprobs_only:
            return
        self._answer_tokens.add(completion_tokens / request.sampling.n)

    def eligible(self, request: GenerationRequest, avoid: bytes = b"") -> list[Slot]:
        """Workers that may serve the request; ``avoid`` is an incarnation that just failed."""
        usable = list(self._workers.usable)
        if avoid:
            usable = [slot for slot in usable if slot.incarnation != avoid]
        if request.goes_on:
            usable = [slot for slot in usable if slot.goes_on]
        if request.pinned is None:
            return usable
        pinned_ids = (request.pinned.prefill, request.pinned.decode)
        return [slot for slot in usable if slot.worker_id in pinned_ids]

    def could_place(self, request: GenerationRequest, avoid: bytes) -> bool:
        """Whether workers other than the incarnation ``avoid`` can serve the request now."""
        roles = {slot.role for slot in self.eligible(request, avoid)}
        return roles >= {"prefill", "decode"} if request.mode == "disaggregated" else bool(roles)

    def hash_seed(self, request: GenerationRequest, capabilities: Capabilities) -> bytes:
        """The seed of the request's block hashes on a worker of these capabilities."""
        return self._seeds.seed(request, capabilities)

    def place(self, request: GenerationRequest, avoid: bytes = b"") -> Placement:
        """Choose workers and book the load, so that the next choice counts it.

        Args:
            request: What is to run.
            avoid: An incarnation that just failed it.

        Raises:
            UnavailableError: No worker that is ready can serve it in its mode.
        """
        now_ns = self._clock_ns()
        rates = self._shortlist.update(self._workers, now_ns, self._news)
        usable = self._shortlist.usable
        if not usable:
            raise UnavailableError("no worker is ready")
        hashes = packed(self._hashes_of(request, usable))
        reusable = b"" if request.whole_prompt else hashes
        held = self._prefix_index.prefixes(reusable, now_ns) if reusable else {}
        givers: tuple[Giver, ...] = ()
        if held and request.pinned is None and self._settings.pull_prefixes:
            givers = self._shortlist.givers(held)
        prompt = _Prompt(request, reusable, held, givers, avoid)
        found = self._cheapest_of_all(prompt, rates, now_ns)
        if found is None:
            found = self._cheapest_of_few(prompt, rates, now_ns)
        chosen, compared = found
        self._book_load(request, chosen, now_ns)
        if not request.probe:
            holders = (chosen.computes.incarnation, chosen.decode.incarnation)
            for incarnation in dict.fromkeys(holders):  # a set has another order in each process
                self._prefix_index.expect(incarnation, hashes, now_ns)
        return Placement(
            chosen=chosen,
            candidates=compared,
            placed_ns=now_ns,
            prefix=self._held_now(chosen.links, hashes) if chosen.links else (),
        )

    def _held_now(self, links: Sequence[Giver], hashes: Hashes) -> list[Giver]:
        """Without what givers are only expected to have soon: nobody can pull that."""
        held = self._prefix_index.prefixes(hashes)
        there = []
        before = 0
        for giver in links:
            slot = self._workers.get(giver.worker_id)
            if slot is None:
                continue
            memory = tier_incarnation(slot.incarnation, TIERS[0])
            held_blocks = max(held.get(slot.incarnation, 0), held.get(memory, 0))
            if (blocks := min(giver.blocks, held_blocks)) > before:
                there.append(Giver(giver.worker_id, blocks))
                before = blocks
        return there

    def _cheapest_of_all(
        self, prompt: "_Prompt", rates: Rates, now_ns: int
    ) -> tuple[Candidate, Sequence[Candidate]] | None:
        """The choice, and what was compared; None where not all workers can be priced at once."""
        request = prompt.request
        if request.pinned is not None or request.goes_on or request.adapter_digest:
            return None
        asked = Asked(
            mode=request.mode,
            prompt_tokens=len(request.prompt),
            expected_tokens=self._expected_tokens(request),
            choices=request.sampling.n,
            moves_kv=request.sampling.max_tokens > 1,
            givers=prompt.givers,
        )
        placed = self._shortlist.cheapest(
            asked, prompt.held, self._book, now_ns, avoid=prompt.avoid
        )
        if placed is None:
            return None
        if not placed:
            raise _unmet(request)
        waits = {role: self._crowding.wait_per_s(role) for role in ("prefill", "decode")}
        compared = Described(placed, asked, rates, waits)
        ties = bisect_left(placed.costs_s, placed.costs_s[0] + self._settings.tie_s)
        return compared[self._random.choice(range(ties))], compared

    def _cheapest_of_few(
        self, prompt: "_Prompt", rates: Rates, now_ns: int
    ) -> tuple[Candidate, Sequence[Candidate]]:
        """The same among the workers of the shortlist, or those that the client named."""
        request = prompt.request
        if request.pinned is None:
            loads = self._worth_pricing(prompt, rates, now_ns)
        else:
            slots = self.eligible(request, prompt.avoid)
            loads = loads_of(slots, prompt.hashes, self._prefix_index, self._book, now_ns)
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

    def _worth_pricing(self, prompt: "_Prompt", rates: Rates, now_ns: int) -> list[WorkerLoad]:
        """The few workers that may be the best, as the cost model takes them."""
        request = prompt.request
        usable = self._shortlist.usable
        below = self._shortlist.tiers(prompt.held)
        tiers = {usable[index].worker_id: one for index, one in below.items()}
        best = self._shortlist.best(
            request,
            len(prompt.hashes) // HASH_BYTES,
            prompt.held,
            self._book,
            now_ns,
            keep=PAIRED_OF_A_ROLE,
            given_blocks=prompt.givers[0].blocks if prompt.givers else 0,
            avoid=prompt.avoid,
        )
        return [
            load_of(
                slot,
                cached_blocks,
                self._book,
                request.adapter_digest,
                rates,
                self._reports,
                self._crowding,
                prompt.givers,
                tiers.get(slot.worker_id, NO_TIERS),
            )
            for slot, cached_blocks in best
        ]

    def _book_load(self, request: GenerationRequest, chosen: Candidate, now_ns: int) -> None:
        computes = chosen.computes.worker_id
        decodes = chosen.decode.worker_id
        length = len(request.prompt)
        tokens = chosen.uncached_tokens
        context = context_tokens(length - tokens, length)
        book = partial(self._book.book, now_ns=now_ns, adapter=request.adapter_digest)
        if computes != decodes:
            book(computes, request.request_id, tokens=tokens, context=context, streams=0)
            tokens = context = 0
        streams = request.sampling.n
        book(decodes, request.request_id, tokens=tokens, context=context, streams=streams)


def _unmet(request: GenerationRequest) -> UnavailableError:
    return UnavailableError(
        f"x-baton-mode {request.mode} cannot be met by the workers that are ready"
    )
