"""Sessions of agents: a long system prompt with tools, and turns that add to one conversation.

    system prompt, tools │ message │ response │ tool result │ response │ …
    same in each request │ turn 1             │ turn 2                 │

The shape is that of coding agents on a chat API. The server decides whether a turn sends a tool
result or a user's message (``loadtest.client.dialogue``). Their sizes are planned.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Annotated, Any

import msgspec
import numpy as np
from typer import Option

from loadtest.workloads.lengths import parse_lengths
from loadtest.workloads.plan import AgentSetup, Conversation, Plan, Segment, Turn
from loadtest.workloads.prompts import BYTES_PER_WORD, UNIQUE_KEYS, PromptWriter
from loadtest.workloads.synthetic import AnswerTokens

MAX_TOOLS = 64

_SETUP_KEYS = UNIQUE_KEYS - (1 << 21)
_ALONE_SEED = 1 << 32
"""Difference of the seeds of a session alone and of the others, so that no prefix is shared."""

_SYSTEM_SHARE = 0.25
_TOOL_FORMAT_TOKENS = 140
"""Tokens of a tool's JSON without its descriptions, with SmolLM2's and Gemma's tokenizers."""

_INTRODUCTION = "You are a coding agent. Call tools until the task is done."
_VERBS = ("read", "write", "edit", "list", "search", "run", "fetch", "plan")
_NOUNS = ("file", "folder", "test", "commit", "page", "issue", "job", "note")
_PROPERTIES: dict[str, dict[str, Any]] = {
    "path": {"type": "string"},
    "pattern": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1},
    "mode": {"type": "string", "enum": ["fast", "full", "preview"]},
    "recursive": {"type": "boolean"},
}


@dataclass(frozen=True, kw_only=True)
class Agents:
    """Agents that work at the same time, each on a session of its own.

    All fields but ``ramp_s``, over which the sessions start, are options. The pause before the next
    turn is exponential.
    """

    sessions: Annotated[int, Option(min=1, help="Concurrent sessions.")] = 10
    turns: Annotated[int, Option(min=1, help="Requests per session.")] = 8
    think_s: Annotated[float, Option(min=0, help="Mean seconds that a tool or the user takes.")] = (
        2.0
    )
    tools: Annotated[int, Option(min=1, max=MAX_TOOLS, help="Number of tools.")] = 24
    system_tokens: Annotated[
        int, Option(min=1, help="Tokens of the system prompt and the tools together.")
    ] = 19_000
    shared: Annotated[bool, Option(help="Give all sessions the same system prompt and tools.")] = (
        True
    )
    turn_tokens: Annotated[
        str,
        Option(help="Tokens that each turn adds, in the format of --prompt-tokens elsewhere."),
    ] = "uniform:500-2000"
    result_bytes: Annotated[int, Option(min=1, help="Largest message or tool result in bytes.")] = (
        8192
    )
    answer_tokens: AnswerTokens = "lognormal:60,0.6,250"
    ramp_s: float = 2.0


def agent_plan(load: Agents, *, name: str, seed: int) -> Plan:
    """Return the plan of a closed loop, with its parameters for the report.

    A session has at most one running request. Turn n adds equally many tokens in all sessions, so
    that its TTFT compares with that of turn n of a session alone.
    """
    rng = np.random.default_rng(seed)
    longest = max(1, round(load.result_bytes / BYTES_PER_WORD))
    inputs = np.minimum(parse_lengths(load.turn_tokens)(rng, load.turns), longest)
    conversations = []
    for session in range(load.sessions):
        answers = parse_lengths(load.answer_tokens)(rng, load.turns)
        pauses_s = rng.exponential(load.think_s, load.turns)
        first = session * load.turns
        turns = [
            Turn(
                index=first + step,
                prompt=(Segment(UNIQUE_KEYS + first + step, int(inputs[step])),),
                max_tokens=int(answers[step]),
                think_s=float(pauses_s[step]) if step else 0.0,
                continues=step > 0,
                session=session,
                number=step + 1,
            )
            for step in range(load.turns)
        ]
        key = _SETUP_KEYS if load.shared else _SETUP_KEYS + session
        conversations.append(
            Conversation(
                start_s=session * load.ramp_s / load.sessions,
                turns=tuple(turns),
                agent=AgentSetup(key=key, tools=load.tools, tokens=load.system_tokens),
            )
        )
    parameters = asdict(load) | {"shared": "yes" if load.shared else "no"}
    del parameters["ramp_s"]
    return Plan(name=name, seed=seed, conversations=tuple(conversations), parameters=parameters)


def alone(plan: Plan) -> Plan:
    """Return the plan of the first session alone: equal lengths, other text."""
    return msgspec.structs.replace(
        plan, seed=plan.seed + _ALONE_SEED, conversations=plan.conversations[:1]
    )


def agent_prompt(setup: AgentSetup, writer: PromptWriter) -> tuple[str, list[dict[str, Any]]]:
    """Return the system prompt and the tools in OpenAI's format."""
    words = iter(writer.text([Segment(setup.key, setup.tokens)]).split())
    tool_tokens = round((1 - _SYSTEM_SHARE) * setup.tokens / setup.tools)
    own_words = max(len(_PROPERTIES) + 1, tool_tokens - _TOOL_FORMAT_TOKENS)
    tools = [_tool(number, own_words, words) for number in range(setup.tools)]
    left = max(0, setup.tokens - setup.tools * (own_words + _TOOL_FORMAT_TOKENS))
    return f"{_INTRODUCTION} {_text(words, left)}", tools


def _tool(number: int, own_words: int, words: Iterator[str]) -> dict[str, Any]:
    """Return a tool with half of its words in its own description."""
    each = own_words // (2 * len(_PROPERTIES))
    description = _text(words, own_words - each * len(_PROPERTIES))
    properties = {
        name: {**schema, "description": _text(words, each)} for name, schema in _PROPERTIES.items()
    }
    verb = _VERBS[number % len(_VERBS)]
    noun = _NOUNS[number // len(_VERBS)]
    return {
        "type": "function",
        "function": {
            "name": f"{verb}_{noun}",
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    }


def _text(words: Iterator[str], count: int) -> str:
    return " ".join(islice(words, count))
