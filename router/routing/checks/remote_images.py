"""Images at URLs of hosts that the fleet file lists. No other URL is ever fetched."""

import asyncio
import ssl
from collections.abc import Collection

import httpx

from baton.types.errors import InvalidRequestError
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
        try:
            place = httpx.URL(url)
        except (httpx.InvalidURL, ValueError):
            place = httpx.URL("")
        usual = _PORTS.get(place.scheme)
        port = place.port or usual
        names = {f"{place.host}:{port}"} | ({place.host} if port == usual else set())
        if usual is None or place.userinfo or not self._hosts & names:
            raise InvalidRequestError.at(
                where,
                "the image is no `data:` URL with base64, and no URL of a host in the fleet file's "
                "`clients: {images: {hosts: …}}`",
            )
        async with self._limit.place(tenant):
            try:
                async with asyncio.timeout(_LIMIT_S):
                    return await _fetched(place)
            except (httpx.HTTPError, OSError, ValueError) as error:  # a timeout is an OSError
                why = str(error) or type(error).__name__
                raise InvalidRequestError.at(where, f"{place.host} sent no image: {why}") from None


async def _fetched(place: httpx.URL) -> bytes:
    context = await asyncio.to_thread(ssl.create_default_context)
    async with (
        httpx.AsyncClient(verify=context, timeout=_LIMIT_S, trust_env=False) as client,
        client.stream("GET", place, headers={"accept-encoding": "identity"}) as response,
    ):
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"status {response.status_code}")
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            if len(body) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
        return bytes(body)
