"""Events that the engine reports after each step, as plain structs sent between processes."""

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
    stop_token: int | None = None  # the end token, which is not in `tokens`


class PromptOutputsReady(msgspec.Struct, frozen=True, tag=True):
    """Requested outputs of the prompt's rows, sent once before the first token."""

    request_id: str
    scores: PromptLogprobs | None = None
    vector: bytes = b""  # float32, little-endian, not normalised


class Admitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request left the queue; ``cached_tokens`` of its prompt need no computing.

    ``blocks`` is the block table of a PREFILL or HELD request.
    """

    request_id: str
    cached_tokens: int
    queue_ns: int
    blocks: tuple[int, ...] = ()


class Published(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """KV of a PREFILL request that can now be read: layers x blocks.

    ``layer_count`` may be ``ALL_LAYERS``; block 0 is the prompt's first.
    """

    request_id: str
    layer_begin: int
    layer_count: int
    block_begin: int
    block_count: int
    valid_tokens: int


class PromptDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prompt of a PREFILL request is computed; its blocks are held until release."""

    request_id: str
    first: tuple[SampledToken, ...]  # one per choice
    cached_tokens: int
    queue_ns: int
    prefill_ns: int
    tier_tokens: dict[str, int] = {}  # see ``Ended``
    computed_ns: int = 0  # this request's part of the steps
    engine_transfer: bytes = b""  # with it the engine of the decode worker loads the KV by itself


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """Blocks are promised to a REMOTE request; its cached prefix is pinned."""

    request_id: str
    generation: int
    skip_blocks: int


class Bound(msgspec.Struct, frozen=True, tag=True):
    """Pages of a REMOTE request, the pinned prefix first."""

    request_id: str
    generation: int
    blocks: tuple[int, ...]


class Revoked(msgspec.Struct, frozen=True, tag=True):
    """Pages of this generation were revoked; reply ``Drained`` after the last write."""

    request_id: str
    generation: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The engine has loaded the KV of a REMOTE request by itself, and decodes."""

    request_id: str
    generation: int


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not load the KV of a REMOTE request; it waits for another peer's."""

    request_id: str
    generation: int
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """End of a request at this engine, sent once; its blocks are released."""

    request_id: str
    error_code: str = ""
    error_message: str = ""
    queue_ns: int = 0
    prefill_ns: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    tier_tokens: dict[str, int] = {}  # cached tokens restored from tiers, by tier
    input_ns: int = 0  # this request's part of the steps, for its prompt
    output_ns: int = 0  # the same for generated tokens


class CacheChanged(msgspec.Struct, frozen=True, tag=True):
    """Block hashes that the pool gained and lost, and changes of the tiers."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    tiers: tuple[TierChange, ...] = ()


class AdapterChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change of the loaded adapters, or a failed load."""

    name: str
    digest: str
    what: str  # "loaded" | "evicted" | "failed"
    held: int  # adapters loaded now
    load_s: float = 0.0


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load and counters after a step."""

    step: int = 0
    present: bool = False  # the load is that of this moment, and later ones are reported at once
    duration_ns: int = 0
    prompt_tokens: int = 0  # computed in this step
    prompt_context: int = 0  # sum of their context lengths
    decode_rows: int = 0
    decode_context: int = 0  # tokens before those of these rows, in all
    running: int = 0
    waiting: int = 0
    answering: int = 0  # sequences that decode
    answering_context: int = 0  # their tokens
    coming_context: int = 0  # tokens of the sequences that will decode later
    queued_prompt_tokens: int = 0  # uncached tokens still to compute
    queued_prompt_context: int = 0  # sum of their context lengths
    blocks: BlockCounts = BlockCounts()
    oldest_quarantine: int = 0  # generation of the longest-draining reservation; 0: none
    evictions: int = 0
    preemptions: int = 0
    mask_ns: int = 0  # part of the duration spent on grammars
    drafts: int = 0  # since the start: rows with draft tokens
    draft_tokens: int = 0  # since the start
    accepted_tokens: int = 0  # since the start
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
    | Loaded
    | LoadFailed
    | Ended
    | CacheChanged
    | AdapterChanged
    | StepDone
)
