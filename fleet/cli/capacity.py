"""`baton capacity`: options and table."""

import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from baton.config.fleet_file import DEFAULT_MODEL
from fleet.cli.common import fail

if TYPE_CHECKING:
    from fleet.cli.memory_estimate import Capacity

_GIB = 1 << 30
_MIB = 1 << 20


_Model = Annotated[str, typer.Argument(help="Model reference, like `model:` in a fleet file.")]
_Context = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Prompt and response of each request, in tokens. Default: the model's limit.",
    ),
]
_Dtype = Annotated[
    Literal["bf16", "fp32"], typer.Option(help="Data type, `dtype` in a fleet file.")
]
_Weights = Annotated[
    Literal["none", "int8", "int4"],
    typer.Option(help="Weights, `quantisation.weights` in a fleet file."),
]
_Kv = Annotated[
    Literal["none", "int8", "fp8"],
    typer.Option(help="KV cache, `quantisation.kv` in a fleet file."),
]
_Numerics = Annotated[
    Literal["exact", "fast"], typer.Option(help="Numerics mode, `numerics` in a fleet file.")
]
_TensorParallel = Annotated[int, typer.Option(min=1, help="Number of ranks, all on one machine.")]
_Draft = Annotated[
    str | None,
    typer.Option(help="Reference of the draft model, like `draft` in `speculation`."),
]
_Memory = Annotated[
    float | None,
    typer.Option(min=0.1, help="Memory limit in GiB. Default: free memory of this machine."),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with sizes in bytes.")]


def capacity(
    model: _Model = DEFAULT_MODEL,
    context: _Context = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Number of concurrent requests.")] = 1,
    dtype: _Dtype = "bf16",
    weights: _Weights = "none",
    kv: _Kv = "none",
    numerics: _Numerics = "exact",
    tensor_parallel: _TensorParallel = 1,
    draft: _Draft = None,
    memory: _Memory = None,
    as_json: _AsJson = False,
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
    try:
        plan = plan_capacity(
            resolve_model(model).config,
            context_tokens=context,
            concurrency=concurrency,
            dtype=dtype,
            weights=weights,
            kv=kv,
            numerics=numerics,
            free_bytes=free,
            tensor_parallel=tensor_parallel,
            draft=None if draft is None else resolve_model(draft).config,
        )
    except ModelError as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps(plan.as_json(), indent=1))
        raise typer.Exit(0 if plan.fits else 1)
    console = Console()
    console.print(_table(plan, tensor_parallel, "free" if memory is None else "limit", free))
    verdict = "fit" if plan.fits else "do [bold red]not[/] fit"
    console.print(
        f"{concurrency} requests of {plan.context_tokens} tokens {verdict}; the maximum is "
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
