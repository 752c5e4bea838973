"""`baton capacity`: options and table."""

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from baton.config.fleet_file import DEFAULT_MODEL
from fleet.cli.capacity_options import CapacityOptions
from fleet.cli.common import exits_on
from loadtest.commands.option_groups import with_options

if TYPE_CHECKING:
    from fleet.cli.memory_estimate import Capacity

_GIB = 1 << 30
_MIB = 1 << 20


@with_options()
def capacity(
    options: CapacityOptions,
    model: Annotated[
        str, typer.Argument(help="Model reference, like `model:` in a fleet file.")
    ] = DEFAULT_MODEL,
    memory: Annotated[
        float | None,
        typer.Option(min=0.1, help="Memory limit in GiB. Default: free memory of this machine."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with sizes in bytes.")
    ] = False,
) -> None:
    """Compute the memory that one worker needs, and whether it fits. Starts nothing.

    Exit code 1 if it does not fit.

    Example: `baton capacity --context 4096 --concurrency 16 --weights int8 --kv int8`.
    """
    # These imports take a second.
    from baton.control_groups import free_memory_bytes
    from baton.model.artifact import resolve_model
    from baton.model.model_config import ModelError
    from fleet.cli.memory_estimate import plan_capacity

    free = free_memory_bytes() if memory is None else int(memory * _GIB)
    with exits_on(ModelError):
        draft = None if options.draft is None else resolve_model(options.draft).config
        plan = plan_capacity(resolve_model(model).config, options, free, draft)
    if as_json:
        typer.echo(json.dumps(plan.as_json(), indent=1))
        raise typer.Exit(0 if plan.fits else 1)
    console = Console()
    console.print(
        _table(plan, options.tensor_parallel, "free" if memory is None else "limit", free)
    )
    verdict = "fit" if plan.fits else "do [bold red]not[/] fit"
    console.print(
        f"{options.concurrency} requests of {plan.context_tokens} tokens {verdict}; the maximum is "
        f"{plan.fitting_requests}"
    )
    if not plan.fits:
        raise typer.Exit(1)


def _table(plan: "Capacity", ranks: int, limit_name: str, limit_bytes: int) -> Table:
    table = Table(title="one worker, in MiB", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    need = plan.need
    of_ranks = f" of {ranks} ranks" if ranks > 1 else ""
    for what, size in (
        (f"process{of_ranks}: Python, torch, kernels", need.process),
        ("weights: layers", need.layers),
        ("weights: embedding", need.embedding),
        ("weights: head", need.head),
        ("workspace of one step", need.workspace),
        *([("draft model", need.draft)] if need.draft else []),
        (f"KV: {plan.kv_blocks} blocks, {plan.kv_bytes_per_token} bytes per token", plan.kv_bytes),
    ):
        table.add_row(what, f"{size / _MIB:,.0f}")
    table.add_section()
    table.add_row("total", f"{plan.total / _MIB:,.0f}")
    table.add_row("while loading", f"{(need.total + need.loading) / _MIB:,.0f}")
    table.add_row(limit_name, f"{limit_bytes / _MIB:,.0f}")
    return table
