"""Options that the commands of ``baton loadtest`` share."""

import contextlib
import functools
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from loadtest.client.records import ServerOptions
from loadtest.client.server import Server, ServerError
from loadtest.metrics.summary import parse_slo
from loadtest.reasons import file_reason
from loadtest.results.files import ResultsError, check_unused
from loadtest.run import RunOptions

_SECRETS = ("--api-key", "--tenant-key", "--header")
_SERVER = "The server"
_RUN = "The run"


class LocalFleet(NamedTuple):
    """Baton fleet on this machine, with what only its owner can access."""

    name: str
    url: str
    operator_key: str
    redis_pid: Callable[[], int | None]  # None if the fleet does not own its Redis
    order: Callable[[str, dict[str, int]], str]  # sends an admin command; returns its error or ""


FindFleet = Callable[[], LocalFleet | None]
"""Function that returns the single running fleet of this machine; ``fleet/cli`` provides it."""

_server = functools.partial(typer.Option, rich_help_panel=_SERVER)
_run = functools.partial(typer.Option, rich_help_panel=_RUN)

ApiKey = Annotated[
    str, _server(envvar="OPENAI_API_KEY", help="API key, sent as bearer token.", show_envvar=True)
]
IgnoreEos = Annotated[bool, _server(help="Make responses as long as planned, if supported.")]
Out = Annotated[Path, typer.Option(help="Folder for results.json and report.html.")]
Seed = Annotated[int, _run(min=0, help="Random seed for prompts and arrival times.")]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Options of every command that sends requests."""

    url: Annotated[str, _server(help="Base URL http://host:port. Default: the local fleet.")] = ""
    model: Annotated[str, _server(help="Model name. Default: the first of /v1/models.")] = ""
    api_key: ApiKey = ""
    tenant_keys: Annotated[
        list[str],
        _server(
            "--tenant-key",
            metavar="TENANT=KEY",
            help="API key of a tenant of the load, such as hot=KEY. Default: send only its name.",
        ),
    ] = field(default_factory=list)
    endpoint: Annotated[
        Literal["chat", "completions"], _server(help="Use /v1/chat/completions or /v1/completions.")
    ] = "chat"
    token_ids: Annotated[
        bool,
        _server(
            "--token-ids",
            help="Send prompts as token ids of exact length to /v1/completions, if supported.",
        ),
    ] = False
    ignore_eos: IgnoreEos = True
    headers: Annotated[
        list[str],
        _server(
            "--header",
            metavar="NAME: VALUE",
            help="Header of every request, such as 'x-baton-mode: colocated'.",
        ),
    ] = field(default_factory=list)
    timeout_s: Annotated[float, _server(min=0.1, help="Seconds per request.")] = 600.0
    clients: Annotated[int, _run(min=1, help="Client processes.")] = 1
    slo: Annotated[
        str,
        _run("--slo", help="Limits of a good request, with commas: ttft_s=…, tpot_s=…, e2e_s=…."),
    ] = "ttft_s=2,tpot_s=0.1"
    quantile: Annotated[float, _run(help="Share of requests that must be good.")] = 0.9
    warmup_s: Annotated[
        float, _run("--warmup-s", min=0, help="Seconds excluded from the figures.")
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Options that repeat or continue a run."""

    seed: Seed = 0
    resume: Annotated[bool, _run("--resume", help="Continue after Ctrl-C.")] = False


def run_options(
    choices: Choices, find_fleet: FindFleet | None, *, tools: bool = False
) -> RunOptions:
    """Return the options of a run, after checking the server's support for them and for tools.

    Raises:
        typer.Exit: The options or the server cannot be used; the reason was printed.
    """
    try:
        slo = parse_slo(choices.slo, choices.quantile)
        server = _settled(choices, _url(choices.url, find_fleet), tools)
    except (ServerError, ValueError) as error:
        fail(str(error))
    return RunOptions(
        server=server,
        slo=slo,
        clients=choices.clients,
        warmup_s=choices.warmup_s,
        command=typed_command(sys.argv[1:]),
    )


def _settled(choices: Choices, url: str, tools: bool) -> ServerOptions:
    with Server(url, choices.api_key) as server:
        wanted = ServerOptions(
            url=server.url,
            model=choices.model or server.first_model(),
            api_key=choices.api_key,
            tenant_keys=dict(_pair(text, "=") for text in choices.tenant_keys),
            endpoint="completions" if choices.token_ids else choices.endpoint,
            token_ids=choices.token_ids,
            tools="callable" if tools else "",
            ignore_eos=choices.ignore_eos,
            timeout_s=choices.timeout_s,
            headers=dict(_pair(text, ":") for text in choices.headers),
        )
        settled = server.settle(wanted)
    for name in ("ignore_eos", "include_usage"):
        requested = msgspec.structs.asdict(wanted)[name]
        if requested and not msgspec.structs.asdict(settled)[name]:
            echo(f"[yellow]the server rejects {name}: it is omitted[/]")
    if settled.tools == "described":
        echo("[yellow]the server rejects tools: the system prompt describes them[/]")
    return settled


def _url(url: str, find_fleet: FindFleet | None) -> str:
    if url:
        return url
    local = find_fleet() if find_fleet is not None else None
    if local is None:
        raise ServerError("no single fleet is running here: give --url http://host:port")
    return local.url


def _pair(text: str, separator: str) -> tuple[str, str]:
    name, separated, value = text.partition(separator)
    if not separated or not name.strip():
        raise ValueError(f"{text.partition('=')[0]!r} must have the form NAME{separator}VALUE")
    return name.strip(), value.strip()


def typed_command(arguments: Sequence[str]) -> str:
    """Return the command line without its secrets."""
    shown = ["baton"]
    hide = False
    for argument in arguments:
        option, joined, _ = argument.partition("=")
        if hide:
            shown.append("…")
        elif joined and option in _SECRETS:
            shown.append(f"{option}=…")
        else:
            shown.append(argument)
        hide = not hide and argument in _SECRETS
    return shlex.join(shown)


def echo(line: str) -> None:
    """Print a line with rich markup to standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def check_out(folder: Path) -> None:
    """Exit with an error if a run would overwrite the results in its folder."""
    try:
        check_unused(folder)
    except ResultsError as error:
        fail(str(error))


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Print why a load cannot be planned: a file, or an option's value; and exit."""
    try:
        yield
    except OSError as error:
        fail(file_reason(error))
    except ValueError as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Print an error and exit."""
    echo(f"[bold red]error[/] {escape(message)}")
    raise typer.Exit(1)
