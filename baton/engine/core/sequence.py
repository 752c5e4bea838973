"""A request inside the engine, and the sequences (one per choice) that it consists of."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from baton.types import events as ev
from baton.types.block_hashes import block_hash
from baton.types.errors import InvalidRequestError
from baton.types.geometry import BLOCK_TOKENS
from baton.types.params import AdapterRef, SampledToken, SamplingParams
from baton.types.prompt_outputs import PromptOutputs


class Kind(enum.Enum):
    """What the engine is to do with a request."""

    FULL = "full"  # compute the prompt and the answer here
    PREFILL = "prefill"  # compute the prompt, sample first tokens, hold the KV until released
    REMOTE = "remote"  # the prompt's KV arrives from elsewhere; then answer
    HELD = "held"  # hold the KV that the cache has of the prompt until released; compute nothing


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of an engine, beside the prompt.

    The gRPC shell fills it once (``baton.wire.codecs.request_spec_from_wire``), ``messages.Submit``
    carries it, and ``EngineRequest`` holds it: a new field is added here and where it is used.
    """

    kind: Kind
    params: SamplingParams
    hash_seed: bytes  # the root of the prompt's block hashes
    priority: int = 0
    ticket: int = 0
    skip_blocks: int = 0  # PREFILL: leading blocks that the taker has already
    cacheable: bool = True  # False for health probes
    adapter: AdapterRef | None = None
    pooling: str = ""  # not empty: pool the prompt's hidden rows to a vector, sample nothing
    # Not empty: an answer that began elsewhere goes on. Per choice the tokens that were emitted,
    # which are never sampled again; None for a choice that has ended.
    emitted: tuple[tuple[int, ...] | None, ...] = ()


@dataclass(slots=True, kw_only=True)
class EngineRequest:
    """A request and how far it has come; ``(priority, ticket)`` is its place in every order."""

    request_id: str
    prompt: list[int]
    spec: RequestSpec
    kind: Kind = field(init=False)  # the spec's, until a hand-off is given up
    cached_tokens: int = 0  # prompt tokens that were in the cache when it was first admitted
    preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # of the prompt's full blocks
    live_choices: set[int] = field(default_factory=set)
    admitted_ns: int = 0
    submitted_ns: int = 0
    prompt_done_ns: int = 0
    tier_tokens: dict[str, int] = field(default_factory=dict)  # brought back for it, by tier

    def __post_init__(self) -> None:
        self.kind = self.spec.kind
        self.live_choices = set(range(self.spec.params.n))
        for choice, tokens in enumerate(self.spec.emitted):
            if tokens is None:
                self.live_choices.discard(choice)

    def check_emitted(self) -> None:
        """Refuse an answer that is to go on, but cannot.

        Raises:
            InvalidRequestError: Says why.
        """
        emitted = self.spec.emitted
        params = self.spec.params
        if not emitted:
            return
        if len(emitted) != params.n or self.spec.pooling or params.prompt_logprobs is not None:
            raise InvalidRequestError("what was emitted does not fit the request")
        for tokens in emitted:
            if tokens is not None and not 0 < len(tokens) < params.max_tokens:
                raise InvalidRequestError(
                    f"an answer of at most {params.max_tokens} tokens cannot go on behind "
                    f"{len(tokens)}"
                )

    @property
    def order(self) -> tuple[int, int]:
        """Smaller runs first and is preempted last."""
        return (self.spec.priority, self.spec.ticket)

    def prompt_done(self, first: Sequence[SampledToken]) -> ev.PromptDone:
        """The report that its prompt's KV may be had, with the first token of each choice."""
        return ev.PromptDone(
            request_id=self.request_id,
            first=tuple(first),
            cached_tokens=self.cached_tokens,
            queue_ns=self.admitted_ns - self.submitted_ns,
            prefill_ns=self.prompt_done_ns - self.admitted_ns,
            tier_tokens=self.tier_tokens,
        )

    def published_prefix(self, matched_blocks: int, block_tokens: int) -> ev.Published:
        """The report that those leading blocks may be read that the taker lacks."""
        skip_blocks = self.spec.skip_blocks
        return ev.Published(
            request_id=self.request_id,
            layer_begin=0,
            layer_count=ev.ALL_LAYERS,
            block_begin=skip_blocks,
            block_count=matched_blocks - skip_blocks,
            valid_tokens=(matched_blocks - skip_blocks) * block_tokens,
        )

    def new_prompt_outputs(self) -> PromptOutputs | None:
        """Where a sequence that computes the prompt gathers what is asked of its rows."""
        alternatives = self.spec.params.prompt_logprobs
        pooling = self.spec.pooling
        if not pooling and alternatives is None:
            return None
        return PromptOutputs(self.prompt, alternatives, pooling)


@dataclass(slots=True, eq=False, kw_only=True)
class TokenSequence:
    """One choice: ``computed`` chases ``len(tokens)``.

    tokens   [ prompt ................ | generated ....... ]
    KV       [ computed ......................... | to do  ]
    blocks   [ 16 | 16 | 16 | ... one table entry per 16   ]
    hashes   [ registered: full blocks that others may reuse ]
    """

    sequence_id: int
    request: EngineRequest
    choice: int
    tokens: list[int]
    computed: int = 0
    found_tokens: int = 0  # that were in the cache when it began to wait: for the load's report
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks, as far as needed
    registered_blocks: int = 0  # leading blocks whose hashes the pool was told
    running: bool = False
    asked_tiers: bool = False  # since it waits, blocks were ordered back from a tier
    # Set while every row of the prompt is asked for: then no cached prefix is used.
    prompt_outputs: PromptOutputs | None = None

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def decodes(self) -> bool:
        """Whether all that is left to compute is the answer's newest token."""
        return self.computed == len(self.tokens) - 1 and self.generated > 0

    def full_hashes(self, upto_tokens: int, block_tokens: int = BLOCK_TOKENS) -> list[bytes]:
        """Hashes of the full blocks within the first ``upto_tokens`` tokens."""
        count = upto_tokens // block_tokens
        hashes = self.block_hashes
        while len(hashes) < count:
            begin = len(hashes) * block_tokens
            parent = hashes[-1] if hashes else self.request.spec.hash_seed
            hashes.append(block_hash(parent, self.tokens[begin : begin + block_tokens]))
        return hashes[:count]


def blocks_for(tokens: int) -> int:
    """Blocks that ``tokens`` tokens occupy."""
    return -(-tokens // BLOCK_TOKENS)
