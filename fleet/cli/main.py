"""The `baton` command. Each listed function is one command; its docstring is the help text."""

import os
from pathlib import Path
from typing import Annotated

import typer

from baton.telemetry.version import version as installed
from fleet.cli.audit.command import audit_app
from fleet.cli.batch import batch
from fleet.cli.capacity import capacity
from fleet.cli.certs.command import certs
from fleet.cli.chat import chat
from fleet.cli.common import fail
from fleet.cli.doctor.command import doctor
from fleet.cli.explain import explain
from fleet.cli.inspection import config_check, logs, status
from fleet.cli.keys import keys_app
from fleet.cli.lifecycle import down, up
from fleet.cli.loadtest import give_local_fleet, local_fleet
from fleet.cli.models.command import models_app
from fleet.cli.orders import drain, nodes, plan, restart, scale
from fleet.cli.router import router
from fleet.cli.tenants.command import tenants_app
from fleet.cli.usage.command import usage
from fleet.cli.watch.top import top
from loadtest.cli import app as loadtest_app
from loadtest.lab.cli import lab
from loadtest.simulator.cli import simulate

app = typer.Typer(
    help="Baton serves a large language model from a fleet: prefill workers compute prompts and "
    "hand the KV cache to decode workers, which generate the responses.\n\nStart with `baton up`, "
    "then `baton chat`. `baton doctor` checks this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    *(capacity, up, down, status, top, explain, doctor, chat, batch, logs, drain, restart),
    *(scale, plan, nodes, usage, router, certs, lab, simulate),
):
    app.command()(command)

config_app = typer.Typer(help="Check fleet files.", no_args_is_help=True)
config_app.command("check")(config_check)
app.add_typer(config_app, name="config")
app.add_typer(keys_app, name="keys")
app.add_typer(tenants_app, name="tenants")
app.add_typer(models_app, name="models")
app.add_typer(audit_app, name="audit")
app.add_typer(loadtest_app, name="loadtest", callback=give_local_fleet)


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
            fail(f"--cacert {cacert}: no such file")
        os.environ["SSL_CERT_FILE"] = str(cacert.resolve())
    ctx.obj = local_fleet  # for commands that are given no URL
    if version:
        typer.echo(f"baton {installed()}")
        raise typer.Exit


def main() -> None:
    """Entry point of the `baton` script."""
    app()


if __name__ == "__main__":
    main()
