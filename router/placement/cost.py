"""What a placement costs, in seconds, and which one to take. Sans-IO.

    P → D   queue(P) + compute(P) + exposed transfer(P, D) + room(D) + decode(D) + slowdown(P, D)
    W       queue(W) + compute(W)                          + room(W) + decode(W) + slowdown(W)

and for a LoRA adapter that one of them does not hold yet, the time to load it there.

One unit for everything, so that nothing needs a weight: the seconds that this request waits plus
the seconds by which it delays the streams that run already. Rates are those that the workers
fitted to their own steps; until they have, the priors below stand in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import nsmallest

from engine.core.geometry import BLOCK_TOKENS
from router.request import Mode

# Until a worker reports: a small model on a laptop, and loopback.
PRIOR_PREFILL_TOKENS_PER_S = 1500.0
PRIOR_DECODE_STEP_S = 0.03
PRIOR_EDGE_BYTES_PER_S = 500e6
# What one prefill and one hand-off cost beside tokens and bytes; no worker measures it.
PREFILL_OVERHEAD_S = 0.01
EDGE_OVERHEAD_S = 0.005
# Rank 8 for a small model, read and checked (measured: 0.1 s).
PRIOR_ADAPTER_LOAD_S = 0.1
# One more sequence in a batch makes its step longer by about this part (measured: 29 → 50 ms from
# batch 1 to 32).
STEP_SHARE_PER_STREAM = 0.023
# The last layer group cannot hide behind compute.
EXPOSED_SHARE = 0.05
# Of each role, so many workers are priced in pairs: those that are best by their own part.
PAIRED_OF_A_ROLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Measured transfer rate from one prefill worker to one decode worker."""

    bytes_per_s: float = PRIOR_EDGE_BYTES_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A live worker as this router sees it, with what it booked itself.

    ``cached_blocks`` is how much of the present prompt the worker holds, by the prefix index;
    ``answering`` streams stand still while a prompt is computed, the others are prompts;
    ``adapter_s`` is how long it would have to load the prompt's adapter.
    """

    worker_id: str
    incarnation: bytes
    role: str
    queued_tokens: int = 0
    streams: int = 0
    answering: int | None = None  # of them, those that write answers; None: all
    room_blocks: int = 1 << 30  # free and cached
    total_blocks: int = 1 << 30
    cached_blocks: int = 0
    adapter_s: float = 0.0
    prefill_tokens_per_s: float = PRIOR_PREFILL_TOKENS_PER_S
    decode_step_s: float = PRIOR_DECODE_STEP_S
    block_bytes: int = 0
    block_tokens: int = BLOCK_TOKENS
    format_id: str = ""  # equal on both sides of a pair that can hand over
    edges: Mapping[str, Edge] = field(default_factory=dict)
    unmeasured: Edge = Edge()  # what is expected of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The parts of one candidate's cost, all in seconds."""

    queue_s: float
    adapter_s: float
    compute_s: float
    transfer_s: float
    room_s: float
    decode_s: float
    slowdown_s: float

    @property
    def total_s(self) -> float:
        """What is compared."""
        before_s = self.first_token_s + self.transfer_s + self.room_s
        return before_s + self.decode_s + self.slowdown_s

    @property
    def first_token_s(self) -> float:
        """Predicted time from placement to the first token (prefill samples it)."""
        return self.queue_s + self.adapter_s + self.compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A placement. ``prefill`` is None where the worker computes the prompt itself."""

    prefill: WorkerLoad | None
    decode: WorkerLoad
    terms: Terms
    uncached_tokens: int

    @property
    def mode(self) -> Mode:
        """As ``x-baton-mode`` names it."""
        return "colocated" if self.prefill is None else "disaggregated"

    @property
    def computes(self) -> WorkerLoad:
        """The worker that computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    def explain(self) -> dict[str, object]:
        """For ``GET /fleet/requests/{id}``."""
        return {
            "prefill": self.prefill.worker_id if self.prefill else None,
            "decode": self.decode.worker_id,
            "mode": self.mode,
            "uncached_tokens": self.uncached_tokens,
            "cost_s": round(self.terms.total_s, 6),
            "terms": {name: round(value, 6) for name, value in asdict(self.terms).items()},
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
    """The placements that ``mode`` allows, cheapest first.

    Every worker alone is priced. Of pairs, those of the few prefill and the few decode workers that
    are best by their own part of the cost: all of them in a small fleet, and never P × D.

    Args:
        workers: Live workers that take new requests; of equal ones, the first are paired.
        mode: ``disaggregated`` wants two different workers, ``colocated`` one, ``auto`` either.
        prompt_tokens: Length of the prompt.
        expected_tokens: Tokens that one answer is expected to have.
        choices: Answers to run at once.
        moves_kv: False where prefill alone makes the answer: one token, logprobs, an embedding.
    """
    compared: list[Candidate] = []
    work = _Work(prompt_tokens, expected_tokens, choices, moves_kv)
    if mode != "disaggregated":
        compared += [_alone(worker, work) for worker in workers]
    if mode != "colocated":
        compared += [
            _pair(prefill, decode, work)
            for prefills, decodes in _halves(workers, work)
            for prefill in prefills
            for decode in decodes
        ]
    return sorted(compared, key=lambda candidate: candidate.terms.total_s)


def choose(
    compared: Sequence[Candidate], *, tie_s: float, pick: Callable[[Sequence[Candidate]], Candidate]
) -> Candidate:
    """The cheapest; among those that differ from it by less than ``tie_s``, one at random.

    Without the random choice, routers that see the same figures all run to the same worker.

    Args:
        compared: Sorted by cost, not empty.
        tie_s: Below this, a difference is noise.
        pick: Such as ``random.choice``.
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
    """One placement, whether it may be chosen or not.

    Args:
        prefill: The worker that computes the prompt, or None for ``decode`` itself.
        decode: The worker that holds the request.
        prompt_tokens: As in `candidates`, and so are the others.
        expected_tokens: Tokens that one answer is expected to have, or had.
        choices: Answers to run at once.
        moves_kv: Whether a pair hands anything over.
    """
    work = _Work(prompt_tokens, expected_tokens, choices, moves_kv)
    return _alone(decode, work) if prefill is None else _pair(prefill, decode, work)


@dataclass(frozen=True, slots=True)
class _Work:
    prompt_tokens: int
    expected_tokens: int
    choices: int
    moves_kv: bool

    def uncached(self, worker: WorkerLoad) -> int:
        # The last token is always computed: its logits are wanted.
        cached = min(worker.cached_blocks * worker.block_tokens, self.prompt_tokens - 1)
        return self.prompt_tokens - cached

    def blocks(self, worker: WorkerLoad) -> int:
        tokens = self.prompt_tokens + self.choices * self.expected_tokens
        return -(-tokens // worker.block_tokens)

    def payload_bytes(self, decode: WorkerLoad) -> int:
        """KV that the decode worker lacks."""
        if not self.moves_kv:
            return 0
        prompt_blocks = -(-self.prompt_tokens // decode.block_tokens)
        return max(0, prompt_blocks - decode.cached_blocks) * decode.block_bytes


def _halves(
    workers: Sequence[WorkerLoad], work: _Work
) -> list[tuple[list[WorkerLoad], list[WorkerLoad]]]:
    """The prefill and the decode workers that are worth pairing, by format."""
    formats: dict[str, tuple[list[WorkerLoad], list[WorkerLoad]]] = {}
    for worker in workers:
        prefills, decodes = formats.setdefault(worker.format_id, ([], []))
        if worker.role == "prefill":
            prefills.append(worker)
        elif worker.role == "decode":
            decodes.append(worker)

    def prefill_s(worker: WorkerLoad) -> float:
        queue_s = worker.queued_tokens / worker.prefill_tokens_per_s
        return queue_s + worker.adapter_s + _compute_s(worker, work) * (1 + _delayed(worker))

    def decode_s(worker: WorkerLoad) -> float:
        wire_s = work.payload_bytes(worker) / worker.unmeasured.bytes_per_s * EXPOSED_SHARE
        return worker.adapter_s + sum(_decode_terms(worker, work)) + wire_s

    return [
        (
            nsmallest(PAIRED_OF_A_ROLE, prefills, key=prefill_s),
            nsmallest(PAIRED_OF_A_ROLE, decodes, key=decode_s),
        )
        for prefills, decodes in formats.values()
    ]


def _compute_s(worker: WorkerLoad, work: _Work) -> float:
    return PREFILL_OVERHEAD_S + work.uncached(worker) / worker.prefill_tokens_per_s


def _delayed(worker: WorkerLoad) -> int:
    """Streams that wait while a prompt is computed. Prompts that came before it do not."""
    return worker.streams if worker.answering is None else worker.answering


def _decode_terms(worker: WorkerLoad, work: _Work) -> tuple[float, float, float]:
    """Waiting for room, own decoding, and what that costs the streams there."""
    step_s, marginal_s = worker.decode_step_s, worker.decode_step_s * STEP_SHARE_PER_STREAM
    decode_s = work.expected_tokens * (step_s + marginal_s * worker.streams)
    slowdown_s = work.expected_tokens * marginal_s * worker.streams * work.choices
    lacking = max(0, work.blocks(worker) - worker.cached_blocks - worker.room_blocks)
    # Running answers free the whole pool in about one answer's time: wait in proportion.
    room_s = lacking / max(worker.total_blocks, 1) * work.expected_tokens * step_s
    return room_s, decode_s, slowdown_s


def _alone(worker: WorkerLoad, work: _Work) -> Candidate:
    compute_s = _compute_s(worker, work)
    room_s, decode_s, slowdown_s = _decode_terms(worker, work)
    terms = Terms(
        queue_s=worker.queued_tokens / worker.prefill_tokens_per_s,
        adapter_s=worker.adapter_s,
        compute_s=compute_s,
        transfer_s=0.0,
        room_s=room_s,
        decode_s=decode_s,
        slowdown_s=slowdown_s + compute_s * _delayed(worker),
    )
    return Candidate(
        prefill=None, decode=worker, terms=terms, uncached_tokens=work.uncached(worker)
    )


def _pair(prefill: WorkerLoad, decode: WorkerLoad, work: _Work) -> Candidate:
    compute_s = _compute_s(prefill, work)
    room_s, decode_s, slowdown_s = _decode_terms(decode, work)
    edge = decode.edges.get(prefill.worker_id) or decode.unmeasured
    wire_s = work.payload_bytes(decode) / edge.bytes_per_s
    terms = Terms(
        queue_s=prefill.queued_tokens / prefill.prefill_tokens_per_s,
        adapter_s=decode.adapter_s + prefill.adapter_s,  # decode has it before it asks prefill
        compute_s=compute_s,
        transfer_s=EDGE_OVERHEAD_S + max(wire_s - compute_s, wire_s * EXPOSED_SHARE),
        room_s=room_s,
        decode_s=decode_s,
        slowdown_s=slowdown_s + compute_s * _delayed(prefill),
    )
    return Candidate(
        prefill=prefill, decode=decode, terms=terms, uncached_tokens=work.uncached(prefill)
    )
