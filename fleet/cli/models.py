"""Models of a fleet and the names that lead to them: `baton models`."""

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from baton.config.golden_file import GoldenFileError, read_golden
from baton.types.lanes import split_version
from fleet.cli.common import JsonOption, exits_on, fail
from fleet.cli.models_add import add
from fleet.cli.models_check import check
from fleet.cli.reach import HERE, FleetAddress, ask_router
from loadtest.commands.option_groups import with_options

_PATH = "/fleet/models"
_GATE_S = 300.0

models_app = typer.Typer(
    help="Show the models of a fleet, and change which of them answers a name.",
    no_args_is_help=True,
)

_NameArgument = Annotated[str, typer.Argument(help="Name that clients send.")]
_ModelArgument = Annotated[str, typer.Argument(help="Model or adapter, as in `baton models ls`.")]
_VersionArgument = Annotated[
    str | None, typer.Argument(help="Model or adapter; not needed with NAME@3.")
]


@models_app.command("ls")
@with_options()
def ls(
    at: FleetAddress = HERE,
    as_json: JsonOption = False,
) -> None:
    """List the models with their workers, and the names with their models."""
    listed = ask_router(at.reach(), "GET", _PATH)
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
        return
    console = Console(highlight=False)
    models = _table("model", "version", "workers", "running", "waiting")
    for model in listed["models"]:
        workers = ", ".join(f"{count} {state}" for state, count in model["workers"].items())
        figures = (str(model["running"]), str(model["waiting"]))
        models.add_row(escape(model["name"]), model["version"], workers or "–", *figures)
        for adapter in model["adapters"]:
            held = f"held by {adapter['held_by_workers']}"
            models.add_row(f"  {escape(adapter['name'])}", adapter["version"], held, "", "")
    console.print(models)
    if listed["routes"]:
        names = _table("name", "answered by", "previous", "gate")
        for name, entry in listed["routes"].items():
            previous = escape(entry["previous"]) or "–"
            names.add_row(
                escape(name), escape(_described(entry)), previous, escape(_gate(entry)) or "–"
            )
        console.print(names)


models_app.command("add")(add)
models_app.command("check")(check)


@models_app.command("load")
@with_options()
def load(model: _ModelArgument, at: FleetAddress = HERE) -> None:
    """Start the workers of a model that was unloaded, as many as the fleet file has."""
    ask_router(at.reach(), "POST", _PATH, {"verb": "load", "name": model})
    typer.echo(f"{model}: loading (`baton models ls`)")


@models_app.command("unload")
@with_options()
def unload(model: _ModelArgument, at: FleetAddress = HERE) -> None:
    """Stop all workers of a model once their requests have ended, which frees their memory.

    No name may lead to the model. Requests for it get 503 until `baton models load`.
    """
    ask_router(at.reach(), "POST", _PATH, {"verb": "unload", "name": model})
    typer.echo(f"{model}: unloading (`baton models ls`)")


@models_app.command("alias")
@with_options()
def alias(name: _NameArgument, model: _ModelArgument, at: FleetAddress = HERE) -> None:
    """Let a name lead to a model. The model before it is kept for `baton models rollback`."""
    _change(at, verb="alias", name=name, model=model)


@models_app.command("canary")
@with_options()
def canary(
    name: _NameArgument,
    model: _VersionArgument = None,
    share: Annotated[
        str | None,
        typer.Option(help="Share of the conversations in percent, such as 5%.", metavar="PERCENT"),
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option(help="Tenant whose requests all go there; repeatable.")
    ] = None,
    at: FleetAddress = HERE,
) -> None:
    """Let another model answer a part of a name's requests.

    `baton models canary NAME@3` is short for `baton models canary NAME NAME@3`. All requests of a
    conversation get the same model. A larger share moves conversations to the canary, and none away
    from it.
    """
    name, model = _version(name, model)
    body: dict[str, Any] = {"verb": "canary", "name": name, "model": model}
    if share is not None:
        body["share"] = _fraction(share)
    if tenant:
        body["tenants"] = tenant
    _change(at, **body)


@models_app.command("shadow")
@with_options()
def shadow(
    name: _NameArgument,
    model: _VersionArgument = None,
    share: Annotated[
        str, typer.Option(help="Share of the conversations in percent.", metavar="PERCENT")
    ] = "5%",
    at: FleetAddress = HERE,
) -> None:
    """Let another model run copies of a part of a name's requests, which answer no client.

    `baton models ls` compares the answers. `baton models rollback NAME` ends it, and so does a
    canary of the name.
    """
    name, model = _version(name, model)
    _change(at, verb="shadow", name=name, model=model, share=_fraction(share))


@models_app.command("gate")
@with_options()
def gate(
    model: _ModelArgument,
    golden: Annotated[
        Path | None,
        typer.Option(help="File of golden prompts that replaces those before.", metavar="FILE"),
    ] = None,
    at: FleetAddress = HERE,
    as_json: JsonOption = False,
) -> None:
    """Run the golden prompts of a model at all its workers.

    The exit code is 1 if an answer is wrong or missing. A model with golden prompts becomes a
    canary only if all answers are right, and is rolled back at the first wrong one.
    """
    body: dict[str, Any] = {"verb": "gate", "name": model}
    if golden is not None:
        with exits_on(GoldenFileError):
            prompts = read_golden(golden)
        body["golden"] = msgspec.to_builtins(prompts)
    outcome = ask_router(at.reach(), "POST", _PATH, body, _GATE_S)["golden"]
    if outcome is None:
        fail(f"{model} has no golden prompts: use --golden FILE, or `gates` in the fleet file")
    if as_json:
        typer.echo(json.dumps(outcome, indent=2))
    else:
        typer.echo(f"{model}: {_round(outcome)}")
        for kind in ("wrong", "failed"):
            for name, problem in outcome[kind].items():
                typer.echo(f"{kind} {name}: {problem}")
    raise typer.Exit(0 if outcome["passed"] else 1)


@models_app.command("promote")
@with_options()
def promote(name: _NameArgument, at: FleetAddress = HERE) -> None:
    """Let the canary of a name answer all its requests."""
    _change(at, verb="promote", name=name)


@models_app.command("rollback")
@with_options()
def rollback(name: _NameArgument, at: FleetAddress = HERE) -> None:
    """End the canary or shadow of a name, or else return to the model before the last change."""
    _change(at, verb="rollback", name=name)


@models_app.command("fallback")
@with_options()
def fallback(
    name: _NameArgument,
    models: Annotated[list[str] | None, typer.Argument(help="Models, in order. None: end.")] = None,
    at: FleetAddress = HERE,
) -> None:
    """Set the models that answer a name while no worker of its model is ready.

    Only requests with the header `x-baton-fallback: allow` get their answers.
    """
    _change(at, verb="fallback", name=name, fallbacks=models or [])


@models_app.command("remove")
@with_options()
def remove(name: _NameArgument, at: FleetAddress = HERE) -> None:
    """Remove an alias. The name of a model leads to this model again."""
    _change(at, verb="remove", name=name)


def _change(at: FleetAddress, **body: Any) -> None:
    changed = ask_router(at.reach(), "POST", _PATH, body)
    entry = changed["route"]
    name = changed["name"]
    if body["verb"] == "rollback":
        typer.echo(f"{name}: back to {_described(entry) if entry is not None else name}")
    else:
        typer.echo(f"{name}: {_described(entry) if entry is not None else 'no alias'}")


def _version(name: str, model: str | None) -> tuple[str, str]:
    """Return the name and the model of a command; ``NAME@3`` alone is version 3 of NAME."""
    if model is not None:
        return name, model
    stem, number = split_version(name)
    if stem == name:
        fail(f"{name}: give the model, too, or a version such as {name}@{number + 1}")
    return stem, name


def _described(entry: dict[str, Any]) -> str:
    text = str(entry["target"])
    if entry["canary"]:
        parts = [f"{entry['share'] * 100:g} %"] * bool(entry["share"])
        parts += [f"tenant {tenant}" for tenant in entry["tenants"]]
        text = f"{text}; canary {entry['canary']} ({', '.join(parts)})"
    if entry["shadow_share"]:
        text = f"{text}; shadow {entry['shadow']} ({entry['shadow_share'] * 100:g} %)"
    if entry["fallbacks"]:
        text = f"{text}; fallback {', '.join(entry['fallbacks'])}"
    return text


def _gate(entry: dict[str, Any]) -> str:
    if entry["thrown_out"]:
        return f"rolled back {entry['thrown_out']}: {entry['reason']}"
    if entry["shadow"] and not entry["shadow_share"]:
        return f"ended shadow {entry['shadow']}: {entry['reason']}"
    if entry["gate"] is None:
        return ""
    canary = entry["gate"]["canary"]
    counted = f"{canary['errors']} of {canary['requests']} requests failed"
    if compared := canary["same"] + canary["different"]:
        counted = f"{counted}; {canary['same']} of {compared} answers have the same tokens"
    golden = entry["gate"]["golden"]
    return counted if golden is None else f"{counted}; {_round(golden)}"


def _round(outcome: dict[str, Any]) -> str:
    prompts = "golden prompt" if outcome["right"] == 1 else "golden prompts"
    parts = [f"{outcome['right']} {prompts} right"]
    parts += [f"{len(outcome[kind])} {kind}" for kind in ("wrong", "failed") if outcome[kind]]
    return ", ".join(parts)


def _fraction(share: str) -> float:
    try:
        return float(share.strip().removesuffix("%")) / 100
    except ValueError:
        fail(f"--share {share}: use a number of percent, such as 5%")


def _table(*columns: str) -> Table:
    return Table(*(Column(name, overflow="fold") for name in columns), box=SIMPLE_HEAD)
