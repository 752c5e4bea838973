"""Requests of the router: validated, tokenized, with all parameters resolved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from baton.text.reasoning import Thinking
from baton.text.tools import ExpectedCalls
from baton.types.images import PromptImage, hashed_tokens
from baton.types.params import AdapterRef, SamplingParams
from baton.types.slo import Slo
from router.sessions.hints import NO_HINTS, Hints
from router.sessions.identity import NO_SESSION, Session
from router.sessions.prompts import PromptChange

Mode = Literal["auto", "disaggregated", "colocated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Workers that a probe must use; ``prefill`` is None for a single worker."""

    prefill: str | None
    decode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Options of converting output tokens to text.

    Attributes:
        stops: Strings that end the text.
        stop_text: Whether the text includes the stop string.
        special_tokens: Whether the text includes special tokens.
        token_ids: Whether the response contains token ids besides the text.
        stop_token: Whether these include the token that ended the response.
    """

    stops: tuple[str, ...] = ()
    stop_text: bool = False
    special_tokens: bool = False
    token_ids: bool = False
    stop_token: bool = False


class Routed(NamedTuple):
    """Model that answers a request, for the client, the request report and the trace.

    Attributes:
        model: Name of the model.
        version: Digest of its weights, shortened.
        why: Reason of the choice, see ``router.lanes.routes.Route``.
        rollback_to: Model to which a rollback would lead; empty: none.
        requested: Name that the client sent.
    """

    model: str
    version: str
    why: str
    rollback_to: str
    requested: str

    def header(self) -> str:
        """Return the value of ``x-baton-model``."""
        back = f"; rollback={self.rollback_to}" if self.rollback_to else ""
        return f"{self.model}; version={self.version}; why={self.why}{back}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A prompt and the parameters of its continuation.

    Attributes:
        prompt: Token ids, those of images included; packed in requests of clients.
        images: Images of the prompt, in order; none in records of ended requests.
        checked_schema: JSON schema (as text) that the complete answer is checked against.
        checked_tools: Tool name to the schema that arguments of its calls are checked against.
        thinking: Thinking, which may precede the answer and is not part of its text.
        expected_calls: Calls of tools that the answer may contain, which are not part of its text.
        cache_scope: Scope within which requests share cached prefixes.
        adapter: LoRA adapter; None: the base model.
        client_id: The client's ``x-request-id``, which need not be unique.
        arrived_ns: Arrival on the router's monotonic clock, as ``deadline_ns``.
        probe: Whether no client waits for it, and neither usage nor metrics count it.
        pinned: Workers to use; only for probes.
        shadow: Whether it is a copy of a client's request, which is a probe that may run on any
            workers.
        traceparent: Parent of the spans at the workers, with W3C's ``tracestate`` and ``baggage``.
        pooling: Pooling of the prompt's hidden states; empty: tokens are generated instead.
        prompt_logprobs_only: Whether only the prompt's logprobs are returned, without the one
            token that is sampled.
        goes_on: Whether to resume an answer of another worker, whose tokens end the ``prompt``.
        slo: Latencies that it should keep; None: it is served whenever there is room.
        part_of: Id of the call, if it has several prompts or inputs, which are requests each.
        key_id: Id of the caller's API key.
        routed: Model that answers; None for probes.
        expected_tokens: Length of the response that the client expects; 0: not given.
        session: Conversation to which the client says that it belongs.
        hints: Hints of the client about its KV and its turn.
        flow: Group of requests that take turns within their tenant; empty: its session.
        prompt_change: Difference of its prompt from an earlier one of its session.
        past_baton: Whether a gateway sends it, as the client did, to the server that is chosen.
            Then ``cache_scope`` is the client's salt, and reports of workers do not show it.
        among: Workers that may serve it; None: all.
        chain: Seed and hashes of the prompt's blocks, if they are computed before its placement.
    """

    request_id: str
    prompt: Sequence[int] = field(repr=False)
    sampling: SamplingParams
    images: tuple[PromptImage, ...] = field(default=(), repr=False)
    shown: Shown = Shown()
    expected_calls: ExpectedCalls | None = field(default=None, repr=False)
    checked_schema: str = field(default="", repr=False)
    checked_tools: Mapping[str, str] = field(default_factory=dict, repr=False)
    thinking: Thinking | None = None
    tenant: str = "default"
    cache_scope: str = ""
    adapter: AdapterRef | None = None
    priority: int = 0
    mode: Mode = "auto"
    user: str | None = None
    client_id: str = ""
    arrived_ns: int
    deadline_ns: int
    probe: bool = False
    pinned: Pinned | None = None
    shadow: bool = False
    traceparent: str = ""
    tracestate: str = ""
    baggage: str = ""
    pooling: str = ""
    prompt_logprobs_only: bool = False
    goes_on: bool = False
    slo: Slo | None = None
    part_of: str = ""
    key_id: str = ""
    routed: Routed | None = None
    expected_tokens: int = 0
    session: Session = NO_SESSION
    hints: Hints = NO_HINTS
    flow: str = ""
    prompt_change: PromptChange | None = field(default=None, repr=False)
    past_baton: bool = False
    among: frozenset[str] | None = None
    chain: bytes = field(default=b"", repr=False)

    @property
    def answer_id(self) -> str:
        """Id of the call that clients see."""
        return self.part_of or self.request_id

    @property
    def hashed(self) -> Sequence[int]:
        """Tokens by which the blocks of the prompt are named."""
        return hashed_tokens(self.prompt, self.images)

    @property
    def adapter_digest(self) -> str:
        """Digest of the adapter in hexadecimal; empty for the base model."""
        return self.adapter.digest if self.adapter is not None else ""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if log-probabilities of the prompt's tokens are requested."""
        return self.sampling.prompt_logprobs is not None

    @property
    def whole_prompt(self) -> bool:
        """True if the whole prompt must be computed even if a prefix is cached."""
        return self.wants_prompt_logprobs or bool(self.pooling)


def part_id(request_id: str, index: int) -> str:
    """Return the id of one prompt's request in a call with several prompts."""
    return f"{request_id}-{index}"
