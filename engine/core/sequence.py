"""A request inside the engine, and the sequences (one per choice) that it consists of."""

import enum
from dataclasses import dataclass, field

from engine.core.block_hashes import block_hash
from engine.core.geometry import BLOCK_TOKENS
from engine.core.params import SamplingParams
from engine.core.prompt_outputs import PromptOutputs


class Kind(enum.Enum):
    """What the engine is to do with a request."""

    FULL = "full"  # compute the prompt and the answer here
    PREFILL = "prefill"  # compute the prompt, draw first tokens, hold the KV until released
    REMOTE = "remote"  # the prompt's KV arrives from elsewhere; then answer


@dataclass(slots=True)
class EngineRequest:
    """A request as the engine knows it; ``(priority, ticket)`` is its place in every order."""

    request_id: str
    kind: Kind
    prompt: list[int]
    params: SamplingParams
    hash_seed: bytes
    priority: int = 0
    ticket: int = 0
    skip_blocks: int = 0  # PREFILL: leading blocks that the taker has already
    cacheable: bool = True  # False for health probes
    adapter: str = ""  # digest of a LoRA adapter that the runner holds as long as this lives
    pooling: str = ""  # not empty: pool the prompt's hidden rows to a vector, draw nothing
    cached_tokens: int = 0  # prompt tokens found in the cache when first admitted
    preemptions: int = 0
    names: list[bytes] = field(default_factory=list)  # of the prompt's full blocks
    live_choices: set[int] = field(default_factory=set)
    admitted_ns: int = 0
    submitted_ns: int = 0
    prompt_done_ns: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Smaller runs first and is preempted last."""
        return (self.priority, self.ticket)

    def new_prompt_outputs(self) -> PromptOutputs | None:
        """Where a sequence that computes the prompt gathers what is wanted of its rows."""
        if not self.pooling and self.params.prompt_logprobs is None:
            return None
        return PromptOutputs(self.prompt, self.params.prompt_logprobs, self.pooling)


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One choice: ``computed`` chases ``len(tokens)``.

    tokens   [ prompt ................ | generated ....... ]
    KV       [ computed ......................... | to do  ]
    blocks   [ 16 | 16 | 16 | ... one table entry per 16   ]
    names    [ named: full blocks that others may reuse |  ]
    """

    sequence_id: int
    request: EngineRequest
    choice: int
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)  # one per full block of `tokens`, as needed
    named: int = 0  # leading blocks whose names were offered to the pool
    running: bool = False
    prompt_outputs: PromptOutputs | None = (
        None  # wants every row of the prompt: no cached prefix will do
    )

    @property
    def generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - len(self.request.prompt)

    def full_hashes(self, upto_tokens: int) -> list[bytes]:
        """Names of the full blocks within the first ``upto_tokens`` tokens."""
        count = upto_tokens // BLOCK_TOKENS
        while len(self.names) < count:
            begin = len(self.names) * BLOCK_TOKENS
            parent = self.names[-1] if self.names else self.request.hash_seed
            self.names.append(block_hash(parent, self.tokens[begin : begin + BLOCK_TOKENS]))
        return self.names[:count]


def blocks_for(tokens: int) -> int:
    """Blocks that ``tokens`` tokens occupy."""
    return -(-tokens // BLOCK_TOKENS)
