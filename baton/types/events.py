"""What the engine tells the world after each step; plain structs that cross a process border."""

import msgspec

from baton.types.params import SampledToken
from baton.types.pool_counts import BlockCounts, TierChange, TierCounts
from baton.types.prompt_outputs import PromptLogprobs

ALL_LAYERS = -1


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """New tokens of one choice; ``index`` counts generated tokens from 0."""

    request_id: str
    choice: int
    index: int
    tokens: tuple[SampledToken, ...]
    finish_reason: str = ""  # "" | "stop" | "length"
    stop_token: int | None = None  # the token that stopped it (it is not among `tokens`)


class PromptOutputsReady(msgspec.Struct, frozen=True, tag=True):
    """What was asked of the prompt's rows; comes once, before the first token."""

    request_id: str
    scores: PromptLogprobs | None = None
    vector: bytes = b""  # float32, little-endian, not normalised


class Admitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request left the queue; ``cached_tokens`` of its prompt need no computing here.

    ``blocks`` is the block table of a PREFILL request (others need not know theirs).
    """

    request_id: str
    cached_tokens: int
    queue_ns: int
    blocks: tuple[int, ...] = ()


class Published(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """KV of a PREFILL request that may now be read: layers x blocks.

    ``layer_count`` may be ``ALL_LAYERS``; block 0 is the prompt's first.
    """

    request_id: str
    layer_begin: int
    layer_count: int
    block_begin: int
    block_count: int
    valid_tokens: int


class PromptDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A PREFILL request is computed; its blocks are held until it is released."""

    request_id: str
    first: tuple[SampledToken, ...]  # one per choice
    cached_tokens: int
    queue_ns: int
    prefill_ns: int
    tier_tokens: dict[str, int] = {}  # as in ``Ended``


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """Capacity for a REMOTE request is counted; its own cached prefix is pinned."""

    request_id: str
    generation: int
    skip_blocks: int


class Bound(msgspec.Struct, frozen=True, tag=True):
    """Pages of a REMOTE request, the pinned prefix first."""

    request_id: str
    generation: int
    blocks: tuple[int, ...]


class Revoked(msgspec.Struct, frozen=True, tag=True):
    """The pages of this generation are taken away; answer with ``drained`` when writing stopped."""

    request_id: str
    generation: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The one end of a request at this engine; its blocks are given back."""

    request_id: str
    error_code: str = ""
    error_message: str = ""
    queue_ns: int = 0
    prefill_ns: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    tier_tokens: dict[str, int] = {}  # of the cached ones, those that a tier gave back


class CacheChanged(msgspec.Struct, frozen=True, tag=True):
    """Hashes of blocks that the pool gained and lost, and what changed below it."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    tiers: tuple[TierChange, ...] = ()


class AdapterChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The set of adapters that this engine holds has changed, or could not."""

    name: str
    digest: str
    what: str  # "loaded" | "evicted" | "failed"
    held: int  # now
    load_s: float = 0.0


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load after a step."""

    step: int = 0
    duration_ns: int = 0
    prompt_tokens: int = 0  # computed in this step, of prompts
    prompt_context: int = 0  # tokens before each of them, in all
    decode_rows: int = 0
    running: int = 0
    waiting: int = 0
    answering: int = 0  # sequences that write answers
    queued_prompt_tokens: int = 0  # to be computed, as far as the cache did not hold them
    queued_prompt_context: int = 0  # tokens before each of them, in all
    blocks: BlockCounts = BlockCounts()
    oldest_quarantine: int = 0  # generation of the revoked reservation that drains longest; 0: none
    evictions: int = 0
    preemptions: int = 0
    mask_ns: int = 0  # of the step's duration, what grammars took
    drafts: int = 0  # since the start: rows that had draft tokens
    draft_tokens: int = 0  # since the start
    accepted_tokens: int = 0  # of them
    tiers: tuple[TierCounts, ...] = ()


Event = (
    Tokens
    | PromptOutputsReady
    | Admitted
    | Published
    | PromptDone
    | Reserved
    | Bound
    | Revoked
    | Ended
    | CacheChanged
    | AdapterChanged
    | StepDone
)
