"""Reads the keys of a token issuer in the background: never for one request."""

import asyncio
import json
import ssl
import time
from typing import Any

import httpx

from baton.config.identity import OidcConfig, require_tls
from router.tenants.token_check import TokenCheck

UNKNOWN_PAUSE_S = 60.0
"""Least time between two reads, however many tokens name keys that are unknown."""
_LIMIT_S = 5.0
_MAX_BYTES = 256 * 1024
_POLL_S = 0.5


async def follow_keys(config: OidcConfig, check: TokenCheck) -> None:
    """Read the issuer's keys now and then, and earlier if a token names another one.

    Raises:
        httpx.HTTPError, ValueError: The issuer did not answer, or not with keys. The owner starts
            this again, and the last keys stay in use.
    """
    while True:
        check.use_keys(await _read(config), time.time())
        read_s = time.monotonic()
        while (age_s := time.monotonic() - read_s) < config.refresh_s:
            if check.unknown_key and age_s >= UNKNOWN_PAUSE_S:
                break
            await asyncio.sleep(_POLL_S)


async def _read(config: OidcConfig) -> Any:
    # The system's CAs or those of SSL_CERT_FILE; redirects are not followed.
    context = await asyncio.to_thread(ssl.create_default_context)
    client = httpx.AsyncClient(verify=context, timeout=_LIMIT_S, trust_env=True)
    async with client, asyncio.timeout(2 * _LIMIT_S):
        url = config.jwks_url
        if url is None:
            place = f"{config.issuer.rstrip('/')}/.well-known/openid-configuration"
            document = await _json_at(client, place)
            if document["issuer"] != config.issuer:
                raise ValueError(f"{place} is not of the issuer {config.issuer}")
            url = require_tls(document["jwks_uri"])
        return await _json_at(client, url)


async def _json_at(client: httpx.AsyncClient, url: str) -> Any:
    async with client.stream("GET", url) as response:
        response.raise_for_status()
        body = b""
        async for part in response.aiter_bytes():
            body += part
            if len(body) > _MAX_BYTES:
                raise ValueError(f"{url} has more than {_MAX_BYTES} bytes")
    return json.loads(body)
