"""One simulated request and all that came of it."""

from dataclasses import dataclass, field

from baton.types.block_hashes import hash_seed
from router.request import GenerationRequest

HASH_SEED = hash_seed(b"simulated", "simulated", "simulated")


@dataclass(slots=True, eq=False, kw_only=True)
class Record:
    """A request of the trace. Times are virtual nanoseconds; 0: it never came to that.

    Attributes:
        request: As the router sees it; its limit on the answer is not the answer's length.
        answer_tokens: How long the answer will be.
        hashes: Names of the prompt's full blocks.
        blocks: How many blocks the prompt has, a partial one at its end included.
        placed_ns: When it left the router's queue for the first time.
        computed_on: The worker that computed the prompt.
        cached_tokens: Of the prompt, there.
        pulled_blocks: Of them, that came from another worker's cache.
        predicted_first_s: What the router expected from its placement to the first token.
        regret_s: By how much another prefill worker would have been faster, by what the simulator
            knows of all queues; None where it was not asked.
        exposed_ns: From the first to the second token.
        error: Code of the error that ended it; empty for an answer.
    """

    request: GenerationRequest = field(repr=False)
    answer_tokens: int
    hashes: list[bytes] = field(repr=False)
    blocks: int
    ticket: int = 0
    attempt: int = 0
    computed_attempt: int = 0  # the last that yielded a token
    admitted: bool = False
    prefill_id: str | None = None
    decode_id: str | None = None
    placed_ns: int = 0
    started_ns: int = 0
    first_ns: int = 0
    second_ns: int = 0
    last_ns: int = 0
    ended_ns: int = 0
    computed_on: str = ""
    cached_tokens: int = 0
    pulled_blocks: int = 0
    transfer_bytes: float = 0.0
    transfer_ns: int = 0
    longest_gap_ns: int = 0
    tokens: int = 0
    predicted_first_s: float = 0.0
    regret_s: float | None = None
    error: str = ""
    ends: int = 0
    wants_prefill: bool = False
    died_holding: set[bytes] = field(default_factory=set)
    failed_prefills: set[bytes] = field(default_factory=set)

    @property
    def id(self) -> str:
        """The request id."""
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def sent(self) -> bool:
        """Whether the client has a part of the answer."""
        return self.tokens > 0

    @property
    def can_go_on(self) -> bool:
        """Whether another worker can go on behind what has come of the answer."""
        return self.sent

    def on_tokens(self, first_ns: int, last_ns: int, count: int) -> None:
        """A run of tokens reached the client, evenly between these times."""
        if not self.tokens:
            self.first_ns = first_ns
        else:
            gap_ns = first_ns - self.last_ns
            self.longest_gap_ns = max(self.longest_gap_ns, gap_ns)
            if self.tokens == 1:
                self.second_ns = first_ns
        if count > 1:
            step_ns = (last_ns - first_ns) // (count - 1)
            self.longest_gap_ns = max(self.longest_gap_ns, step_ns)
            self.second_ns = self.second_ns or first_ns + step_ns
        self.tokens += count
        self.last_ns = last_ns
