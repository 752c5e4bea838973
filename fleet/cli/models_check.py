"""`baton models check`: what the files of a model contain, and what would be refused."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

if TYPE_CHECKING:
    from baton.model.artifact import ModelArtifact
    from baton.text.tokenizer import TextTokenizer

_MIB = 1 << 20


def check(
    model: Annotated[str, typer.Argument(help="Model reference, like `model:` in a fleet file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a model's family, tokens, chat template and memory, and what would be refused.

    Reads no weights and needs no fleet. Exit code 1 if the model would be refused.
    """
    described, refused = described_model(model)
    if as_json:
        typer.echo(json.dumps({**described, "refused": refused}, indent=2, ensure_ascii=False))
    else:
        table = Table("", Column("", overflow="fold"), box=SIMPLE_HEAD, show_header=False)
        for name, value in described.items():
            shown = ", ".join(value) if isinstance(value, list) else str(value)
            table.add_row(name.replace("_", " "), escape(shown or "–"))
        console = Console(highlight=False)
        console.print(table)
        for problem in refused:
            console.print(f"[bold red]refused[/]: {escape(problem)}", soft_wrap=True)
    raise typer.Exit(1 if refused else 0)


def described_model(reference: str) -> tuple[dict[str, Any], list[str]]:
    """Return the properties of a model by name, and the reasons for which it is refused."""
    from baton.model.artifact import resolve_model
    from baton.model.model_config import ModelError
    from baton.text.tokenizer import load_tokenizer

    refused: list[str] = []
    try:
        artifact = resolve_model(reference)
    except ModelError as error:
        refused.append(str(error))
        try:
            artifact = resolve_model(reference, allow_unsupported=True)
        except ModelError:
            return {"model": reference}, refused
    described = {
        "model": str(artifact.path),
        "family": f"{artifact.config.family} ({artifact.architecture})"
        if not refused
        else artifact.architecture,
        "format": artifact.format,
        "quantisation": artifact.quantisation,
        "context_tokens": artifact.config.max_context_tokens,
        "licence": artifact.license or "",
        "sampling_defaults": [f"{k}: {v:g}" for k, v in artifact.generation_defaults.items()],
    }
    try:
        tokenizer = load_tokenizer(artifact.tokenizer_source(), encodes=False)
    except ValueError as error:
        refused.append(f"tokenizer: {error}")
    else:
        described |= _tokens(artifact, tokenizer)
    try:
        described |= _template(artifact)
    except ValueError as error:
        refused.append(str(error))
    if not refused:
        described |= _memory(artifact)
    return described, refused


def _tokens(artifact: "ModelArtifact", tokenizer: "TextTokenizer") -> dict[str, Any]:
    config = artifact.config
    begin = () if config.bos_token_id is None else (config.bos_token_id,)
    beyond = tokenizer.texts_from(config.vocab_size)
    named = {
        name: [f"{tokenizer.token_text(token_id)} ({token_id})" for token_id in token_ids]
        for name, token_ids in (("begin_token", begin), ("end_tokens", config.eos_token_ids))
    }
    sizes = f"{config.vocab_size}" + (
        f", and {len(beyond)} that texts cannot use" if beyond else ""
    )
    return {"vocabulary": sizes, **named}


def _template(artifact: "ModelArtifact") -> dict[str, Any]:
    from baton.text.template import ChatTemplate
    from baton.text.tools import ToolSyntax

    source = artifact.chat_template
    if not ChatTemplate(source, with_tools=artifact.tool_template).exists:
        return {"chat_template": "none: only /v1/completions", "tools": "none"}
    syntax = ToolSyntax.of(artifact.tool_template or source)
    own = syntax.forms is not None and syntax.forms.lists_tools
    tools = "listed by the template" if own else "listed by Baton in the system message"
    return {"chat_template": f"{len(source or '')} characters", "tools": tools}


def _memory(artifact: "ModelArtifact") -> dict[str, Any]:
    """Return the memory of one worker on CPUs in bf16; `baton capacity` has other settings."""
    from fleet.cli.capacity_options import CapacityOptions
    from fleet.cli.memory_estimate import plan_capacity

    plan = plan_capacity(artifact.config, CapacityOptions(), 0)
    return {
        "memory": f"{plan.need.total / _MIB:,.0f} MiB in bf16, and "
        f"{plan.kv_bytes_per_token / 1024:,.1f} KiB of KV per token",
    }
