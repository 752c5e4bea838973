"""`baton loadtest replay`, `poisson` and `sessions`: a plan, a run, a folder."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from loadtest.commands import options as o
from loadtest.commands.running import run_and_show
from loadtest.workloads.lengths import LengthsError, parse_lengths
from loadtest.workloads.plan import Plan
from loadtest.workloads.recorded import is_recorded, recorded_plan
from loadtest.workloads.replay import replay_plan
from loadtest.workloads.synthetic import OpenLoop, Sessions, open_loop_plan, session_plan
from loadtest.workloads.traces import TraceError, read_trace


def replay(
    ctx: typer.Context,
    trace: Annotated[
        Path,
        typer.Argument(help="Mooncake JSONL, Azure CSV or recorded requests, told by content."),
    ],
    out: o.Out,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")] = None,
    speed: Annotated[float, typer.Option(help="Gaps between arrivals are divided by it.")] = 1.0,
    shrink: Annotated[float, typer.Option(help="Lengths are divided by it.")] = 1.0,
    seed: o.Seed = 0,
    url: o.Url = "",
    model: o.Model = "",
    api_key: o.ApiKey = "",
    endpoint: o.Endpoint = "chat",
    token_ids: o.TokenIds = False,
    ignore_eos: o.IgnoreEos = True,
    header: o.Headers = [],  # noqa: B006 - typer copies it
    timeout_s: o.Timeout = 600.0,
    clients: o.Clients = 1,
    slo: o.SloText = o.DEFAULT_SLO,
    quantile: o.Quantile = 0.9,
    warmup_s: o.Warmup = 0.0,
    resume: o.Resume = False,
) -> None:
    """Play a recorded trace: its arrivals, its lengths, and who shares which prefix.

    Recorded requests are JSON lines such as {"timestamp": MS, "body": {"messages": …}}.
    """
    try:
        plan = _replayed(trace, limit, speed=speed, shrink=shrink, seed=seed)
    except (TraceError, ValueError, OSError) as error:
        o.fail(str(error))
    choices = o.Choices(
        url=url,
        model=model,
        api_key=api_key,
        endpoint=endpoint,
        token_ids=token_ids,
        ignore_eos=ignore_eos,
        headers=header,
        timeout_s=timeout_s,
        clients=clients,
        slo=slo,
        quantile=quantile,
        warmup_s=warmup_s,
    )
    run_and_show(plan, o.run_options(choices, ctx.obj), out, resume=resume)


def _replayed(trace: Path, limit: int | None, *, speed: float, shrink: float, seed: int) -> Plan:
    if not is_recorded(trace):
        requests = read_trace(trace, limit)
        return replay_plan(requests, name=trace.name, speed=speed, shrink=shrink, seed=seed)
    if shrink != 1:
        raise TraceError(f"{trace}: recorded texts can't be shrunk; leave --shrink out")
    return recorded_plan(trace, limit=limit, speed=speed)


def poisson(
    ctx: typer.Context,
    out: o.Out,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    cv: Annotated[
        float, typer.Option(min=0, help="Burstiness of gaps: 0 even, 1 Poisson, 3 very bursty.")
    ] = 1.0,
    prompt_tokens: o.PromptTokens = "lognormal:128,0.8,1024",
    answer_tokens: o.AnswerTokens = "lognormal:32,0.6,256",
    prefix_groups: Annotated[int, typer.Option(min=0, help="Groups that share a prefix.")] = 0,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Length of their prefix.")] = 256,
    hot_tenant: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of requests that one tenant sends.")
    ] = 0.0,
    long_every: Annotated[int, typer.Option(min=0, help="Each N-th prompt is long.")] = 0,
    long_tokens: Annotated[int, typer.Option(min=1, help="Length of long prompts.")] = 2048,
    abort_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of clients that hang up.")
    ] = 0.0,
    abort_after_s: Annotated[float, typer.Option(min=0, help="So long after the send.")] = 0.5,
    seed: o.Seed = 0,
    url: o.Url = "",
    model: o.Model = "",
    api_key: o.ApiKey = "",
    tenant_key: o.TenantKeys = [],  # noqa: B006 - typer copies it
    endpoint: o.Endpoint = "chat",
    token_ids: o.TokenIds = False,
    ignore_eos: o.IgnoreEos = True,
    header: o.Headers = [],  # noqa: B006 - typer copies it
    timeout_s: o.Timeout = 600.0,
    clients: o.Clients = 1,
    slo: o.SloText = o.DEFAULT_SLO,
    quantile: o.Quantile = 0.9,
    warmup_s: o.Warmup = 0.0,
    resume: o.Resume = False,
) -> None:
    """Open loop: requests arrive at random, whatever became of those before.

    Shared prefixes, a hot tenant, long prompts and clients that hang up can be mixed in.
    """
    try:
        load = OpenLoop(
            requests=requests,
            rate=rate,
            cv=cv,
            prompt_tokens=parse_lengths(prompt_tokens),
            answer_tokens=parse_lengths(answer_tokens),
            prefix_groups=prefix_groups,
            prefix_tokens=prefix_tokens,
            hot_tenant=hot_tenant,
            long_every=long_every,
            long_tokens=long_tokens,
            abort_share=abort_share,
            abort_after_s=abort_after_s,
        )
        plan = open_loop_plan(load, name="poisson" if cv == 1 else "gamma", seed=seed)
    except (LengthsError, ValueError) as error:
        o.fail(str(error))
    parameters: dict[str, str | int | float] = {"rate": rate, "cv": cv}
    parameters |= {"prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens}
    parameters |= _changed(
        (prefix_groups, {"prefix_groups": prefix_groups, "prefix_tokens": prefix_tokens}),
        (hot_tenant, {"hot_tenant": hot_tenant}),
        (long_every, {"long_every": long_every, "long_tokens": long_tokens}),
        (abort_share, {"abort_share": abort_share, "abort_after_s": abort_after_s}),
    )
    choices = o.Choices(
        url=url,
        model=model,
        api_key=api_key,
        tenant_keys=tenant_key,
        endpoint=endpoint,
        token_ids=token_ids,
        ignore_eos=ignore_eos,
        headers=header,
        timeout_s=timeout_s,
        clients=clients,
        slo=slo,
        quantile=quantile,
        warmup_s=warmup_s,
    )
    plan = msgspec.structs.replace(plan, parameters=parameters)
    run_and_show(plan, o.run_options(choices, ctx.obj), out, resume=resume)


def sessions(
    ctx: typer.Context,
    out: o.Out,
    users: Annotated[int, typer.Option(min=1, help="At the same time.")] = 4,
    sessions_each: Annotated[
        int, typer.Option("--sessions", min=1, help="Of each user, one after another.")
    ] = 2,
    turns: Annotated[int, typer.Option(min=1, help="Questions in a session.")] = 4,
    think_s: Annotated[float, typer.Option(min=0, help="Mean pause before the next one.")] = 2.0,
    system_tokens: Annotated[int, typer.Option(min=0, help="Text that all begin with.")] = 64,
    prompt_tokens: o.PromptTokens = "lognormal:48,0.6,512",
    answer_tokens: o.AnswerTokens = "lognormal:32,0.6,256",
    tool_calls: Annotated[int, typer.Option(min=0, help="Tool results after each question.")] = 0,
    tool_tokens: Annotated[int, typer.Option(min=1, help="Length of a tool's result.")] = 200,
    tool_s: Annotated[float, typer.Option(min=0, help="How long a tool takes.")] = 0.2,
    seed: o.Seed = 0,
    url: o.Url = "",
    model: o.Model = "",
    api_key: o.ApiKey = "",
    endpoint: o.Endpoint = "chat",
    ignore_eos: o.IgnoreEos = True,
    header: o.Headers = [],  # noqa: B006 - typer copies it
    timeout_s: o.Timeout = 600.0,
    clients: o.Clients = 1,
    slo: o.SloText = o.DEFAULT_SLO,
    quantile: o.Quantile = 0.9,
    warmup_s: o.Warmup = 0.0,
    resume: o.Resume = False,
) -> None:
    """Closed loop: users who read an answer, think, and ask on, the history growing."""
    try:
        load = Sessions(
            users=users,
            sessions=sessions_each,
            turns=turns,
            system_tokens=system_tokens,
            prompt_tokens=parse_lengths(prompt_tokens),
            answer_tokens=parse_lengths(answer_tokens),
            think_s=think_s,
            tool_calls=tool_calls,
            tool_tokens=tool_tokens,
            tool_s=tool_s,
        )
    except LengthsError as error:
        o.fail(str(error))
    parameters: dict[str, str | int | float] = {"users": users, "sessions": sessions_each}
    parameters |= {"turns": turns, "think_s": think_s, "system_tokens": system_tokens}
    parameters |= {"prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens}
    if tool_calls:
        parameters |= {"tool_calls": tool_calls, "tool_tokens": tool_tokens, "tool_s": tool_s}
    plan = session_plan(load, name="sessions", seed=seed)
    choices = o.Choices(
        url=url,
        model=model,
        api_key=api_key,
        endpoint=endpoint,
        ignore_eos=ignore_eos,
        headers=header,
        timeout_s=timeout_s,
        clients=clients,
        slo=slo,
        quantile=quantile,
        warmup_s=warmup_s,
    )
    plan = msgspec.structs.replace(plan, parameters=parameters)
    run_and_show(plan, o.run_options(choices, ctx.obj), out, resume=resume)


def _changed(
    *parts: tuple[float, dict[str, str | int | float]],
) -> dict[str, str | int | float]:
    """The parameters of those disturbances that are switched on."""
    return {key: value for switch, found in parts if switch for key, value in found.items()}
