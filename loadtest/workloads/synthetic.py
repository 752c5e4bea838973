"""Synthetic loads from distributions: an open loop with disturbances, and sessions."""

from dataclasses import dataclass

import numpy as np

from loadtest.workloads.arrivals import arrival_times_s
from loadtest.workloads.lengths import Lengths
from loadtest.workloads.plan import Conversation, Plan, Segment, Turn
from loadtest.workloads.prompts import UNIQUE_KEYS

_PREFIX_KEYS = UNIQUE_KEYS - (1 << 20)
"""First key of shared prefixes; below the keys of unshared segments."""


@dataclass(frozen=True, kw_only=True)
class OpenLoop:
    """Requests at random times, independent of earlier responses.

    The time from sending to disconnecting is drawn from half to one and a half ``abort_after_s``.
    """

    requests: int
    rate: float
    cv: float = 1.0  # burstiness of arrivals, see ``arrival_times_s``
    prompt_tokens: Lengths  # lengths of prompts, without a shared prefix
    answer_tokens: Lengths
    prefix_groups: int = 0  # groups of requests with a common prefix; 0 for none
    prefix_tokens: int = 0  # tokens of these prefixes
    hot_tenant: float = 0.0  # share of requests from one tenant; the others are spread over three
    long_every: int = 0  # period of requests with a long prompt and a short response; 0 for none
    long_tokens: int = 0
    abort_share: float = 0.0  # share of clients that disconnect
    abort_after_s: float = 0.5


def open_loop_plan(load: OpenLoop, *, name: str, seed: int) -> Plan:
    """Return the plan of an open loop."""
    rng = np.random.default_rng(seed)
    arrivals_s = arrival_times_s(rng, load.requests, load.rate, load.cv)
    prompts = load.prompt_tokens(rng, load.requests)
    answers = load.answer_tokens(rng, load.requests)
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
    )


def _tenant(drawn: float, hot_share: float) -> str:
    if hot_share <= 0:
        return ""
    if drawn < hot_share:
        return "hot"
    return f"cold-{int(3 * (drawn - hot_share) / (1 - hot_share))}"


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Users with one conversation after another.

    Attributes:
        tool_calls: Tool calls after each question. Each result is sent ``tool_s`` later, as a
            user's message, so that every server accepts it.
    """

    users: int  # concurrent users
    sessions: int = 1  # conversations per user
    turns: int = 4  # questions per conversation
    system_tokens: int = 64  # tokens of the system prompt, which is the same for all
    prompt_tokens: Lengths  # lengths of questions
    answer_tokens: Lengths
    think_s: float = 2.0  # mean of the exponential pause before the next question, in seconds
    tool_calls: int = 0
    tool_tokens: int = 200
    tool_s: float = 0.2
    ramp_s: float = 2.0  # seconds over which the users start


def session_plan(load: Sessions, *, name: str, seed: int) -> Plan:
    """Return the plan of a closed loop, with at most one running request per user."""
    rng = np.random.default_rng(seed)
    steps = load.turns * (1 + load.tool_calls)
    conversations = []
    index = 0
    for user in range(load.users):
        prompts = load.prompt_tokens(rng, load.sessions * load.turns)
        answers = load.answer_tokens(rng, load.sessions * steps)
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
        start_s = user * load.ramp_s / load.users
        conversations.append(Conversation(start_s=start_s, turns=tuple(turns)))
    return Plan(name=name, seed=seed, conversations=tuple(conversations))
