"""Prompts that workers compute now, and requests that wait for blocks of them. Sans-IO.

    placed ── begin ──▶ computing ── first token, end, another attempt ──▶ forgotten
                            │ blocks appear in the prefix index
    sibling ── ask ──▶ waits ── blocks are there, prompt is forgotten, time is up ──▶ asked again

A sibling is a request that shares leading blocks with a prompt that is being computed. It waits in
the router while that takes at most as long as computing the blocks again, and is then placed as any
other request. It takes no place at a worker meanwhile, so nothing queues behind it. Where no other
worker can pull the blocks, the siblings that wait already count as well.
"""

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from baton.types.geometry import context_tokens
from router.request import GenerationRequest
from router.routing.placement.block_table import HASH_BYTES, LiveWorkers, block_table
from router.routing.placement.booked_load import LoadBook
from router.routing.placement.cost import PREFILL_OVERHEAD_S, Candidate, WorkerLoad
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.placement.prefix_sources import PULL_OVERHEAD_S

# Shorter computations are not waited for: blocks appear in the index after some 20 ms.
LEAST_S = 0.1
# Fits of equal workers differ by so much, so a wait may be this much longer than computing.
FIT_SPREAD = 0.1
# Siblings may wait longer for each other by this part of the time of computing again.
_QUEUE_SHARE = 0.05
_MAX_PROMPTS = 1024
_MAX_BLOCKS = 262_144
_REPORTED_NS = 500_000_000  # a report comes every 250 ms, and shows the end of a step
_INDEXED_NS = 200_000_000  # events come within some 20 to 120 ms after the first token
_MOST_WAITS = 2.0  # longest wait ÷ predicted time of computing, for a prompt with progress


class ComputingPrompt(msgspec.Struct, eq=False, kw_only=True):
    """A placed prompt that has no first token yet.

    Attributes:
        number: Its number in the table of blocks.
        worker: Load of the worker that computes it, as of the placement.
        begin_blocks: Leading blocks that are not computed: cached, pulled or restored.
        starts_ns: Expected start of the computation.
        pulls: Whether its worker pulls leading blocks first.
        lasts_s: Predicted time of pulls and computing.
        placed: Whether this router has placed it: an announced one may come to another worker.
        computed_ns: Time of the first token; 0 before.
        waiting_s: Time to compute what the requests that wait for it do not share.
    """

    request_id: str
    hashes: bytes
    worker: WorkerLoad
    begin_blocks: int
    starts_ns: int
    pulls: bool
    lasts_s: float = 0.0
    placed: bool = True
    number: int = -1
    computed_ns: int = 0
    waiting_s: float = 0.0

    def left_s(self, blocks: int, there_blocks: int, now_ns: int, equal: WorkerLoad) -> float:
        """Return the expected time until ``blocks`` are there, of which ``there_blocks`` are."""
        if there_blocks >= blocks:
            return 0.0
        starts_s = 0.0
        if there_blocks <= self.begin_blocks:
            starts_s = max(self.starts_ns - now_ns, 0) / 1e9
        size = self.worker.block_tokens
        begin = max(self.begin_blocks, there_blocks) * size
        end = max(blocks * size, begin)
        rated = self.worker if self.worker.prefill_token_s else equal  # then it was not measured
        return starts_s + rated.prompt_s(end - begin, context_tokens(begin, end))


def is_soon_there(worker: WorkerLoad, prompt_tokens: int) -> bool:
    """Return whether a worker lacks so little of a prompt that no request needs to wait for it."""
    held = min(worker.cached_blocks * worker.block_tokens, prompt_tokens)
    return worker.prompt_s(prompt_tokens - held, context_tokens(held, prompt_tokens)) < LEAST_S


class ComputingPrompts:
    """Prompts that are worth waiting for, by request. It is bounded: further ones are left out.

    ``on_change`` gets a request, its prompt, None if that has ended, and whether it is computed.
    """

    def __init__(self, prefix_index: PrefixIndex, book: LoadBook) -> None:
        self.on_change: Callable[[str, ComputingPrompt | None, bool], None] = lambda *_: None
        self._index = prefix_index
        self._book = book
        self._prompts: dict[str, ComputingPrompt] = {}
        self._numbered: dict[int, ComputingPrompt] = {}
        self._free = list(range(_MAX_PROMPTS))  # numbers
        self._table = block_table()
        self._live = LiveWorkers()

    def __bool__(self) -> bool:
        """Return whether any prompt is being computed."""
        return bool(self._prompts)

    def __contains__(self, prompt: ComputingPrompt) -> bool:
        """Return whether the prompt is still being computed, in the same attempt."""
        return self._prompts.get(prompt.request_id) is prompt

    def begin(
        self, request_id: str, hashes: bytes, chosen: Candidate, now_ns: int, *, placed: bool = True
    ) -> bool:
        """Record a placed prompt; return False if it is soon computed, or there are too many."""
        terms = chosen.terms
        worker = chosen.computes
        prompt = ComputingPrompt(
            request_id=request_id,
            hashes=hashes,
            worker=worker,
            begin_blocks=max(
                len(hashes) // HASH_BYTES - chosen.uncached_tokens // worker.block_tokens, 0
            ),
            starts_ns=now_ns + round((terms.first_token_s - terms.compute_s) * 1e9),
            pulls=bool(chosen.links),
            lasts_s=terms.pull_s + terms.compute_s,
            placed=placed,
        )
        if not ((terms.compute_s >= LEAST_S or prompt.pulls) and hashes and self.add(prompt)):
            self.end(request_id)
            return False
        self.on_change(request_id, prompt, False)
        return True

    def add(self, prompt: ComputingPrompt) -> bool:
        """Record a prompt, in place of an earlier one of its request; False: there are too many."""
        self.hide(prompt.request_id)
        hashes = prompt.hashes
        if not self._free or self._table.blocks + len(hashes) // HASH_BYTES > _MAX_BLOCKS:
            return False
        prompt.number = number = self._free.pop()
        self._prompts[prompt.request_id] = self._numbered[number] = prompt
        self._table.add(number, hashes, len(hashes) // HASH_BYTES)
        self._live.add(number)
        return True

    def move(self, request_id: str, worker: WorkerLoad, now_ns: int) -> None:
        """Note that another worker computes the prompt from now on."""
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            starts_ns = now_ns + round(worker.queue_s * 1e9)
            moved = replace(prompt, worker=worker, begin_blocks=0, starts_ns=starts_ns)
            self._prompts[request_id] = self._numbered[prompt.number] = moved
            self.on_change(request_id, moved, False)

    def end(self, request_id: str, computed_ns: int = 0) -> ComputingPrompt | None:
        """Forget a prompt that is computed, or whose attempt has ended; return it."""
        prompt = self.hide(request_id)
        if prompt is not None:
            prompt.computed_ns = computed_ns
        self.on_change(request_id, None, computed_ns > 0)
        return prompt

    def hide(self, request_id: str) -> ComputingPrompt | None:
        """Remove a prompt, which may be recorded anew; return it."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            del self._numbered[prompt.number]
            self._free.append(prompt.number)
            self._table.remove(prompt.number, prompt.hashes)
            self._live.discard(prompt.number)
        return prompt

    def shared(self, hashes: bytes) -> Iterator[tuple[ComputingPrompt, int]]:
        """Yield the prompts that begin with the same blocks, and the number of these."""
        if self._prompts:
            for number, blocks in self._table.match(hashes, self._live):
                yield self._numbered[number], blocks

    def add_held(self, hashes: bytes, held: dict[bytes, int]) -> int:
        """Add blocks that a worker will have when it has computed what is before in its queue.

        ``held`` is the number of leading blocks by incarnation. A prompt that waits for a pull may
        be overtaken, so its blocks do not count, nor those of other routers, whose load is unknown.
        Return the most blocks that a worker computes.
        """
        most = 0
        for prompt, blocks in self.shared(hashes):
            if prompt.placed and not prompt.pulls:
                incarnation = prompt.worker.incarnation
                held[incarnation] = max(held.get(incarnation, 0), blocks)
                most = max(most, blocks)
        return most

    def has(self, prompt: ComputingPrompt, blocks: int) -> bool:
        """Return whether the worker of a prompt has its first ``blocks``: a hash covers all."""
        last = prompt.hashes[(blocks - 1) * HASH_BYTES : blocks * HASH_BYTES]
        return prompt.worker.incarnation in self._index.prefixes(last)

    def counts_as_queued(self, prompt: ComputingPrompt, now_ns: int) -> bool:
        """Return whether a prompt was just computed, and its worker's report may not show it."""
        computed_ns = prompt.computed_ns
        if not computed_ns or now_ns - computed_ns >= _REPORTED_NS:
            return False
        return self._book.counts_computed(prompt.worker.worker_id, computed_ns)

    def there(self, prompt: ComputingPrompt) -> int:
        """Return how many leading blocks of a prompt its worker has, as far as events report."""
        return self._index.prefixes(prompt.hashes).get(prompt.worker.incarnation, 0)


class SiblingWait(NamedTuple):
    """Wait of a sibling for ``blocks`` of a prompt, of which ``there`` were computed when asked.

    It waits since ``since_ns``, when computing itself would have taken ``own_ns``. From
    ``until_ns`` on the prompt needs progress. ``given_up`` are prompts without it. ``rest_s`` is
    the time to compute what is not shared.
    """

    prompt: ComputingPrompt
    blocks: int
    there: int
    since_ns: int
    own_ns: int
    until_ns: int
    given_up: tuple[ComputingPrompt, ...]
    rest_s: float


class SiblingWaits:
    """Requests that wait for a prefix, at most ``limit`` of them, in the order of their calls."""

    def __init__(self, computing: ComputingPrompts, limit: int) -> None:
        self._computing = computing
        self._limit = limit
        self._waits: dict[str, SiblingWait] = {}

    def leave(self, request_id: str) -> bool:
        """Forget a request that is placed or has ended; return whether it waited."""
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            wait.prompt.waiting_s -= wait.rest_s
        return wait is not None

    def ask(
        self,
        request: GenerationRequest,
        chosen: Candidate,
        hashes: bytes,
        now_ns: int,
        pullers: Sequence[Candidate] = (),
    ) -> SiblingWait | None:
        """Return what the request waits for; None: it is to be placed.

        ``chosen`` is its cheapest placement; ``pullers`` are placements on workers that could pull
        its prefix. One that waits already is asked again.
        """
        before = self._waits.get(request.request_id)
        if request.whole_prompt or request.pinned is not None or request.probe:
            return None
        if before is None and len(self._waits) >= self._limit:
            return None
        if before is not None and self._may_be_there(before, request, chosen, now_ns, pullers):
            return before
        own_ns = first_own_ns = round(chosen.terms.first_token_s * (1 + FIT_SPREAD) * 1e9)
        since_ns = now_ns
        given_up = before.given_up if before is not None else ()
        if before is not None:
            if self._is_in_vain(before, now_ns):
                given_up += (before.prompt,)
            if before.prompt in self._computing or before.prompt.computed_ns:  # it has not failed
                since_ns = before.since_ns
                first_own_ns = min(before.own_ns, own_ns)  # rates may be known now
        best: SiblingWait | None = None
        most_saved_s = 0.0
        for prompt, blocks in self._computing.shared(hashes):
            own_s = _own_s(chosen, len(request.prompt), blocks) * (1 + FIT_SPREAD)
            if own_s <= most_saved_s or prompt in given_up or self._computing.has(prompt, blocks):
                continue
            there = self._computing.there(prompt)
            left_s = prompt.left_s(blocks, there, now_ns, chosen.computes)
            is_same = before is not None and before.prompt is prompt
            ahead_s = prompt.waiting_s - own_s * _QUEUE_SHARE
            if is_same or _rates_from(prompt.worker, pullers):
                ahead_s = 0.0  # those before it go to other workers
            saved_s = own_s - left_s - max(ahead_s, 0.0)
            last_ns = since_ns + first_own_ns * (_MOST_WAITS if is_same or prompt.pulls else 1)
            if saved_s > most_saved_s and now_ns + left_s * 1e9 <= last_ns:
                most_saved_s = saved_s
                until_ns = now_ns + own_ns
                rest_s = _rest_s(chosen, len(request.prompt), blocks)
                best = SiblingWait(
                    prompt, blocks, there, since_ns, first_own_ns, until_ns, given_up, rest_s
                )
        queue = self._in_queue(chosen, hashes, now_ns, pullers) if best is None else None
        if queue is not None and queue[0] not in given_up:
            is_same = before is not None and before.prompt is queue[0]
            first_own_ns = before.own_ns if before and is_same else now_ns + own_ns - since_ns
            rest_s = _rest_s(chosen, len(request.prompt), queue[1])
            best = SiblingWait(*queue, since_ns, first_own_ns, now_ns + own_ns, given_up, rest_s)
        if best is not None:
            self._keep(request.request_id, best, before)
        return best

    def _keep(self, request_id: str, wait: SiblingWait, before: SiblingWait | None) -> None:
        if before is not None:
            before.prompt.waiting_s -= before.rest_s
        wait.prompt.waiting_s += wait.rest_s
        self._waits[request_id] = wait

    def _in_queue(
        self, chosen: Candidate, hashes: bytes, now_ns: int, pullers: Sequence[Candidate]
    ) -> tuple[ComputingPrompt, int, int] | None:
        """Return a prompt with siblings behind it, if others can pull its blocks before these end.

        With it the number of blocks, and of those that are there.
        """
        for prompt, blocks in self._computing.shared(hashes):
            is_here = prompt.worker.worker_id == chosen.computes.worker_id and prompt.placed
            if chosen.terms.queue_s > LEAST_S and is_here and not prompt.pulls:
                there = self._computing.there(prompt)
                left_s = prompt.left_s(blocks, there, now_ns, chosen.computes)
                pulled_s = _pulled_s(chosen, pullers, blocks, left_s)
                if chosen.terms.queue_s - left_s > pulled_s and there < blocks:
                    return prompt, blocks, there
        return None

    def _appears_soon(
        self,
        wait: SiblingWait,
        request: GenerationRequest,
        chosen: Candidate,
        now_ns: int,
        pullers: Sequence[Candidate],
    ) -> bool:
        """Return whether blocks were just computed, and can be pulled when the index has them."""
        computed_ns = wait.prompt.computed_ns
        is_new = 0 < computed_ns <= now_ns < computed_ns + _INDEXED_NS
        if not is_new or self._computing.has(wait.prompt, wait.blocks):
            return False
        worker = chosen.computes
        if worker.worker_id == wait.prompt.worker.worker_id:
            return chosen.terms.queue_s > _pulled_s(chosen, pullers, wait.blocks, 0.0)
        end = min(wait.blocks * worker.block_tokens, len(request.prompt))
        begin = len(request.prompt) - chosen.uncached_tokens  # cached there, or pulled
        lacking_s = worker.prompt_s(end - begin, context_tokens(begin, end)) if begin < end else 0.0
        return bool(pullers) and lacking_s >= LEAST_S / 2

    def _may_be_there(
        self,
        wait: SiblingWait,
        request: GenerationRequest,
        chosen: Candidate,
        now_ns: int,
        pullers: Sequence[Candidate],
    ) -> bool:
        """Return whether blocks were just computed that reports or the index may not show yet."""
        if self._appears_soon(wait, request, chosen, now_ns, pullers):
            return True
        if chosen.links or not self._computing.counts_as_queued(wait.prompt, now_ns):
            return False
        return _own_s(chosen, len(request.prompt), wait.blocks) > 0

    def _is_in_vain(self, wait: SiblingWait, now_ns: int) -> bool:
        """Return whether time is up for a prompt that makes no progress, or not enough."""
        if wait.prompt not in self._computing or now_ns < wait.until_ns:
            return False
        too_late = now_ns >= wait.since_ns + _MOST_WAITS * wait.own_ns
        return too_late or self._computing.there(wait.prompt) <= wait.there

    def due(self, now_ns: int) -> list[str]:
        """Return the requests that are to be asked again."""
        return [
            request_id
            for request_id, wait in self._waits.items()
            if wait.prompt not in self._computing
            or now_ns >= wait.until_ns
            or self._computing.has(wait.prompt, wait.blocks)
        ]


def _pulled_s(chosen: Candidate, pullers: Sequence[Candidate], blocks: int, left_s: float) -> float:
    """Return when another worker could compute with pulled blocks, after ``left_s``; at least 0.1.

    ``blocks`` are then at the worker of ``chosen``.
    """
    times_s = [
        max(worker.queue_s - left_s, PULL_OVERHEAD_S + blocks * worker.block_bytes / rate, LEAST_S)
        for worker, rate in _rates_from(chosen.computes, pullers)
    ]
    return min(times_s, default=inf)


def _rates_from(source: WorkerLoad, pullers: Sequence[Candidate]) -> list[tuple[WorkerLoad, float]]:
    """Return the workers that can pull from one, each with its bytes per second."""
    return [
        (worker, rate)
        for worker in {puller.computes.worker_id: puller.computes for puller in pullers}.values()
        if worker.worker_id != source.worker_id
        and worker.format_id == source.format_id
        and (rate := worker.edge_bytes_per_s(source.worker_id))
    ]


def _own_s(chosen: Candidate, prompt_tokens: int, blocks: int) -> float:
    """Return the time that a placement takes for shared blocks; 0 if it is not worth a wait.

    Pulls of the same blocks at once share a link, so one that is not the first counts in full.
    """
    rest_s = PREFILL_OVERHEAD_S + _rest_s(chosen, prompt_tokens, blocks)
    if chosen.links and chosen.links[-1].blocks <= blocks:
        return chosen.terms.first_token_s
    own_s = chosen.terms.pull_s + chosen.terms.compute_s - rest_s
    return own_s if own_s >= LEAST_S else 0.0


def _rest_s(chosen: Candidate, prompt_tokens: int, blocks: int) -> float:
    """Return the time of a placement for what is behind shared blocks."""
    worker = chosen.computes
    held = min(blocks * worker.block_tokens, prompt_tokens - 1)
    return worker.prompt_s(prompt_tokens - held, context_tokens(held, prompt_tokens))
