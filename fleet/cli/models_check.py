"""`baton models check`: what the files of a model contain, and what would be refused."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fleet.cli.common import JsonOption

if TYPE_CHECKING:
    from baton.model.artifact import ModelArtifact


def check(
    model: Annotated[str, typer.Argument(help="Model reference, like `model:` in a fleet file.")],
    as_json: JsonOption = False,
) -> None:
    """Show a model's family, tokens, chat template and memory, and what would be refused.

    Compares the names and shapes of the weights, reads none, and needs no fleet. Exit code 1 if the
    model would be refused.
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
    from baton.model.model_config import GGUF_FAMILIES, HF_FAMILIES, ModelError

    refused: list[str] = []
    for allowed in (False, True):
        try:
            artifact = resolve_model(reference, allow_unsupported=allowed)
            break
        except ModelError as error:
            refused.append(str(error))
    else:
        return {"model": reference}, refused[:1]
    families = {**HF_FAMILIES, **GGUF_FAMILIES}
    described = {
        "model": str(artifact.path),
        "family": f"{families.get(artifact.architecture, 'unknown')} ({artifact.architecture})",
        "quantisation": f"{artifact.quantisation} ({artifact.format})",
        "context_tokens": artifact.config.max_context_tokens,
        "licence": artifact.license or "",
        "sampling_defaults": [f"{k}: {v:g}" for k, v in artifact.generation_defaults.items()],
    }
    for part in (_tokens, _template, *([] if refused else [_weights])):
        try:
            described |= part(artifact)
        except ValueError as error:
            refused.append(str(error))
    return described, refused


def _tokens(artifact: "ModelArtifact") -> dict[str, Any]:
    from baton.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(artifact.tokenizer, encodes=False)
    config = artifact.config
    begin = () if config.bos_token_id is None else (config.bos_token_id,)
    beyond = len(tokenizer.texts_from(config.vocab_size))
    named = {"begin_token": begin, "end_tokens": config.eos_token_ids}
    return {
        "vocabulary": f"{config.vocab_size}" + f", and {beyond} that are refused" * bool(beyond),
        **{name: [f"{tokenizer.token_text(i)} ({i})" for i in ids] for name, ids in named.items()},
    }


def _template(artifact: "ModelArtifact") -> dict[str, Any]:
    from baton.text.template import ChatTemplate
    from baton.text.tools import ToolSyntax

    source = artifact.chat_template
    if not ChatTemplate(source, with_tools=artifact.tool_template).exists:
        return {"chat_template": "none: only /v1/completions"}
    forms = ToolSyntax.of(artifact.tool_template or source).forms
    own = forms is not None and forms.lists_tools
    tools = "listed by the template" if own else "listed by Baton in the system message"
    return {"chat_template": f"{len(source or '')} characters", "tools": tools}


def _weights(artifact: "ModelArtifact") -> dict[str, Any]:
    """Return the memory of one worker on CPUs in bf16; `baton capacity` has other settings."""
    from baton.engine.loading.stored_weights import check_weights
    from fleet.cli.capacity_options import CapacityOptions
    from fleet.cli.memory_estimate import plan_capacity

    check_weights(artifact)
    plan = plan_capacity(artifact.config, CapacityOptions(), 0)
    memory = f"{plan.need.total / 2**20:,.0f} MiB in bf16"
    memory += f", and {plan.kv_bytes_per_token / 2**10:,.1f} KiB of KV per token"
    return {"weights": "names and shapes fit", "memory": memory}
