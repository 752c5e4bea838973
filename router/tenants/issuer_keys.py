"""Reads the keys of a token issuer in the background: never for one request."""

import asyncio
import json
import time
from typing import Any

from baton.config.identity import OidcConfig, require_tls
from baton.wire.web_file import fetched
from router.tenants.token_check import TokenCheck

UNKNOWN_PAUSE_S = 60.0
"""Least time between two reads, however many tokens name keys that are unknown."""
_LIMIT_S = 10.0
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
    async with asyncio.timeout(_LIMIT_S):
        url = config.jwks_url
        if url is None:
            place = f"{config.issuer.rstrip('/')}/.well-known/openid-configuration"
            document = json.loads(await fetched(place, _MAX_BYTES, by_proxy=True))
            if document["issuer"] != config.issuer:
                raise ValueError(f"{place} is not of the issuer {config.issuer}")
            url = require_tls(document["jwks_uri"])
        return json.loads(await fetched(url, _MAX_BYTES, by_proxy=True))
