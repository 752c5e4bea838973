"""A request as the router carries it: validated, tokenized, every parameter resolved."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from baton.text.reasoning import Thinking
from baton.types.params import AdapterRef, SamplingParams

Mode = Literal["auto", "disaggregated", "colocated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """The workers that a probe must use; ``prefill`` is None for a worker alone."""

    prefill: str | None
    decode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What of an answer's tokens its text shows.

    Attributes:
        stops: Strings that end the text.
        stop_text: The text ends with what ended it.
        special_tokens: They are shown too.
        token_ids: The ids are told beside the text.
    """

    stops: tuple[str, ...] = ()
    stop_text: bool = False
    special_tokens: bool = False
    token_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and how to continue it.

    Attributes:
        prompt: Token ids.
        checked_schema: JSON text; whether an answer fits it is looked at when it is complete.
        checked_tools: By the name of a tool the same, of the arguments of its calls.
        thinking: The answer may begin with thinking, which is not part of its text.
        shown: What of its tokens the answer shows.
        reads_calls: The answer may hold calls of tools, which are not part of its text.
        cache_scope: Requests of different scopes share no cached prefix.
        adapter: The LoRA adapter to answer with; none is the model itself.
        client_id: What the client calls it, by ``x-request-id``; need not be one of a kind.
        arrived_ns: Monotonic clock of the router, as is ``deadline_ns``.
        pinned: Only for probes.
        traceparent: Parent of the spans at the workers.
        pooling: Not empty: the answer is the prompt's pooled hidden state; nothing is sampled.
        prompt_logprobs_only: Only the prompt's logprobs are asked for: the one token that is
            sampled is not shown.
        goes_on: An answer that began at another worker is to go on; ``prompt`` ends with it.
        part_of: The call, where it has several prompts or inputs: each is a request.
    """

    request_id: str
    prompt: tuple[int, ...] = field(repr=False)
    sampling: SamplingParams
    shown: Shown = Shown()
    reads_calls: bool = False
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
    traceparent: str = ""
    pooling: str = ""
    prompt_logprobs_only: bool = False
    goes_on: bool = False
    part_of: str = ""

    @property
    def answer_id(self) -> str:
        """The name of the call, for the client."""
        return self.part_of or self.request_id

    @property
    def adapter_digest(self) -> str:
        """Of the adapter, hexadecimal; empty for the model itself."""
        return self.adapter.digest if self.adapter is not None else ""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's tokens are to have log-probabilities."""
        return self.sampling.prompt_logprobs is not None

    @property
    def whole_prompt(self) -> bool:
        """Whether all of the prompt is computed, whatever is cached."""
        return self.wants_prompt_logprobs or bool(self.pooling)


def part_id(request_id: str, index: int) -> str:
    """The name of one prompt's request, of a call ``request_id`` with several prompts."""
    return f"{request_id}-{index}"
