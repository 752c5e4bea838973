"""Sessions of agents: a long system prompt with tools, and turns that add to one conversation.

    system prompt, tools │ message │ response │ tool result │ response │ …
    same in each request │ turn 1             │ turn 2                 │

The shape is that of coding agents on a chat API. The server decides whether a turn sends a tool
result or a user's message (``loadtest.client.dialogue``). Their sizes are planned.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from loadtest.workloads.lengths import Lengths
from loadtest.workloads.plan import AgentSetup, Conversation, Plan, Segment, Turn
from loadtest.workloads.prompts import BYTES_PER_WORD, UNIQUE_KEYS, PromptWriter

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
    """Agents that work at the same time, each on a session of its own."""

    sessions: int
    turns: int  # requests of a session
    tools: int
    system_tokens: int  # of the system prompt and the tools together
    shared: bool  # whether all sessions have the same system prompt and tools
    turn_tokens: Lengths  # lengths of messages and tool results
    result_bytes: int  # limit of their size
    answer_tokens: Lengths
    think_s: float  # mean of the exponential pause before the next turn, in seconds
    ramp_s: float = 2.0  # seconds over which the sessions start


def agent_plan(load: Agents, *, name: str, seed: int) -> Plan:
    """Return the plan of a closed loop, with at most one running request per session.

    Turn n adds equally many tokens in all sessions, so that its TTFT compares with that of turn n
    of a session alone.
    """
    rng = np.random.default_rng(seed)
    longest = max(1, round(load.result_bytes / BYTES_PER_WORD))
    inputs = np.minimum(load.turn_tokens(rng, load.turns), longest)
    conversations = []
    for session in range(load.sessions):
        answers = load.answer_tokens(rng, load.turns)
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
    return Plan(name=name, seed=seed, conversations=tuple(conversations))


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
