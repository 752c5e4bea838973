"""Options that the commands of ``baton loadtest`` share, and what is made of them."""

import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_type_hints

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from loadtest.client.records import ServerOptions
from loadtest.client.server import Server, ServerError
from loadtest.metrics.summary import parse_slo
from loadtest.run import RunOptions

_SECRETS = ("--api-key", "--tenant-key", "--header")
_SERVER = "The server"
_RUN = "The run"
_BY_NAME = inspect.Parameter.KEYWORD_ONLY


class LocalFleet(NamedTuple):
    """A Baton fleet on this machine; what only its owner knows."""

    name: str
    url: str
    operator_key: str
    redis_pid: Callable[[], int | None]  # None where the Redis is not the fleet's own
    roll: Callable[[], str]  # begins a rolling restart; says what went wrong, or ""


FindFleet = Callable[[], LocalFleet | None]
"""The running fleet of this machine if there is exactly one; ``fleet/cli`` gives it to us."""

Url = Annotated[
    str,
    typer.Option(help="http://host:port. Default: the local fleet.", rich_help_panel=_SERVER),
]
Model = Annotated[
    str, typer.Option(help="Default: the first of /v1/models.", rich_help_panel=_SERVER)
]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar="OPENAI_API_KEY", help="Sent as bearer.", show_envvar=True, rich_help_panel=_SERVER
    ),
]
TenantKeys = Annotated[
    list[str],
    typer.Option(
        "--tenant-key",
        metavar="TENANT=KEY",
        help="API key of a tenant of the load, such as hot=KEY. Else its name alone is sent.",
        rich_help_panel=_SERVER,
    ),
]
Endpoint = Annotated[
    Literal["chat", "completions"],
    typer.Option(help="/v1/chat/completions or /v1/completions.", rich_help_panel=_SERVER),
]
TokenIds = Annotated[
    bool,
    typer.Option(
        "--token-ids",
        help="Prompts as token ids: exact lengths, by /v1/completions, where the server takes it.",
        rich_help_panel=_SERVER,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(help="Answers as long as planned, where the server can.", rich_help_panel=_SERVER),
]
Headers = Annotated[
    list[str],
    typer.Option(
        "--header",
        metavar="NAME: VALUE",
        help="Sent with every request, such as 'x-baton-mode: colocated'.",
        rich_help_panel=_SERVER,
    ),
]
Timeout = Annotated[
    float, typer.Option(min=0.1, help="Of one request, in seconds.", rich_help_panel=_SERVER)
]
Out = Annotated[Path, typer.Option(help="Folder of results.json and report.html.")]
Seed = Annotated[int, typer.Option(min=0, help="Of words and arrivals.", rich_help_panel=_RUN)]
Clients = Annotated[int, typer.Option(min=1, help="Client processes.", rich_help_panel=_RUN)]
SloText = Annotated[
    str,
    typer.Option(
        "--slo",
        help="What a good request is: ttft_s=…, tpot_s=…, e2e_s=…, with commas between.",
        rich_help_panel=_RUN,
    ),
]
Quantile = Annotated[float, typer.Option(help="The share that must be good.", rich_help_panel=_RUN)]
Warmup = Annotated[
    float,
    typer.Option("--warmup-s", min=0, help="Left out of the figures.", rich_help_panel=_RUN),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on after Ctrl-C.", rich_help_panel=_RUN)]
PromptTokens = Annotated[
    str, typer.Option(help="256, uniform:64-512, lognormal:180,0.9[,MAX], choice:32,1024.")
]
AnswerTokens = Annotated[str, typer.Option(help="The same for answers.")]
DEFAULT_SLO = "ttft_s=2,tpot_s=0.1"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Options of every command that sends requests."""

    url: Url = ""
    model: Model = ""
    api_key: ApiKey = ""
    tenant_keys: TenantKeys = field(default_factory=list)
    endpoint: Endpoint = "chat"
    token_ids: TokenIds = False
    ignore_eos: IgnoreEos = True
    headers: Headers = field(default_factory=list)
    timeout_s: Timeout = 600.0
    clients: Clients = 1
    slo: SloText = DEFAULT_SLO
    quantile: Quantile = 0.9
    warmup_s: Warmup = 0.0


def with_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function: each field of a dataclass that it takes becomes an option.

    Args:
        without: Fields that are no options of this command and keep their defaults.
    """

    def made(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        groups: dict[str, list[inspect.Parameter]] = {}
        shown: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(function).parameters.items():
            if is_dataclass(hints[name]):
                groups[name] = [one for one in _options(hints[name]) if one.name not in without]
                shown += groups[name]
            else:
                shown.append(parameter.replace(kind=_BY_NAME, annotation=hints[name]))

        @functools.wraps(function)
        def command(**given: Any) -> None:
            for name, options in groups.items():
                given[name] = hints[name](**{one.name: given.pop(one.name) for one in options})
            function(**given)

        command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in shown}
        return command

    return made


def _options(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for one in fields(kind):
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        if one.default_factory is not MISSING:
            default = one.default_factory()
        annotation = hints[one.name]
        found.append(inspect.Parameter(one.name, _BY_NAME, default=default, annotation=annotation))
    return found


def run_options(choices: Choices, find_fleet: FindFleet | None) -> RunOptions:
    """Everything a run needs to know, the server's own answers included.

    Raises:
        typer.Exit: Something is wrong, and was said.
    """
    try:
        slo = parse_slo(choices.slo, choices.quantile)
        server = _settled(choices, _url(choices.url, find_fleet))
    except (ServerError, ValueError) as error:
        fail(str(error))
    return RunOptions(
        server=server,
        slo=slo,
        clients=choices.clients,
        warmup_s=choices.warmup_s,
        command=_typed_command(sys.argv[1:]),
    )


def _settled(choices: Choices, url: str) -> ServerOptions:
    with Server(url, choices.api_key) as server:
        wanted = ServerOptions(
            url=server.url,
            model=choices.model or server.first_model(),
            api_key=choices.api_key,
            tenant_keys=dict(_pair(text, "=") for text in choices.tenant_keys),
            endpoint="completions" if choices.token_ids else choices.endpoint,
            token_ids=choices.token_ids,
            ignore_eos=choices.ignore_eos,
            timeout_s=choices.timeout_s,
            headers=dict(_pair(text, ":") for text in choices.headers),
        )
        settled = server.settle(wanted)
    for name in ("ignore_eos", "include_usage"):
        asked = msgspec.structs.asdict(wanted)[name]
        if asked and not msgspec.structs.asdict(settled)[name]:
            say(f"[yellow]the server refuses {name}: it is left out[/]")
    return settled


def _url(url: str, find_fleet: FindFleet | None) -> str:
    if url:
        return url
    found = find_fleet() if find_fleet is not None else None
    if found is None:
        raise ServerError("no single fleet is running here: give --url http://host:port")
    return found.url


def _pair(text: str, separator: str) -> tuple[str, str]:
    name, found, value = text.partition(separator)
    if not found or not name.strip():
        raise ValueError(f"{text.partition('=')[0]!r}: NAME{separator}VALUE was expected")
    return name.strip(), value.strip()


def _typed_command(arguments: Sequence[str]) -> str:
    """The command line without its secrets."""
    shown = ["baton"]
    hide = False
    for argument in arguments:
        option, found, _ = argument.partition("=")
        if hide:
            shown.append("…")
        elif found and option in _SECRETS:
            shown.append(f"{option}=…")
        else:
            shown.append(argument)
        hide = not hide and argument in _SECRETS
    return shlex.join(shown)


def say(line: str) -> None:
    """A line on standard error; rich's markup."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def fail(message: str) -> NoReturn:
    """Say what is wrong and end."""
    say(f"[bold red]error[/] {escape(message)}")
    raise typer.Exit(1)
