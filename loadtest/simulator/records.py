"""Record of one simulated request."""

from dataclasses import dataclass, field

from baton.types.block_hashes import hash_seed
from router.request import GenerationRequest

HASH_SEED = hash_seed(b"simulated", "simulated", "simulated")


@dataclass(slots=True, eq=False, kw_only=True)
class Record:
    """Request of a trace, with its results. Times are virtual nanoseconds; 0 if never reached.

    Attributes:
        request: Request as the router receives it; its limit is not the response's length.
        predicted_first_s: Router's prediction of the time from placement to the first token.
        regret_s: Time that the best prefill worker would have saved, by the true queues of all
            workers; None if not computed.
        sent_ns: Arrival of the first try; ``request`` has that of the last one.
        retry_after_s: ``Retry-After`` of the first refusal.
        again_ns: Arrival of the second try.
    """

    request: GenerationRequest = field(repr=False)
    answer_tokens: int  # output tokens of the response
    hashes: list[bytes] = field(repr=False)  # block hashes of the prompt's full blocks
    blocks: int  # blocks of the prompt, including a partial one at its end
    sent_ns: int = 0
    tries: int = 1  # how often the client has sent it, until its time for the next one
    retry_after_s: float = 0.0
    again_ns: int = 0
    ticket: int = 0
    attempt: int = 0
    computed_attempt: int = 0  # the last attempt that yielded a token
    admitted: bool = False
    prefill_id: str | None = None
    decode_id: str | None = None
    placed_ns: int = 0  # time when it first left the router's queue
    started_ns: int = 0
    first_ns: int = 0
    second_ns: int = 0
    last_ns: int = 0
    ended_ns: int = 0
    computed_on: str = ""  # id of the worker that computed the prompt
    cached_tokens: int = 0  # prompt tokens cached on that worker
    pulled_blocks: int = 0  # blocks of these that came from another worker's cache
    transfer_bytes: float = 0.0
    transfer_ns: int = 0
    longest_gap_ns: int = 0
    tokens: int = 0
    predicted_first_s: float = 0.0
    predicted_step_s: float = 0.0
    regret_s: float | None = None
    error: str = ""  # code of the error that ended it, or ""
    ends: int = 0
    wants_prefill: bool = False
    died_holding: set[bytes] = field(default_factory=set)
    failed_prefills: set[bytes] = field(default_factory=set)

    @property
    def id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt)

    @property
    def sent(self) -> bool:
        """True if the client has received tokens."""
        return self.tokens > 0

    @property
    def can_go_on(self) -> bool:
        """True if another worker can resume the response."""
        return self.sent

    def on_tokens(self, first_ns: int, last_ns: int, count: int) -> None:
        """Record tokens that reached the client evenly between these times."""
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
