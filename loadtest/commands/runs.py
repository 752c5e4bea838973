"""`baton loadtest replay`, `poisson` and `sessions`: one plan, one run, one folder."""

from pathlib import Path
from typing import Annotated

import typer

from loadtest.commands import options as o
from loadtest.commands.loads import Disturbed, Recording, Users
from loadtest.commands.running import run_and_show


@o.with_options("tenant_keys")
def replay(
    ctx: typer.Context,
    trace: Annotated[
        Path, typer.Argument(help="Mooncake JSONL, Azure CSV, or recorded requests (detected).")
    ],
    out: o.Out,
    recording: Recording,
    choices: o.Choices,
    seed: o.Seed = 0,
    resume: o.Resume = False,
) -> None:
    """Replay a recorded trace with its arrivals, lengths and shared prefixes.

    Recorded requests are JSON lines such as {"timestamp": MS, "body": {"messages": …}}.
    """
    try:
        plan = recording.plan(trace, seed)
    except (ValueError, OSError) as error:
        o.fail(str(error))
    run_and_show(plan, o.run_options(choices, ctx.obj), out, resume=resume)


@o.with_options()
def poisson(
    ctx: typer.Context,
    out: o.Out,
    arrivals: Disturbed,
    choices: o.Choices,
    seed: o.Seed = 0,
    resume: o.Resume = False,
) -> None:
    """Send requests at random times, independent of earlier responses (open loop).

    Shared prefixes, a hot tenant, long prompts and disconnecting clients can be added.
    """
    try:
        plan = arrivals.plan("poisson" if arrivals.cv == 1 else "gamma", seed)
    except ValueError as error:
        o.fail(str(error))
    run_and_show(plan, o.run_options(choices, ctx.obj), out, resume=resume)


@o.with_options("tenant_keys", "token_ids")
def sessions(
    ctx: typer.Context,
    out: o.Out,
    users: Users,
    choices: o.Choices,
    seed: o.Seed = 0,
    resume: o.Resume = False,
) -> None:
    """Simulate users who read each response, think, and ask again (closed loop)."""
    try:
        plan = users.plan(seed)
    except ValueError as error:
        o.fail(str(error))
    run_and_show(plan, o.run_options(choices, ctx.obj), out, resume=resume)
