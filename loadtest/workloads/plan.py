"""Plan of a load test: all requests and times, decided before the first request is sent.

    Plan ─▶ Conversation (starts at a time) ─▶ Turn (one request)

A single request is a conversation of one turn. In a conversation each turn waits for the end of the
previous one, or in a graph of those that it names, and then for ``think_s`` (closed loop).
Conversations do not wait for each other (open loop). Prompts are recipes that
``loadtest.workloads.prompts`` expands, so that the plan of a whole trace stays small and two runs
of one plan send the same text.
"""

import hashlib
from collections.abc import Iterator
from itertools import islice

import msgspec


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Part of a prompt: the first ``tokens`` words of the endless text named ``key``."""

    key: int
    tokens: int


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Recipe of an agent's system prompt and tools, see ``loadtest.workloads.agents``."""

    key: int  # of the text; equal keys give equal prompts and tools
    tools: int
    tokens: int  # of the system prompt and the tools together


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a conversation."""

    index: int  # unique in the plan
    prompt: tuple[Segment, ...]
    max_tokens: int
    think_s: float = 0.0  # pause after the end of the previous turn
    continues: bool = False  # send the previous turns, with their responses, before the prompt
    abort_after_s: float | None = None  # seconds from sending until the client disconnects
    group: str = ""  # group of the results: "long", "hot", "tool" …
    tenant: str = ""
    session: int | None = None  # number of an agent's session
    number: int = 0  # of the turn in this session, from 1
    body: str = ""  # JSON of a recorded request, instead of a prompt
    after: tuple[int, ...] = ()  # in a graph: places of the turns that must have ended

    @property
    def prompt_tokens(self) -> int:
        """Planned tokens of this turn's own text, without history."""
        return sum(segment.tokens for segment in self.prompt)


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive turns of one user."""

    start_s: float  # planned time of the first turn
    turns: tuple[Turn, ...]
    agent: AgentSetup | None = None  # system prompt and tools, if the user is an agent
    is_graph: bool = False  # a turn waits for those in ``after``, not for the one before it


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Whole load; ``parameters`` describes its origin in the report."""

    name: str
    seed: int
    conversations: tuple[Conversation, ...]
    parameters: dict[str, str | int | float] = {}

    def turns(self) -> Iterator[Turn]:
        """Yield every request of the plan."""
        for conversation in self.conversations:
            yield from conversation.turns

    @property
    def request_count(self) -> int:
        """Number of requests in the plan."""
        return sum(len(conversation.turns) for conversation in self.conversations)

    def share(self, number: int, shares: int) -> "Plan":
        """Return the share of client ``number`` of ``shares``; conversations are not split."""
        own = tuple(islice(self.conversations, number, None, shares))
        return msgspec.structs.replace(self, conversations=own)

    def without(self, done: set[int]) -> "Plan":
        """Return the plan without finished conversations; unfinished ones start again."""
        left = tuple(
            conversation
            for conversation in self.conversations
            if any(turn.index not in done for turn in conversation.turns)
        )
        return msgspec.structs.replace(self, conversations=left)

    def digest(self) -> str:
        """Return an id of the plan's content; a run is resumed only with an equal plan."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()
