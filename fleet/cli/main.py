"""The `baton` command. The docstring of a command's function is its help text."""

import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from baton.folders import NoHomeError
from baton.telemetry.version import version as installed

_PLACES = {
    "capacity": "fleet.cli.capacity:capacity",
    "up": "fleet.cli.lifecycle:up",
    "serve": "fleet.cli.serve:serve",
    "epp": "fleet.cli.epp:epp",
    "down": "fleet.cli.lifecycle:down",
    "status": "fleet.cli.inspection:status",
    "top": "fleet.cli.top:top",
    "explain": "fleet.cli.explain:explain",
    "doctor": "fleet.cli.doctor:doctor",
    "chat": "fleet.cli.chat:chat",
    "batch": "fleet.cli.batch:batch",
    "logs": "fleet.cli.inspection:logs",
    "drain": "fleet.cli.admin_commands:drain",
    "restart": "fleet.cli.admin_commands:restart",
    "scale": "fleet.cli.admin_commands:scale",
    "plan": "fleet.cli.admin_commands:plan",
    "nodes": "fleet.cli.admin_commands:nodes",
    "usage": "fleet.cli.usage:usage",
    "router": "fleet.cli.router:router",
    "certs": "fleet.cli.certs:certs",
    "simulate": "loadtest.simulator.cli:simulate",
    "config": "fleet.cli.inspection:config_app",
    "keys": "fleet.cli.keys:keys_app",
    "tenants": "fleet.cli.tenants:tenants_app",
    "models": "fleet.cli.models:models_app",
    "audit": "fleet.cli.audit:audit_app",
    "loadtest": "loadtest.cli:app",
}
"""Module and name of each command's function, or of the app with its subcommands."""


class _Commands(Mapping[str, Any]):
    """Commands by name, imported when they are looked up: all together take half a second."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            module, _, attribute = _PLACES[name].partition(":")
            command = getattr(import_module(module), attribute)
            holder = typer.Typer()
            if isinstance(command, typer.Typer):
                holder.add_typer(command, name=name)
            else:
                # the words that `serve` does not know are vLLM's
                loose = {"ignore_unknown_options": name == "serve"}
                holder.command(name, context_settings=loose)(command)
            self._made[name] = _with_whole_paragraphs(get_group(holder).commands[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACES)

    def __len__(self) -> int:
        return len(_PLACES)


def _with_whole_paragraphs(command: Any) -> Any:
    """Join the lines of each paragraph of the help, which otherwise stay as in the docstring."""
    for child in getattr(command, "commands", {}).values():
        _with_whole_paragraphs(child)
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(
        text if "\n " in text else text.replace("\n", " ") for text in paragraphs
    )
    return command


class _Root(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "commands": _Commands()})


app = typer.Typer(
    cls=_Root,
    help="Baton serves a large language model from a fleet: prefill workers compute prompts and "
    "hand the KV cache to decode workers, which generate the responses.\n\nStart with `baton up`, "
    "then `baton chat`. `baton doctor` checks this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    cacert: Annotated[
        Path | None,
        typer.Option(envvar="BATON_CACERT", help="CA bundle (PEM) for verifying routers."),
    ] = None,
) -> None:
    """Apply the options that precede a command."""
    if cacert is not None:
        if not cacert.is_file():
            import_module("fleet.cli.common").fail(f"--cacert {cacert}: no such file")
        os.environ["SSL_CERT_FILE"] = str(cacert.resolve())
    # for commands that are given no URL
    ctx.obj = lambda: import_module("fleet.cli.loadtest").local_fleet()
    if version:
        typer.echo(f"baton {installed()}")
        raise typer.Exit


def main() -> None:
    """Entry point of the `baton` script."""
    try:
        "".join(sys.argv).encode()
    except UnicodeEncodeError:
        import_module("fleet.cli.common").show_error("the arguments must be UTF-8 text")
        sys.exit(2)
    try:
        app()
    except NoHomeError as error:
        import_module("fleet.cli.common").show_error(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
