"""Files at URLs, bounded in bytes."""

import asyncio
import ssl

import httpx

_PAUSE_S = 10.0  # longest wait for the next bytes


async def fetched(place: httpx.URL | str, most_bytes: int, *, by_proxy: bool = False) -> bytes:
    """Return the file at a URL, without redirects; ``by_proxy``: of the environment, if any.

    The CAs are the system's, or those of SSL_CERT_FILE.

    Raises:
        httpx.HTTPError, OSError, ValueError: There is none, or a larger one.
    """
    context = await asyncio.to_thread(ssl.create_default_context)
    async with (
        httpx.AsyncClient(verify=context, timeout=_PAUSE_S, trust_env=by_proxy) as client,
        client.stream("GET", place, headers={"accept-encoding": "identity"}) as response,
    ):
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"status {response.status_code}")
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            if len(body) > most_bytes:
                raise ValueError(f"more than {most_bytes} bytes")
        return bytes(body)
