"""What a load test will ask and when, decided before the first request is sent.

    Plan ─▶ Conversation (begins at a moment) ─▶ Turn (one request)

A single request is a conversation of one turn. In a conversation each turn waits for the end of the
one before and then for ``think_s``: that is the closed loop. Conversations do not wait for each
other: that is the open loop. Prompts are recipes (``loadtest.workloads.prompts`` writes them out),
so that the plan of a whole trace stays small and two runs of one plan send the same text.
"""

import hashlib
from collections.abc import Iterator
from itertools import islice

import msgspec


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a prompt: the first ``tokens`` words of the endless text that ``key`` names."""

    key: int
    tokens: int


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    index: int  # in the plan; no two requests share it
    prompt: tuple[Segment, ...]
    max_tokens: int
    think_s: float = 0.0  # after the end of the turn before
    continues: bool = False  # the turns before stand ahead of the prompt, with their answers
    abort_after_s: float | None = None  # the client hangs up so long after the send
    group: str = ""  # by which results are split: "long", "hot", "tool" …
    tenant: str = ""
    body: str = ""  # a recorded request's own JSON, instead of a prompt

    @property
    def prompt_tokens(self) -> int:
        """Tokens of this turn's own text, as planned; history is not counted."""
        return sum(segment.tokens for segment in self.prompt)


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Turns, one after another."""

    start_s: float  # the first turn is meant to be sent then; since the begin of the run
    turns: tuple[Turn, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The whole load; ``parameters`` says in the report what it was made from."""

    name: str
    seed: int
    conversations: tuple[Conversation, ...]
    parameters: dict[str, str | int | float] = {}

    def turns(self) -> Iterator[Turn]:
        """Every request of the plan."""
        for conversation in self.conversations:
            yield from conversation.turns

    @property
    def request_count(self) -> int:
        """How many requests will be sent."""
        return sum(len(conversation.turns) for conversation in self.conversations)

    def share(self, number: int, shares: int) -> "Plan":
        """What client ``number`` of ``shares`` sends; a conversation is never split."""
        own = tuple(islice(self.conversations, number, None, shares))
        return msgspec.structs.replace(self, conversations=own)

    def without(self, done: set[int]) -> "Plan":
        """What is left when these requests are done: a conversation begun is begun again."""
        left = tuple(
            conversation
            for conversation in self.conversations
            if any(turn.index not in done for turn in conversation.turns)
        )
        return msgspec.structs.replace(self, conversations=left)

    def digest(self) -> str:
        """Equal for equal plans; a run is resumed only with the plan it was begun with."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()
