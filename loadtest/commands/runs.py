"""`baton loadtest replay`, `poisson` and `sessions`: a plan, a run, a folder."""

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
        Path,
        typer.Argument(help="Mooncake JSONL, Azure CSV or recorded requests, told by content."),
    ],
    out: o.Out,
    recording: Recording,
    choices: o.Choices,
    seed: o.Seed = 0,
    resume: o.Resume = False,
) -> None:
    """Play a recorded trace: its arrivals, its lengths, and who shares which prefix.

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
    """Open loop: requests arrive at random, whatever became of those before.

    Shared prefixes, a hot tenant, long prompts and clients that hang up can be mixed in.
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
    """Closed loop: users who read an answer, think, and ask on, the history growing."""
    try:
        plan = users.plan(seed)
    except ValueError as error:
        o.fail(str(error))
    run_and_show(plan, o.run_options(choices, ctx.obj), out, resume=resume)
