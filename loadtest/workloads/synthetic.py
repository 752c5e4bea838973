"""Loads made from distributions: an open loop with its disturbances, and sessions."""

from dataclasses import dataclass

import numpy as np

from loadtest.workloads.arrivals import arrival_times_s
from loadtest.workloads.lengths import Lengths
from loadtest.workloads.plan import Conversation, Plan, Segment, Turn
from loadtest.workloads.prompts import UNIQUE_KEYS

_PREFIX_KEYS = UNIQUE_KEYS - (1 << 20)
"""Keys of shared prefixes; below the keys of what is not shared."""


@dataclass(frozen=True, kw_only=True)
class OpenLoop:
    """Requests that arrive whatever became of the ones before.

    Args:
        requests: How many.
        rate: Requests per second.
        cv: How bursty, see ``arrival_times_s``.
        prompt_tokens: Lengths of prompts, shared prefix not counted.
        answer_tokens: Lengths of answers.
        prefix_groups: Requests belong to one of so many groups with a common prefix; 0: none.
        prefix_tokens: Length of these prefixes.
        hot_tenant: This share of requests is one tenant's, the others are spread over three.
        long_every: Each so-manieth request has a long prompt and a short answer; 0: none.
        long_tokens: Length of these prompts.
        abort_share: This share of clients hangs up.
        abort_after_s: So long after the send, half to one and a half times.
    """

    requests: int
    rate: float
    cv: float = 1.0
    prompt_tokens: Lengths
    answer_tokens: Lengths
    prefix_groups: int = 0
    prefix_tokens: int = 0
    hot_tenant: float = 0.0
    long_every: int = 0
    long_tokens: int = 0
    abort_share: float = 0.0
    abort_after_s: float = 0.5


def open_loop_plan(load: OpenLoop, *, name: str, seed: int) -> Plan:
    """The plan of an open loop.

    Raises:
        ValueError: As ``arrival_times_s``.
    """
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
        hangs_up = aborts[index, 0] < load.abort_share
        turns.append(
            Turn(
                index=index,
                prompt=prompt,
                max_tokens=int(answers[index]),
                abort_after_s=load.abort_after_s * float(0.5 + aborts[index, 1])
                if hangs_up
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
    """Users who each hold one conversation after another.

    Args:
        users: At the same time.
        sessions: Of each user.
        turns: Questions in one session.
        system_tokens: Length of the text before the first question, the same for all.
        prompt_tokens: Lengths of questions.
        answer_tokens: Lengths of answers.
        think_s: Mean of the exponential pause before the next question.
        tool_calls: After each question the answer is a tool's call, so many times; the result,
            sent as a user's message so that every server takes it, comes ``tool_s`` later.
        tool_tokens: Length of a tool's result.
        tool_s: How long a tool takes.
        ramp_s: Users begin evenly within this time.
    """

    users: int
    sessions: int = 1
    turns: int = 4
    system_tokens: int = 64
    prompt_tokens: Lengths
    answer_tokens: Lengths
    think_s: float = 2.0
    tool_calls: int = 0
    tool_tokens: int = 200
    tool_s: float = 0.2
    ramp_s: float = 2.0


def session_plan(load: Sessions, *, name: str, seed: int) -> Plan:
    """The plan of a closed loop: as many requests are under way as there are users, at most."""
    rng = np.random.default_rng(seed)
    steps = load.turns * (1 + load.tool_calls)
    conversations = []
    index = 0
    for user in range(load.users):
        prompts = load.prompt_tokens(rng, load.sessions * load.turns)
        answers = load.answer_tokens(rng, load.sessions * steps)
        pauses_s = rng.exponential(load.think_s, load.sessions * steps)
        turns: list[Turn] = []
        for place in range(load.sessions * steps):
            step = place % steps
            is_tool = step % (1 + load.tool_calls) > 0
            question = int(prompts[place // (1 + load.tool_calls)])
            own = Segment(UNIQUE_KEYS + index, load.tool_tokens if is_tool else question)
            system = (Segment(_PREFIX_KEYS, load.system_tokens),) if load.system_tokens else ()
            turns.append(
                Turn(
                    index=index,
                    prompt=(own,) if step else (*system, own),
                    max_tokens=int(answers[place]),
                    think_s=load.tool_s if is_tool else float(pauses_s[place]) if place else 0.0,
                    continues=step > 0,
                    group="tool" if is_tool else f"turn {1 + step // (1 + load.tool_calls)}",
                    tenant="",
                )
            )
            index += 1
        start_s = user * load.ramp_s / load.users
        conversations.append(Conversation(start_s=start_s, turns=tuple(turns)))
    return Plan(name=name, seed=seed, conversations=tuple(conversations))
