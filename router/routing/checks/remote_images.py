"""Images at URLs of hosts that the fleet file lists. No other URL is ever fetched."""

import asyncio
from collections.abc import Collection

import httpx

from baton.types.errors import InvalidRequestError
from baton.wire.web_file import fetched
from router.routing.checks.fair_limit import FairLimit

MAX_BYTES = 4 << 20
_LIMIT_S = 10.0
_PORTS = {"https": 443, "http": 80}
_PLACES = 4


class RemoteImages:
    """Fetches images from ``hosts``, each ``HOST`` or ``HOST:PORT``."""

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = frozenset(hosts)
        self._limit = FairLimit(_PLACES, "images")

    async def file(self, url: str, where: str, tenant: str) -> bytes:
        """Return the file at a URL, which stands at ``where`` in a body. Redirects are errors.

        Raises:
            InvalidRequestError: The host is not listed, or sends no file in time.
            UnavailableError: Too many images of the tenant wait.
        """
        host = ""
        try:
            place = httpx.URL(url)
            host = place.host  # raises for a host with wrong Punycode
        except (httpx.InvalidURL, ValueError):
            place = httpx.URL("")
        usual = _PORTS.get(place.scheme)
        port = place.port or usual
        names = {f"{host}:{port}"} | ({host} if port == usual else set())
        if usual is None or place.userinfo or not self._hosts & names:
            raise InvalidRequestError.at(
                where,
                "the image is no `data:` URL with base64, and no URL of a host in the fleet file's "
                "`clients: {images: {hosts: …}}`",
            )
        async with self._limit.place(tenant):
            try:
                async with asyncio.timeout(_LIMIT_S):
                    return await fetched(place, MAX_BYTES)
            except (httpx.HTTPError, OSError, ValueError) as error:  # a timeout is an OSError
                why = str(error) or type(error).__name__
                raise InvalidRequestError.at(where, f"{host} sent no image: {why}") from None
