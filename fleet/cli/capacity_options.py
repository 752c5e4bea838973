"""Options of `baton capacity` that describe an engine; it takes a second to import the rest."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer


@dataclass(frozen=True, kw_only=True)
class CapacityOptions:
    """Options that describe an engine and its requests."""

    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompt and response of each request, in tokens. Default: the model's limit.",
        ),
    ] = None
    concurrency: Annotated[int, typer.Option(min=1, help="Number of concurrent requests.")] = 1
    dtype: Annotated[
        Literal["bf16", "fp32"], typer.Option(help="Data type, `dtype` in a fleet file.")
    ] = "bf16"
    weights: Annotated[
        Literal["none", "int8", "int4"],
        typer.Option(help="Weights, `quantisation.weights` in a fleet file."),
    ] = "none"
    kv: Annotated[
        Literal["none", "int8", "fp8"],
        typer.Option(help="KV cache, `quantisation.kv` in a fleet file."),
    ] = "none"
    numerics: Annotated[
        Literal["exact", "fast"], typer.Option(help="Numerics mode, `numerics` in a fleet file.")
    ] = "exact"
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Number of ranks, all on one machine.")
    ] = 1
    draft: Annotated[
        str | None,
        typer.Option(help="Reference of the draft model, like `draft` in `speculation`."),
    ] = None
