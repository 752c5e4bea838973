"""Golden prompts of a model, and the evidence about a canary that routers add up."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_GOLDEN = 256
"""Limit of the golden prompts of one model."""
MAX_TOKENS = 1024
"""Limit of the tokens of one answer."""


class GoldenPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Prompt with the only right answer, or a property of all right answers.

    It has either ``prompt`` or ``messages``, and one of the last four attributes. Answers are
    greedy.

    Attributes:
        name: Name in reports.
        prompt: Text.
        messages: Turns of a chat, for the chat template.
        max_tokens: Number of tokens after which the answer ends.
        tokens: The answer's token ids.
        regex: Regular expression that is found in the answer's text.
        schema: JSON schema of the answer's text.
        same_as: Model that gives the same tokens, to a prompt of the same tokens.
    """

    name: str
    prompt: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    max_tokens: int = 16
    tokens: tuple[int, ...] = ()
    regex: str = ""
    schema: dict[str, Any] | None = None
    same_as: str = ""

    def __post_init__(self) -> None:
        """Check the attributes together."""
        if not self.name or not self.name.isprintable() or len(self.name) > 80:
            raise ValueError("name: must have 1 to 80 printable characters")
        if bool(self.prompt) == bool(self.messages):
            raise ValueError(f"{self.name}: needs either prompt or messages")
        if not all({"role", "content"} <= one.keys() for one in self.messages):
            raise ValueError(f"{self.name}: each of messages needs role and content")
        if not 1 <= self.max_tokens <= MAX_TOKENS:
            raise ValueError(
                f"{self.name}: max_tokens must be from 1 to {MAX_TOKENS} (got {self.max_tokens})"
            )
        expected = (self.tokens, self.regex, self.schema is not None, self.same_as)
        if sum(map(bool, expected)) != 1:
            raise ValueError(f"{self.name}: needs one of tokens, regex, schema and same_as")
        try:
            re.compile(self.regex)
        except re.error as error:
            raise ValueError(f"{self.name}: regex {self.regex!r}: {error}") from error


class Tally(msgspec.Struct, kw_only=True):
    """Requests that one model has answered for a name.

    Attributes:
        requests: Number of requests that ended by themselves.
        errors: Number of those that ended with an error of the fleet.
        ttft: Number of requests by bucket of their time to first token, see `bucket_of`.
        itl: Number of requests by bucket of their mean ITL.
        same: Number of copied requests whose answers have the tokens of the client's answers.
        different: Number of those whose answers have other tokens, although both are greedy.
    """

    requests: int = 0
    errors: int = 0
    ttft: dict[int, int] = {}
    itl: dict[int, int] = {}
    same: int = 0
    different: int = 0

    def add(self, other: "Tally") -> None:
        """Add the requests of another tally."""
        self.requests += other.requests
        self.errors += other.errors
        self.same += other.same
        self.different += other.different
        for mine, theirs in ((self.ttft, other.ttft), (self.itl, other.itl)):
            for bucket, count in theirs.items():
                mine[bucket] = mine.get(bucket, 0) + count


class Evidence(msgspec.Struct, kw_only=True):
    """Requests of a canary, and those of the model that it may replace, since its start."""

    canary: Tally = msgspec.field(default_factory=Tally)
    stable: Tally = msgspec.field(default_factory=Tally)


class GoldenRound(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one round of golden prompts.

    Attributes:
        at_ms: Time of its end in Unix milliseconds.
        right: Number of right answers.
        wrong: Names of the prompts with wrong answers, with the differences.
        failed: Names of the prompts without an answer, with the errors.
    """

    at_ms: int
    right: int = 0
    wrong: Mapping[str, str] = {}
    failed: Mapping[str, str] = {}

    @property
    def passed(self) -> bool:
        """True if all answers are right."""
        return not (self.wrong or self.failed)
