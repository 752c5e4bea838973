"""Synthetic loads from distributions: an open loop with disturbances, and sessions.

The fields of a load are options of commands.
"""

from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
from typer import Option

from loadtest.workloads.arrivals import arrival_times_s
from loadtest.workloads.lengths import parse_lengths
from loadtest.workloads.plan import Conversation, Plan, Segment, Turn
from loadtest.workloads.prompts import UNIQUE_KEYS

_PREFIX_KEYS = UNIQUE_KEYS - (1 << 20)
"""First key of shared prefixes; below the keys of unshared segments."""

_RAMP_S = 2.0
_SWITCHES = {
    "prefix_groups": ("prefix_groups", "prefix_tokens"),
    "hot_tenant": ("hot_tenant",),
    "long_every": ("long_every", "long_tokens"),
    "abort_share": ("abort_share", "abort_after_s"),
    "tool_calls": ("tool_calls", "tool_tokens", "tool_s"),
}
"""Options that belong to a part of a load, by the option that enables it."""

DISTURBANCES = tuple(
    name for switch, names in _SWITCHES.items() for name in names if switch != "tool_calls"
)
"""Names of the options of `OpenLoop` that disturb the arrivals."""

PromptTokens = Annotated[
    str,
    Option(help="Prompt lengths: 256, uniform:64-512, lognormal:180,0.9[,MAX], choice:32,1024."),
]
AnswerTokens = Annotated[str, Option(help="Output lengths, in the format of --prompt-tokens.")]


@dataclass(frozen=True, kw_only=True)
class OpenLoop:
    """Requests at random times, independent of earlier responses.

    The time from sending to disconnecting is drawn from half to one and a half ``abort_after_s``.
    Requests that are not of the hot tenant are spread over three others.
    """

    rate: Annotated[float, Option(help="Requests per second.")] = 1.0
    requests: Annotated[int, Option(min=1, help="Number of requests.")] = 100
    cv: Annotated[
        float, Option(min=0, help="Burstiness of arrivals: 0 even, 1 Poisson, 3 very bursty.")
    ] = 1.0
    prompt_tokens: PromptTokens = "lognormal:128,0.8,1024"  # without a shared prefix
    answer_tokens: AnswerTokens = "lognormal:32,0.6,256"
    prefix_groups: Annotated[int, Option(min=0, help="Groups that share a prefix.")] = 0
    prefix_tokens: Annotated[int, Option(min=0, help="Tokens of a shared prefix.")] = 256
    hot_tenant: Annotated[
        float, Option(min=0, max=0.99, help="Share of requests from one tenant.")
    ] = 0.0
    long_every: Annotated[int, Option(min=0, help="Make every N-th prompt long.")] = 0
    long_tokens: Annotated[int, Option(min=1, help="Tokens of a long prompt.")] = 2048
    abort_share: Annotated[
        float, Option(min=0, max=1, help="Share of clients that disconnect.")
    ] = 0.0
    abort_after_s: Annotated[
        float, Option(min=0, help="Mean seconds from sending until a client disconnects.")
    ] = 0.5


def open_loop_plan(load: OpenLoop, *, name: str, seed: int) -> Plan:
    """Return the plan of an open loop, with its parameters for the report."""
    rng = np.random.default_rng(seed)
    arrivals_s = arrival_times_s(rng, load.requests, load.rate, load.cv)
    prompts = parse_lengths(load.prompt_tokens)(rng, load.requests)
    answers = parse_lengths(load.answer_tokens)(rng, load.requests)
    groups = rng.integers(0, max(1, load.prefix_groups), load.requests)
    tenants = rng.random(load.requests)
    aborts = rng.random((load.requests, 2))
    turns = []
    for index in range(load.requests):
        is_long = load.long_every > 0 and index % load.long_every == load.long_every - 1
        own_tokens = load.long_tokens if is_long else int(prompts[index])
        prompt: tuple[Segment, ...] = (Segment(UNIQUE_KEYS + index, own_tokens),)
        if load.prefix_groups and load.prefix_tokens:
            prompt = (Segment(_PREFIX_KEYS + int(groups[index]), load.prefix_tokens), *prompt)
        disconnects = aborts[index, 0] < load.abort_share
        turns.append(
            Turn(
                index=index,
                prompt=prompt,
                max_tokens=int(answers[index]),
                abort_after_s=load.abort_after_s * float(0.5 + aborts[index, 1])
                if disconnects
                else None,
                group="long" if is_long else "",
                tenant=_tenant(float(tenants[index]), load.hot_tenant),
            )
        )
    return Plan(
        name=name,
        seed=seed,
        conversations=tuple(
            Conversation(start_s=float(start_s), turns=(turn,))
            for start_s, turn in zip(arrivals_s, turns, strict=True)
        ),
        parameters=_shown(load),
    )


def _shown(load: "OpenLoop | Sessions") -> dict[str, str | int | float]:
    chosen = asdict(load)
    off = {name for switch, names in _SWITCHES.items() if not chosen.get(switch) for name in names}
    return {name: value for name, value in chosen.items() if name not in off}


def _tenant(drawn: float, hot_share: float) -> str:
    if hot_share <= 0:
        return ""
    if drawn < hot_share:
        return "hot"
    return f"cold-{int(3 * (drawn - hot_share) / (1 - hot_share))}"


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Users with one conversation after another.

    Each tool result is sent ``tool_s`` after the call, as a user's message, so that every server
    accepts it. The system prompt is the same for all; the pause of a user is exponential.
    """

    users: Annotated[int, Option(min=1, help="Concurrent users.")] = 4
    sessions: Annotated[int, Option(min=1, help="Consecutive sessions per user.")] = 2
    turns: Annotated[int, Option(min=1, help="Questions per session.")] = 4
    think_s: Annotated[float, Option(min=0, help="Mean seconds before the next one.")] = 2.0
    system_tokens: Annotated[int, Option(min=0, help="Tokens of the system prompt.")] = 64
    prompt_tokens: PromptTokens = "lognormal:48,0.6,512"
    answer_tokens: AnswerTokens = "lognormal:32,0.6,256"
    tool_calls: Annotated[int, Option(min=0, help="Tool results per question.")] = 0
    tool_tokens: Annotated[int, Option(min=1, help="Tokens of a tool result.")] = 200
    tool_s: Annotated[float, Option(min=0, help="Seconds that a tool takes.")] = 0.2


def session_plan(load: Sessions, *, name: str, seed: int, ramp_s: float = _RAMP_S) -> Plan:
    """Return the plan of a closed loop, with at most one running request per user.

    The users start within ``ramp_s``.
    """
    rng = np.random.default_rng(seed)
    steps = load.turns * (1 + load.tool_calls)
    conversations = []
    index = 0
    for user in range(load.users):
        prompts = parse_lengths(load.prompt_tokens)(rng, load.sessions * load.turns)
        answers = parse_lengths(load.answer_tokens)(rng, load.sessions * steps)
        pauses_s = rng.exponential(load.think_s, load.sessions * steps)
        turns: list[Turn] = []
        for step_index in range(load.sessions * steps):
            step = step_index % steps
            is_tool = step % (1 + load.tool_calls) > 0
            question = int(prompts[step_index // (1 + load.tool_calls)])
            own = Segment(UNIQUE_KEYS + index, load.tool_tokens if is_tool else question)
            system = (Segment(_PREFIX_KEYS, load.system_tokens),) if load.system_tokens else ()
            turns.append(
                Turn(
                    index=index,
                    prompt=(own,) if step else (*system, own),
                    max_tokens=int(answers[step_index]),
                    think_s=load.tool_s
                    if is_tool
                    else float(pauses_s[step_index])
                    if step_index
                    else 0.0,
                    continues=step > 0,
                    group="tool" if is_tool else f"turn {1 + step // (1 + load.tool_calls)}",
                    tenant="",
                )
            )
            index += 1
        start_s = user * ramp_s / load.users
        conversations.append(Conversation(start_s=start_s, turns=tuple(turns)))
    parameters = _shown(load)
    return Plan(name=name, seed=seed, conversations=tuple(conversations), parameters=parameters)
