"""Protection of routers without API keys, which trust every caller, from web pages.

A page in a browser near the router can send it requests; the browser names the page in ``Origin``
and ``Sec-Fetch-Site``. A page can also let its own DNS name lead to the router (DNS rebinding).
For the browser such a request is of one origin, and only ``Host`` shows the foreign name.

With API keys nothing is checked, because a page has no key.
"""

import re
from collections.abc import Mapping, Sequence
from socket import gethostname

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.config.clients import ANY_ORIGIN
from baton.config.network import address_of, is_loopback
from baton.types.errors import BatonError, ForeignPageError
from router.process import Process

PROBES = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
"""Paths of health probes, which are open to everyone."""

_ORIGIN = re.compile(r"[A-Za-z]+://(?P<netloc>[^/]*)")
_HOST = re.compile(
    r"(?P<name>\[[0-9a-fA-F:.]{1,64}\]|[A-Za-z0-9_.-]{0,254})(?::(?P<port>[0-9]{0,5}))?"
)
# Public DNS has neither these nor names without a dot, so no page can own such a name.
_LOCAL_ENDS = (".localhost", ".local", ".internal")
_FOREIGN = ("cross-site", "same-site")
_DEFAULT_PORTS = ("80", "443")
_SHOWN_CHARS = 80


class OwnNames:
    """Names by which callers may address a port, as no web page can have them."""

    def __init__(self, host: str, others: Sequence[str]) -> None:
        self._is_beyond_loopback = not is_loopback(host)
        names = {host, *others}
        if self._is_beyond_loopback:
            names.add(gethostname())
        self._names = {name.strip("[]").lower() for name in names}

    def __contains__(self, host: str) -> bool:
        """Return whether ``Host`` is such a name, or an address."""
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match["name"].strip("[]").lower().removesuffix(".")
        address = address_of(name)
        if address is not None:  # DNS plays no part
            is_here = address.is_loopback or address.is_unspecified
            return self._is_beyond_loopback or is_here or name in self._names
        return "." not in name or name.endswith(_LOCAL_ENDS) or name in self._names


class PageGuard:
    """ASGI middleware that refuses calls of foreign web pages."""

    def __init__(self, app: ASGIApp, router: Process) -> None:
        self._app = app
        self._access = router.access
        settings = router.settings
        self._origins = settings.clients.cors_origins
        self._names = OwnNames(settings.host, settings.clients.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one call of the application."""
        if scope["type"] == "http" and scope["path"] not in PROBES:
            headers = Headers(scope=scope)
            problem = self._problem(scope["method"], headers)
            if problem and not self._access.has_operator_key(headers):
                refuse = scope["app"].exception_handlers[BatonError]
                response = await refuse(Request(scope), ForeignPageError(problem))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, method: str, headers: Mapping[str, str]) -> str:
        """Return why a call may come from a foreign page, or ""."""
        host = headers.get("host", "")
        if host not in self._names:
            return (
                f"the Host header {host[:_SHOWN_CHARS]!r} is not a name of this router, which has "
                "no API keys; use its address, or add the name to `clients: {hosts: [NAME]}` in "
                "the fleet file"
            )
        if not self._is_foreign(method, headers):
            return ""
        page = headers.get("origin", "another site")[:_SHOWN_CHARS]
        return (
            f"a web page of {page!r} may not call this router, which has no API keys; add its "
            "origin to `clients: {cors_origins: [ORIGIN]}` in the fleet file"
        )

    def _is_foreign(self, method: str, headers: Mapping[str, str]) -> bool:
        origin = headers.get("origin")
        if ANY_ORIGIN in self._origins or origin in self._origins:
            return False
        site = headers.get("sec-fetch-site", "")
        if origin is None:  # such a page cannot read the response of a link
            is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
            return site in _FOREIGN and not is_link
        return site in _FOREIGN or not _is_same(origin, headers.get("host", ""), site)


def _is_same(origin: str, host: str, site: str) -> bool:
    """Return whether a page of ``origin`` is of this host.

    A proxy may leave out the port of ``Host``, so the browser's statement counts for ports.
    """
    page = _ORIGIN.fullmatch(origin)
    of_page = _HOST.fullmatch(page["netloc"]) if page is not None else None
    of_host = _HOST.fullmatch(host)
    if of_page is None or of_host is None or of_page["name"].lower() != of_host["name"].lower():
        return False
    ports = [match["port"] or "" for match in (of_page, of_host)]
    page_port, host_port = ("" if port in _DEFAULT_PORTS else port for port in ports)
    return page_port == host_port or site == "same-origin"
