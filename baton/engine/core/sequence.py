"""Requests inside the engine, and their sequences (one per choice)."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from baton.engine.core.block_owners import CacheOwner
from baton.engine.core.pinned_blocks import Retention
from baton.engine.core.plan import SampleSpec
from baton.types import events as ev
from baton.types.block_hashes import block_hash
from baton.types.errors import InvalidRequestError
from baton.types.geometry import BLOCK_TOKENS
from baton.types.images import PromptImage
from baton.types.params import AdapterRef, SampledToken, SamplingParams
from baton.types.prompt_outputs import PromptOutputs


class Kind(enum.Enum):
    """Part of a request's work that this engine does."""

    FULL = "full"  # compute the prompt and the response
    PREFILL = "prefill"  # compute the prompt, sample first tokens, hold the KV until released
    REMOTE = "remote"  # receive the prompt's KV from another worker, then decode
    HELD = "held"  # hold the prompt's cached KV until released; compute nothing


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a request except its prompt.

    The gRPC shell fills it once (``baton.wire.submission.submit_from_wire``), ``messages.Submit``
    carries it, and ``EngineRequest`` holds it. A new field is added here and where it is used.
    """

    kind: Kind
    params: SamplingParams
    hash_seed: bytes  # root of the prompt's block hashes
    priority: int = 0
    ticket: int = 0
    skip_blocks: int = 0  # PREFILL: leading blocks that the decode worker has already
    cacheable: bool = True  # False for health probes
    adapter: AdapterRef | None = None
    pooling: str = ""  # if set: pool the prompt's hidden rows to a vector, sample nothing
    # If set: resume a response of another worker. Emitted tokens per choice, which are not sampled
    # again; None for a choice that has ended.
    emitted: tuple[tuple[int, ...] | None, ...] = ()
    tenant: str = ""
    kv_share: float = 0.0  # tenant's share of the cached blocks; 0: none
    retention: Retention | None = None  # of its blocks; None: as for any others
    images: tuple[PromptImage, ...] = ()  # of the prompt, in order

    @property
    def cache_owner(self) -> CacheOwner:
        """Owner of the blocks that the request computes."""
        return CacheOwner(self.tenant, self.kv_share)


@dataclass(slots=True, kw_only=True)
class EngineRequest:
    """Request and its progress, ordered by ``(priority, ticket)``."""

    request_id: str
    prompt: list[int]
    spec: RequestSpec
    kind: Kind = field(init=False)  # from the spec, until a KV transfer is abandoned
    cached_tokens: int = 0  # cached prompt tokens at first admission
    preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # of the prompt's full blocks
    live_choices: set[int] = field(default_factory=set)
    admitted_ns: int = 0
    submitted_ns: int = 0
    prompt_done_ns: int = 0
    tier_tokens: dict[str, int] = field(default_factory=dict)  # restored from tiers, by tier
    input_ns: int = 0  # its part of the steps, for the prompt; see ``core.divided``
    output_ns: int = 0  # the same for generated tokens

    def __post_init__(self) -> None:
        self.kind = self.spec.kind
        self.live_choices = set(range(self.spec.params.n))
        for choice, tokens in enumerate(self.spec.emitted):
            if tokens is None:
                self.live_choices.discard(choice)

    def check_emitted(self) -> None:
        """Raise ``InvalidRequestError`` if emitted tokens to resume do not fit the request."""
        emitted = self.spec.emitted
        params = self.spec.params
        if not emitted:
            return
        if len(emitted) != params.n:
            raise InvalidRequestError(
                f"cannot resume: `emitted` has {len(emitted)} choices, the request has n={params.n}"
            )
        if self.spec.pooling or params.prompt_logprobs is not None:
            raise InvalidRequestError("cannot resume: the request has prompt_logprobs or pooling")
        for tokens in emitted:
            if tokens is not None and not 0 < len(tokens) < params.max_tokens:
                raise InvalidRequestError(
                    f"cannot resume: {len(tokens)} tokens were already generated, "
                    f"max_tokens is {params.max_tokens}"
                )

    @property
    def order(self) -> tuple[int, int]:
        """Sort key; smaller keys run first and are preempted last."""
        return (self.spec.priority, self.spec.ticket)

    def prompt_done(self, first: Sequence[SampledToken]) -> ev.PromptDone:
        """Return the event that the prompt's KV is complete, with the first tokens."""
        return ev.PromptDone(
            request_id=self.request_id,
            first=tuple(first),
            cached_tokens=self.cached_tokens,
            queue_ns=self.admitted_ns - self.submitted_ns,
            prefill_ns=self.prompt_done_ns - self.admitted_ns,
            tier_tokens=self.tier_tokens,
            computed_ns=self.input_ns + self.output_ns,
        )

    def published_prefix(self, matched_blocks: int, block_tokens: int) -> ev.Published:
        """Return the event that cached leading blocks beyond ``skip_blocks`` can be read."""
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
        """Return a collector of requested prompt outputs, or None."""
        alternatives = self.spec.params.prompt_logprobs
        pooling = self.spec.pooling
        if not pooling and alternatives is None:
            return None
        return PromptOutputs(self.prompt, alternatives, pooling)


@dataclass(slots=True, eq=False, kw_only=True)
class TokenSequence:
    """Tokens, KV progress and blocks of one choice.

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
    found_tokens: int = 0  # not to compute, as known when it was queued, for the load report
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks, as far as needed
    registered_blocks: int = 0  # leading blocks whose hashes are in the pool
    running: bool = False
    asked_tiers: bool = False  # blocks were requested from a tier since it was queued
    samples: tuple[SampleSpec, ...] = ()  # of its decodes, once it decodes
    # Set if outputs of every prompt row are needed: then no cached prefix is used.
    prompt_outputs: PromptOutputs | None = None

    @property
    def generated(self) -> int:
        """Number of tokens sampled so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def decodes(self) -> bool:
        """Return whether only the newest sampled token is left to compute."""
        length = len(self.tokens)
        return self.computed == length - 1 and length > len(self.request.prompt)

    def full_hashes(self, upto_tokens: int, block_tokens: int = BLOCK_TOKENS) -> list[bytes]:
        """Return hashes of the full blocks within the first ``upto_tokens`` tokens."""
        count = upto_tokens // block_tokens
        hashes = self.block_hashes
        while len(hashes) < count:
            begin = len(hashes) * block_tokens
            parent = hashes[-1] if hashes else self.request.spec.hash_seed
            hashes.append(block_hash(parent, self.tokens[begin : begin + block_tokens]))
        return hashes[:count]


def blocks_for(tokens: int) -> int:
    """Return the number of blocks that ``tokens`` tokens occupy."""
    return -(-tokens // BLOCK_TOKENS)
