"""Fleet file section on servers that are attached: Baton does not start or end them."""

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, TypeAdapter, model_validator

from baton.config.network import AbsoluteFile, host_name
from baton.config.section import Section

EventsEndpoint = Annotated[str, StringConstraints(pattern=r"^(tcp://\S+:\d+|ipc://\S+)$")]
_Url = Annotated[
    str,
    StringConstraints(pattern=r"^https?://[^/?#\s@]+(/[^?#\s]*)?$"),
    AfterValidator(lambda url: re.sub(r"(?<=[^/:])(/+v1)?/*$", "", url)),  # as clients have it
]
_PORTS = {"http": 80, "https": 443}


class AttachedServer(Section):
    """Server that is attached; a URL alone is short for a mapping with `url`.

    Attributes:
        url: URL of the server, without the paths of its API.
        role: Role of its worker; `decode` computes prompts too.
        events: ZeroMQ endpoints of its KV events, one for each data-parallel rank, in order; `*`
            stands for the server's host. Without the key, vLLM's default port is tried. An empty
            list turns them off.
        replay: Endpoints that repeat these events, in the same order.
        key_file: File with the key that the server requires.
        label: Name of the server in `baton status`.
        drain: Take no new requests; the running ones are resumed elsewhere.
    """

    url: _Url
    role: Literal["prefill", "decode"] = "decode"
    events: Annotated[tuple[EventsEndpoint, ...], Field(max_length=64)] | None = None
    replay: Annotated[tuple[EventsEndpoint, ...], Field(max_length=64)] = ()
    key_file: AbsoluteFile | None = None
    label: Annotated[str, StringConstraints(pattern=r"^[\w.:/@-]{1,64}$")] | None = None
    drain: bool = False

    @model_validator(mode="before")
    @classmethod
    def _url_to_mapping(cls, value: object) -> object:
        if isinstance(value, str):
            return {"url": value}
        if isinstance(value, dict):
            lists = {name: tuple(one) for name, one in value.items() if isinstance(one, list)}
            return {**value, **lists}
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        try:
            parts = urlsplit(self.url)
            _ = parts.port, (parts.hostname or ".").encode("idna")
        except ValueError as error:
            raise ValueError(f"url: {error}; IPv6 is as in http://[::1]:8000") from None
        if self.replay and len(self.replay) != len(self.events or ()):
            raise ValueError("replay needs one endpoint for each of `events`")
        return self


Servers = Annotated[tuple[AttachedServer, ...], Field(max_length=512)]


class AttachedServers(Section):
    """Servers that are attached; a list alone is short for a mapping with `list`.

    Attributes:
        list: The servers.
        dns: Server whose host name has the addresses of all servers, such as a headless service.
            It is looked up every 2 s.
        file: YAML file with a list of servers, which is read again when it changes.
    """

    list: Annotated[Servers, Field(min_length=1)] | None = None
    dns: AttachedServer | None = None
    file: AbsoluteFile | None = None

    @property
    def known(self) -> tuple[AttachedServer, ...]:
        """Servers that the fleet file itself describes."""
        return self.list or (() if self.dns is None else (self.dns,))

    @model_validator(mode="before")
    @classmethod
    def _list_to_mapping(cls, value: object) -> object:
        given = {"list": value} if isinstance(value, list | tuple) else value
        if isinstance(given, dict) and isinstance(given.get("list"), list):
            return {**given, "list": tuple(given["list"])}
        return given

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        sources = (self.list, self.dns, self.file)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("needs one of `list`, `dns` and `file`")
        if self.list is not None:
            refuse_repeated(self.list)
        return self


def refuse_repeated(servers: tuple[AttachedServer, ...]) -> None:
    """Raise ``ValueError`` if two servers have the same URL, in whatever spelling."""
    places = set()
    for server in servers:
        parts = urlsplit(server.url)
        host = host_name(parts.hostname or "")
        place = (parts.scheme, host, parts.port or _PORTS[parts.scheme], parts.path)
        if place in places:
            raise ValueError(f"contains {server.url} twice")
        places.add(place)


SERVERS: TypeAdapter[tuple[AttachedServer, ...]] = TypeAdapter(Servers)
"""Reader of the servers in a file."""
