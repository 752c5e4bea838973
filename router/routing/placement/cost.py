"""Cost of placements in seconds, and the choice of one. Sans-IO.

    P → D   queue(P) + bring(P) + pull(P) + compute(P) + crowding(P) + exposed transfer(P, D)
                                                + room(D) + decode(D) + slowdown(P, D)
    W       queue(W) + bring(W) + pull(W) + compute(W) + crowding(W)
                                                + room(W) + decode(W) + slowdown(W)

and for a LoRA adapter that a worker does not hold yet, the time to load it.

One unit for everything, so that nothing needs a weight: the seconds that this request waits, plus
the seconds by which it delays running streams (slowdown) and later requests (crowding). Leading
blocks that the worker has in host memory or on disk are brought back, and those of other workers
are pulled (``chain.py``), if that is faster than computing them. Rates are those that the workers
fitted to their own steps; until then the priors below are used. A prompt token takes longer the
more tokens precede it.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from operator import attrgetter, itemgetter
from typing import NamedTuple

import msgspec

from baton.types.geometry import BLOCK_TOKENS, context_tokens
from baton.types.step_lines import DecodeLine
from router.request import Mode
from router.routing.placement.prefix_sources import Chain, Source, cheapest_chains

# Priors until a worker reports: a small model on a laptop, and loopback.
PRIOR_PREFILL_TOKENS_PER_S = 1500.0
PRIOR_DECODE_STEP_S = 0.03
PRIOR_EDGE_BYTES_PER_S = 500e6
# Cost of one prefill and one hand-off beside tokens and bytes; no worker measures it.
PREFILL_OVERHEAD_S = 0.01
EDGE_OVERHEAD_S = 0.005
# Time until the first block comes out of a tier, and per block, until a worker has measured.
BRING_OVERHEAD_S = 0.002
PRIOR_TIER_BLOCK_S = {"memory": 0.0005, "disk": 0.003}
# Rank 8 for a small model, read and checked (measured: 0.1 s).
PRIOR_ADAPTER_LOAD_S = 0.1
# The last layer group cannot hide behind compute.
EXPOSED_SHARE = 0.05
# Number of workers of each role that are priced in pairs: the best by their own part.
PAIRED_OF_A_ROLE = 6
# Number of cheapest placements that are reported in full, and chosen among.
COMPARED = 16


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker as this router sees it, with the load that the router booked.

    ``cached_blocks`` is the part of the prompt that the worker holds, by the prefix index;
    ``queued_context`` is the sum over ``queued_tokens`` of the tokens before each; ``answering``
    streams stand still while a prompt is computed, the others are prompts; ``adapter_s`` is the
    time to load the prompt's adapter; ``crowding`` is the delay of later requests per second that
    a worker of its role computes; ``edges_bytes_per_s`` are measured, by source; ``sources`` have
    leading blocks of the prompt that the worker lacks, those with most first; ``tier_blocks`` are
    in its pool or in tiers below, and take ``tier_s`` to bring back; ``answering_context`` tokens
    belong to streams that generate responses, ``coming_context`` to those that will.
    """

    worker_id: str
    incarnation: bytes
    role: str
    queued_tokens: int = 0
    queued_context: int = 0
    streams: int = 0
    answering: int | None = None  # streams that generate responses; None: all
    room_blocks: int = 1 << 30  # free and cached
    total_blocks: int = 1 << 30
    cached_blocks: int = 0
    sources: tuple[Source, ...] = ()
    tier_blocks: int = 0
    tier_s: float = 0.0
    adapter_s: float = 0.0
    crowding: float = 0.0
    prefill_tokens_per_s: float = PRIOR_PREFILL_TOKENS_PER_S  # over the prompts that it had
    prefill_token_s: float = 0.0  # one token without context; 0: use the rate
    prefill_context_s: float = 0.0  # more per token of context
    decode_step_s: float = PRIOR_DECODE_STEP_S
    decode_line: DecodeLine = DecodeLine()
    answering_context: int = 0
    coming_context: int = 0
    block_bytes: int = 0
    block_tokens: int = BLOCK_TOKENS
    format_id: str = ""  # equal on both sides of a pair between which KV can move
    edges_bytes_per_s: Mapping[str, float] = {}
    unmeasured_bytes_per_s: float = PRIOR_EDGE_BYTES_PER_S  # expected rate of other edges

    def prompt_s(self, tokens: int, context: int) -> float:
        """Return the time to compute prompt tokens, given the sum of the tokens before each."""
        token_s = self.prefill_token_s or 1 / self.prefill_tokens_per_s
        return tokens * token_s + context * self.prefill_context_s

    def edge_bytes_per_s(self, source_id: str) -> float:
        """Return the rate of the edge from a source, as measured or expected."""
        return self.edges_bytes_per_s.get(source_id) or self.unmeasured_bytes_per_s

    @property
    def queue_s(self) -> float:
        """Time to compute the waiting prompts, in seconds."""
        return self.prompt_s(self.queued_tokens, self.queued_context)


class Terms(NamedTuple):
    """Parts of one candidate's cost, all in seconds."""

    queue_s: float
    adapter_s: float
    bring_s: float
    pull_s: float
    compute_s: float
    transfer_s: float
    room_s: float
    decode_s: float
    slowdown_s: float
    crowding_s: float

    @property
    def total_s(self) -> float:
        """Total cost, by which candidates are compared."""
        before_s = self.first_token_s + self.transfer_s + self.room_s
        return before_s + self.decode_s + self.slowdown_s + self.crowding_s

    @property
    def first_token_s(self) -> float:
        """Predicted time from placement to the first token (prefill samples it)."""
        return self.queue_s + self.adapter_s + self.bring_s + self.pull_s + self.compute_s


class Candidate(NamedTuple):
    """A placement. ``prefill`` is None if the decode worker computes the prompt itself."""

    prefill: WorkerLoad | None
    decode: WorkerLoad
    terms: Terms
    uncached_tokens: int  # to be computed
    links: tuple[Source, ...] = ()  # pulled from first by the worker that computes

    @property
    def mode(self) -> Mode:
        """Mode of the placement, as in ``x-baton-mode``."""
        return "colocated" if self.prefill is None else "disaggregated"

    @property
    def computes(self) -> WorkerLoad:
        """The worker that computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    def explain(self) -> dict[str, object]:
        """Return the candidate for ``GET /fleet/requests/{id}``."""
        return {
            "prefill": self.prefill.worker_id if self.prefill else None,
            "decode": self.decode.worker_id,
            "mode": self.mode,
            "uncached_tokens": self.uncached_tokens,
            "prefix_from": [source.described() for source in self.links],
            "cost_s": round(self.terms.total_s, 6),
            "terms": {name: round(value, 6) for name, value in self.terms._asdict().items()},
        }


def candidates(
    workers: Sequence[WorkerLoad],
    *,
    mode: Mode,
    prompt_tokens: int,
    expected_tokens: int,
    choices: int = 1,
    moves_kv: bool = True,
) -> list[Candidate]:
    """Return the cheapest placements that ``mode`` allows, sorted; at most ``COMPARED``.

    Every worker alone is priced. Pairs are priced for the few prefill and the few decode workers
    that are best by their own part of the cost: all of them in a small fleet, and never P × D.

    Args:
        workers: Live workers that take new requests; of equal ones, the first are paired.
        mode: ``disaggregated`` needs two workers, ``colocated`` one, ``auto`` allows both.
        prompt_tokens: Length of the prompt.
        expected_tokens: Expected output tokens of one choice.
        choices: Number of choices that run at once.
        moves_kv: False if prefill alone gives the response: one token, logprobs, an embedding.
    """
    work = _Work(prompt_tokens, expected_tokens, choices, moves_kv)
    parts = [(work.prompt(worker), work.answer(worker)) for worker in workers]
    priced: list[tuple[float, _Prompt, _Answer]] = []
    if mode != "disaggregated":
        priced += [
            # one worker loads the adapter once
            (prompt.own_s + answer.with_adapter_s - answer.worker.adapter_s, prompt, answer)
            for prompt, answer in parts
        ]
    if mode != "colocated":
        priced += [
            (prompt.own_s + answer.with_adapter_s + _transfer_s(prompt, answer), prompt, answer)
            for prompts, answers in _halves(parts)
            for prompt in prompts
            for answer in answers
        ]
    cheapest = nsmallest(COMPARED, priced, key=itemgetter(0))
    compared = [
        _alone(prompt, answer) if prompt.worker is answer.worker else _pair(prompt, answer)
        for _, prompt, answer in cheapest
    ]
    return sorted(compared, key=lambda candidate: candidate.terms.total_s)


def choose(
    compared: Sequence[Candidate], *, tie_s: float, pick: Callable[[Sequence[Candidate]], Candidate]
) -> Candidate:
    """Return the cheapest, or at random one that costs less than ``tie_s`` more.

    Without the random choice, routers that see the same figures all choose the same worker.
    ``compared`` is sorted and not empty.
    """
    limit = compared[0].terms.total_s + tie_s
    return pick([candidate for candidate in compared if candidate.terms.total_s < limit])


def price(
    *,
    prefill: WorkerLoad | None,
    decode: WorkerLoad,
    prompt_tokens: int,
    expected_tokens: int,
    choices: int = 1,
    moves_kv: bool = True,
) -> Candidate:
    """Price one placement, whether it is allowed or not; arguments as in ``candidates``."""
    work = _Work(prompt_tokens, expected_tokens, choices, moves_kv)
    answer = work.answer(decode)
    if prefill is None:
        return _alone(work.prompt(decode), answer)
    return _pair(work.prompt(prefill), answer)


class _Prompt(NamedTuple):
    """Cost of computing the prompt on a worker; ``own_s`` is its sum."""

    worker: WorkerLoad
    uncached_tokens: int
    links: tuple[Source, ...]
    queue_s: float
    bring_s: float
    pull_s: float
    compute_s: float
    slowdown_s: float
    crowding_s: float
    own_s: float


class _Answer(NamedTuple):
    """Cost of generating the response on a worker, and the KV that it lacks.

    ``with_adapter_s`` is the sum without the transfer; ``own_s`` assumes a usual edge for it.
    """

    worker: WorkerLoad
    lacking_bytes: int
    room_s: float
    decode_s: float
    slowdown_s: float
    with_adapter_s: float
    own_s: float


class _Work(NamedTuple):
    prompt_tokens: int
    expected_tokens: int
    choices: int
    moves_kv: bool

    def prompt(self, worker: WorkerLoad) -> _Prompt:
        uncached, compute_s = self._compute(worker, worker.cached_blocks)
        bring_s = 0.0
        held_blocks = worker.cached_blocks
        if worker.tier_blocks > held_blocks:
            rest, rest_s = self._compute(worker, worker.tier_blocks)
            if worker.tier_s + rest_s < compute_s:
                uncached = rest
                compute_s = rest_s
                held_blocks = worker.tier_blocks
                bring_s = worker.tier_s
        pull_s = 0.0
        least_s = compute_s
        links: tuple[Source, ...] = ()
        for chain in self._chains(worker, held_blocks):
            rest, rest_s = self._compute(worker, chain.links[-1].blocks)
            if chain.seconds + rest_s < least_s:
                least_s = chain.seconds + rest_s
                links = chain.links
                uncached = rest
                compute_s = rest_s
                pull_s = max(chain.seconds - worker.queue_s, 0.0)  # overlaps the queue
        # Streams wait while a prompt is computed. Prompts before it do not.
        delayed = worker.streams if worker.answering is None else worker.answering
        queue_s = worker.queue_s
        slowdown_s = compute_s * delayed
        crowding_s = compute_s * worker.crowding
        own_s = queue_s + worker.adapter_s + bring_s + pull_s + compute_s
        own_s = own_s + slowdown_s + crowding_s
        return _Prompt(
            worker,
            uncached,
            links,
            queue_s,
            bring_s,
            pull_s,
            compute_s,
            slowdown_s,
            crowding_s,
            own_s,
        )

    @staticmethod
    def _chains(worker: WorkerLoad, held_blocks: int) -> list[Chain]:
        sources = worker.sources
        if not sources or sources[0].blocks <= held_blocks:
            return []
        rates = [worker.edge_bytes_per_s(source.worker_id) for source in sources]
        return cheapest_chains(held_blocks, sources, rates, worker.block_bytes)

    def _compute(self, worker: WorkerLoad, held_blocks: int) -> tuple[int, float]:
        # The last token is always computed: its logits are needed.
        held = min(held_blocks * worker.block_tokens, self.prompt_tokens - 1)
        uncached = self.prompt_tokens - held
        context = context_tokens(held, self.prompt_tokens)
        return uncached, PREFILL_OVERHEAD_S + worker.prompt_s(uncached, context)

    def answer(self, worker: WorkerLoad) -> _Answer:
        step_s = worker.decode_step_s
        line = worker.decode_line.beside(step_s)
        context = worker.answering_context + worker.coming_context
        busy_s = worker.streams * line.row_s + context * line.context_s
        own_s = line.step_s + self.prompt_tokens * line.context_s
        decode_s = self.expected_tokens * (own_s + busy_s)
        slowdown_s = self.expected_tokens * busy_s * self.choices
        blocks = -(
            -(self.prompt_tokens + self.choices * self.expected_tokens) // worker.block_tokens
        )
        lacking = max(0, blocks - worker.cached_blocks - worker.room_blocks)
        # Running responses free the whole pool in about one response's time: wait in proportion.
        room_s = lacking / max(worker.total_blocks, 1) * self.expected_tokens * step_s
        lacking_bytes = self._lacking_bytes(worker)
        answer_s = worker.adapter_s + room_s + decode_s + slowdown_s
        wire_s = lacking_bytes / worker.unmeasured_bytes_per_s * EXPOSED_SHARE
        return _Answer(
            worker, lacking_bytes, room_s, decode_s, slowdown_s, answer_s, answer_s + wire_s
        )

    def _lacking_bytes(self, worker: WorkerLoad) -> int:
        if not self.moves_kv:
            return 0
        prompt_blocks = -(-self.prompt_tokens // worker.block_tokens)
        return max(0, prompt_blocks - worker.cached_blocks) * worker.block_bytes


def _halves(parts: Sequence[tuple[_Prompt, _Answer]]) -> list[tuple[list[_Prompt], list[_Answer]]]:
    """Return the prefill and the decode workers that are worth pairing, by KV format."""
    formats: dict[str, tuple[list[_Prompt], list[_Answer]]] = {}
    for prompt, answer in parts:
        prompts, answers = formats.setdefault(prompt.worker.format_id, ([], []))
        if prompt.worker.role == "prefill":
            prompts.append(prompt)
        elif prompt.worker.role == "decode":
            answers.append(answer)
    own_s = attrgetter("own_s")
    return [
        (
            nsmallest(PAIRED_OF_A_ROLE, prompts, key=own_s),
            nsmallest(PAIRED_OF_A_ROLE, answers, key=own_s),
        )
        for prompts, answers in formats.values()
    ]


def _transfer_s(prompt: _Prompt, answer: _Answer) -> float:
    wire_s = answer.lacking_bytes / answer.worker.edge_bytes_per_s(prompt.worker.worker_id)
    return EDGE_OVERHEAD_S + max(wire_s - prompt.compute_s, wire_s * EXPOSED_SHARE)


def _alone(prompt: _Prompt, answer: _Answer) -> Candidate:
    terms = _terms(prompt, answer, adapter_s=prompt.worker.adapter_s, transfer_s=0.0)
    return Candidate(None, answer.worker, terms, prompt.uncached_tokens, prompt.links)


def _pair(prompt: _Prompt, answer: _Answer) -> Candidate:
    prefill = prompt.worker
    decode = answer.worker
    adapter_s = decode.adapter_s + prefill.adapter_s  # decode loads it before it asks prefill
    terms = _terms(prompt, answer, adapter_s=adapter_s, transfer_s=_transfer_s(prompt, answer))
    return Candidate(prefill, decode, terms, prompt.uncached_tokens, prompt.links)


def _terms(prompt: _Prompt, answer: _Answer, *, adapter_s: float, transfer_s: float) -> Terms:
    return Terms(
        queue_s=prompt.queue_s,
        adapter_s=adapter_s,
        bring_s=prompt.bring_s,
        pull_s=prompt.pull_s,
        compute_s=prompt.compute_s,
        transfer_s=transfer_s,
        room_s=answer.room_s,
        decode_s=answer.decode_s,
        slowdown_s=answer.slowdown_s + prompt.slowdown_s,
        crowding_s=prompt.crowding_s,
    )
