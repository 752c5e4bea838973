"""The `baton` command. Each function is one command; its docstring is its ``--help``."""

import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from config.fleet_file import ConfigError, FleetConfig, load_config
from fleet.cli.capacity import capacity
from fleet.cli.chat import talk
from fleet.local import state as fleet_state
from fleet.local.redis_server import RedisError
from fleet.local.state import FleetState
from fleet.local.supervisor import FleetError, Supervisor
from fleet.pools.resources import CapacityError
from fleet.preflight import PortTakenError, describe_model, doctor, notes
from registry.redis_store import Registry, RegistryUnavailableError

DEFAULT_FILE = Path("deploy/local.yaml")
_NOT_RUNNING = 3  # exit code, as systemctl's
_DOWN_LIMIT_S = 16.0

app = typer.Typer(
    help="Baton serves a large language model from a fleet: prefill workers read prompts, decode "
    "workers write answers, and the KV cache is the baton.\n\nStart with `baton up`, then `baton "
    "chat`. `baton doctor` says what is missing on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(capacity)
config_app = typer.Typer(help="Look at fleet files.", no_args_is_help=True)
app.add_typer(config_app, name="config")

FileArgument = Annotated[
    Path | None,
    typer.Argument(
        help="Fleet file. Default: $BATON_CONFIG, else deploy/local.yaml.", metavar="FILE"
    ),
]
FleetOption = Annotated[
    str | None, typer.Option("--fleet", help="Which fleet, when several run on this machine.")
]


def main() -> None:
    """Entry point of the `baton` script."""
    app()


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and end.")] = False,
) -> None:
    """Options that stand before a command."""
    if version:
        typer.echo(f"baton {importlib.metadata.version('baton-serve')}")
        raise typer.Exit


@app.command()
def up(
    file: FileArgument = None,
    address: Annotated[
        str | None,
        typer.Option(help="An existing Ray cluster (`auto` or HOST:PORT) instead of a local Ray."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the router, instead of the file's. Also BATON_PORT.")
    ] = None,
) -> None:
    """Start a fleet and stay in the foreground; Ctrl-C stops all of it.

    Starts Redis, Ray, the workers and a router on this machine, shows what it waits for, and
    prints one line with the URL when a request can be sent.

    Examples: `baton up`, `baton up deploy/local-2x2.yaml`, `BATON_PORT=9000 baton up`.
    """
    config_file, config = _load(file, port)
    console = Console(highlight=False, soft_wrap=True)
    began_s = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - began_s:6.1f} s[/]  {escape(line)}")

    supervisor = Supervisor(config, config_file, say, address)
    try:
        supervisor.run(lambda: _announce(console, supervisor, config))
    except (FleetError, CapacityError, RedisError, PortTakenError, ValueError) as error:
        _fail(str(error))


def _announce(console: Console, supervisor: Supervisor, config: FleetConfig) -> None:
    name, url = config.model_names[0], supervisor.url
    pools = f"{config.pools.prefill} prefill + {config.pools.decode} decode"
    asked: dict[str, Any] = {"prompt": "The capital of France is"}
    path = "completions"
    if supervisor.chats:
        asked = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        path = "chat/completions"
    body = {"model": name, **asked, "temperature": 0}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_keys else ""
    console.print(f"[bold green]Baton is ready[/] at [bold]{url}/v1[/] ({name}, {pools})")
    console.print(
        f"  curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
        markup=False,
    )


@app.command()
def down(file: FileArgument = None) -> None:
    """Stop a fleet that runs elsewhere, and clean up what a killed one left behind.

    Without a file and without BATON_CONFIG: every fleet of this user on this machine.
    """
    if file is None and not os.environ.get("BATON_CONFIG"):
        states = fleet_state.load_all()
    else:
        fleet = _load(file, None)[1].fleet
        states = [state for state in fleet_state.load_all() if state.fleet == fleet]
    if not states:
        typer.echo("nothing is running")
    results = [_bring_down(state) for state in states]
    raise typer.Exit(0 if all(results) else 1)


def _bring_down(state: FleetState) -> bool:
    supervisor = state.supervisor.find()
    if supervisor is not None:
        supervisor.terminate()
        deadline = time.monotonic() + _DOWN_LIMIT_S
        while state.running and time.monotonic() < deadline:
            time.sleep(0.1)
    ended = not state.running
    if not ended and supervisor is not None:
        supervisor.kill()
    left = fleet_state.sweep(state.run_folder)
    fleet_state.forget(state.name)
    typer.echo(f"{state.name}: stopped" + (f" ({left} leftover processes ended)" if left else ""))
    return ended


@app.command()
def status(
    fleet: FleetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The router's /fleet, as it is.")] = False,
) -> None:
    """Show the workers: state, blocks, load, and what was handed over.

    Exit code 0 when every worker is ready, 1 when some are not, 3 when nothing runs.
    """
    state = _running(fleet)
    answer = _get(state, "/fleet")
    workers = answer["workers"]
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        console = Console()
        console.print(f"[bold]{escape(state.name)}[/] at {state.url}/v1")
        console.print(_worker_table(workers))
        moved = answer["transfers"]
        console.print(
            f"hand-offs: {moved['count']}, {moved['bytes'] / 2**20:.1f} MiB, "
            f"{moved['failures']} failed"
        )
    raise typer.Exit(0 if all(worker["state"] == "ready" for worker in workers) else 1)


def _worker_table(workers: list[dict[str, Any]]) -> Table:
    table = Table("worker", "state", "life", "pid", "address", "running", "waiting", "KV blocks")
    colours = {"ready": "green", "dead": "red"}
    for worker in workers:
        blocks = worker["kv_blocks"]
        colour = colours.get(worker["state"], "yellow")
        table.add_row(
            escape(worker["id"]),
            f"[{colour}]{escape(worker['state'])}[/]",
            *(str(worker[key]) for key in ("epoch", "pid", "address", "running", "waiting")),
            f"{blocks['leased']} leased, {blocks['cached']} cached, {blocks['free']} free",
        )
    return table


@app.command(name="doctor")
def run_doctor(file: FileArgument = None) -> None:
    """Check this machine: packages, model, Redis, port, memory, limits. Starts nothing."""
    _, config = _load(file, None)
    findings = doctor(config)
    table = Table(show_header=False, box=None)
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]!![/]"
        table.add_row(mark, finding.name, escape(finding.text))
    for state in fleet_state.load_all():
        what = "runs" if state.running else "was killed; `baton down` cleans up"
        table.add_row("[blue]--[/]", "fleet", escape(f"{state.name} at {state.url} {what}"))
    Console(soft_wrap=True).print(table)
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


@app.command()
def chat(
    prompt: Annotated[str | None, typer.Argument(help="Ask this once instead of talking.")] = None,
    fleet: FleetOption = None,
    url: Annotated[
        str | None, typer.Option(help="A router elsewhere, e.g. http://host:8000.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="auto, disaggregated or colocated (header x-baton-mode).")
    ] = "auto",
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 always gives the likeliest answer.", min=0, max=2)
    ] = 0.0,
) -> None:
    """Talk to the model; shows after each answer which workers gave it.

    An API key is taken from OPENAI_API_KEY.
    """
    base = url or _running(fleet).url
    try:
        sampling = {"max_tokens": max_tokens, "temperature": temperature}
        talk(base, prompt, mode=mode, sampling=sampling, key=os.environ.get("OPENAI_API_KEY"))
    except httpx.HTTPError as error:
        _fail(f"{base}: {error}")


@app.command()
def logs(
    worker: Annotated[
        str | None, typer.Argument(help="prefill-0, decode-0, router, controller, redis; or all.")
    ] = None,
    fleet: FleetOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they grow.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many of each, at most.")] = 50,
) -> None:
    """Show what the processes of a fleet wrote, also of one that has ended."""
    state = _known(fleet)
    if state is not None:
        folder = Path(state.log_dir)
    else:
        _, config = _load(None, None)
        folder = fleet_state.log_folder(config, fleet or config.fleet)
    files = sorted(folder.glob(f"{worker}*.log" if worker else "*.log"))
    if not files:
        names = ", ".join(sorted(path.stem for path in folder.glob("*.log"))) or "none yet"
        _fail(f"no log of {worker or 'anything'} in {folder} (there are: {names})")
    command = ["tail", "-n", str(lines), *(["-F"] if follow else []), *map(str, files)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="Such as decode-0.")], fleet: FleetOption = None
) -> None:
    """Take one worker out of traffic and stop it once its requests have ended.

    `baton restart WORKER` brings it back.
    """
    _order(fleet, "drain", [worker])
    typer.echo(f"{worker}: draining (`baton status`)")


@app.command()
def restart(
    worker: Annotated[str | None, typer.Argument(help="Such as decode-0; all if absent.")] = None,
    fleet: FleetOption = None,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="One after another, each drained first.")
    ] = False,
) -> None:
    """Give workers a new life: at once, or one after another without losing a request."""
    _order(fleet, "roll" if rolling else "restart", [worker] if worker else [])
    typer.echo(f"{worker or 'all workers'}: restarting{' one by one' if rolling else ''}")


@config_app.command("check")
def config_check(file: FileArgument = None) -> None:
    """Check a fleet file, its model included. Each problem comes with its line."""
    config_file, config = _load(file, None)
    try:
        model = describe_model(config)
    except ValueError as error:
        _fail(f"{config_file}: model = {config.model}: {error}")
    typer.echo(f"{config_file}: ok ({model.text})")
    for note in notes(config):
        typer.echo(f"note: {note}")


# ---- shared -------------------------------------------------------------------------------------


def _load(file: Path | None, port: int | None) -> tuple[Path, FleetConfig]:
    """The fleet file and what it says, with the port from the option or BATON_PORT."""
    path = file or Path(os.environ.get("BATON_CONFIG") or DEFAULT_FILE)
    overrides: dict[str, object] = {}
    said_by = "--port"
    if port is not None:
        overrides["port"] = port
    elif text := os.environ.get("BATON_PORT"):
        said_by = "BATON_PORT"
        overrides["port"] = int(text) if text.isdigit() else text
    try:
        return path, load_config(path, overrides, said_by=said_by)
    except ConfigError as error:
        _fail(str(error))


def _known(fleet: str | None) -> FleetState | None:
    """The fleet that is meant, running or not."""
    states = fleet_state.load_all()
    if fleet is not None:
        return next((state for state in states if state.name == fleet), None)
    running = [state for state in states if state.running]
    if len(running) > 1:
        names = ", ".join(state.name for state in running)
        _fail(f"several fleets are running ({names}): choose one with --fleet NAME")
    return next(iter(running or states), None)


def _running(fleet: str | None) -> FleetState:
    state = _known(fleet)
    if state is None or not state.running:
        _fail("no fleet is running here: `baton up` starts one", _NOT_RUNNING)
    return state


def _get(state: FleetState, path: str) -> Any:
    try:
        answer = httpx.get(f"{state.url}{path}", timeout=10.0, trust_env=False)
        return answer.raise_for_status().json()
    except httpx.HTTPError as error:
        _fail(f"{state.url}{path}: {error}; see `baton logs router`")


def _order(fleet: str | None, verb: str, workers: list[str]) -> None:
    """Ask the controller, through Redis."""
    state = _running(fleet)

    async def ask() -> str | None:
        registry = Registry(state.redis_url, state.fleet)
        try:
            return await registry.ask(verb, workers)
        finally:
            await registry.close()

    try:
        answer = asyncio.run(ask())
    except RegistryUnavailableError as error:
        _fail(f"{error}: the controller cannot be reached now")
    if answer is None:
        _fail("the controller did not answer; see `baton logs controller`")
    if answer:
        _fail(answer)


def _fail(message: str, code: int = 1) -> NoReturn:
    stamp = datetime.now(UTC).astimezone().strftime("%H:%M:%S")
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"[bold red]error[/] [dim]{stamp}[/] {escape(message)}"
    )
    sys.stdout.flush()
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
