"""Responses that stay for later turns: `registry.stored_responses`, as this API uses it.

Redis may be away: then a response is answered all the same, with ``store: false`` and the reason
in ``not_stored``. What needs an earlier one is refused with 503: it cannot be answered without.
"""

import asyncio
from typing import Any

import orjson

from engine.core.errors import (
    InvalidRequestError,
    PreviousResponseError,
    ResponseNotFoundError,
    UnavailableError,
)
from registry.redis_store import RegistryUnavailableError
from registry.stored_responses import StoredResponses
from router.api.responses.body import Item
from router.api.responses.format import place_of
from telemetry.metrics import Metrics

MAX_TURNS = 1024
_CALL_LIMIT_S = 1.0
_PAUSE_S = 5.0  # after a failure no answer waits for Redis
_AWAY = "Redis does not answer"


class ResponseStore:
    """What one router keeps and finds.

    Args:
        stored: Where; None keeps nothing.
        max_bytes: Of one response, with its input.
        metrics: Count what is kept and what is not.
    """

    def __init__(self, stored: StoredResponses | None, max_bytes: int, metrics: Metrics) -> None:
        self._stored = stored
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._away_until_s = 0.0

    async def keep(self, tenant: str, response: dict[str, Any], given: list[dict[str, Any]]) -> str:
        """Keep a response with what was given for it. Returns "" or why it is not kept."""
        result, reason = await self._kept(tenant, response, given)
        self._metrics.inc("baton_stored_responses", result=result)
        return reason

    async def _kept(
        self, tenant: str, response: dict[str, Any], given: list[dict[str, Any]]
    ) -> tuple[str, str]:
        value = orjson.dumps({"response": response, "input": given})
        if len(value) > self._max_bytes:
            return "too_large", f"it has {len(value)} bytes, more than {self._max_bytes}"
        loop = asyncio.get_running_loop()
        if self._stored is None or loop.time() < self._away_until_s:
            return "failed", _AWAY
        try:
            async with asyncio.timeout(_CALL_LIMIT_S):
                await self._stored.put(tenant, response["id"], value)
        except (RegistryUnavailableError, TimeoutError):
            self._away_until_s = loop.time() + _PAUSE_S
            return "failed", _AWAY
        return "stored", ""

    async def find(self, tenant: str, name: str) -> dict[str, Any] | None:
        """A response of this tenant's as it was kept: ``response`` and ``input``.

        Raises:
            UnavailableError: Redis does not answer.
        """
        try:
            if self._stored is None:
                raise RegistryUnavailableError
            async with asyncio.timeout(_CALL_LIMIT_S):
                value = await self._stored.get(tenant, name)
        except (RegistryUnavailableError, TimeoutError) as away:
            raise UnavailableError(f"stored responses cannot be read: {_AWAY}") from away
        return None if value is None else orjson.loads(value)

    async def get(self, tenant: str, name: str) -> dict[str, Any]:
        """As `find`.

        Raises:
            ResponseNotFoundError: It is not there, or is another tenant's.
            UnavailableError: Redis does not answer.
        """
        kept = await self.find(tenant, name)
        if kept is None:
            raise not_found(name)
        return kept

    async def delete(self, tenant: str, name: str) -> None:
        """Take a response away.

        Raises:
            ResponseNotFoundError: It is not there, or is another tenant's.
            UnavailableError: Redis does not answer.
        """
        try:
            if self._stored is None:
                raise RegistryUnavailableError
            async with asyncio.timeout(_CALL_LIMIT_S):
                deleted = await self._stored.delete(tenant, name)
        except (RegistryUnavailableError, TimeoutError) as away:
            raise UnavailableError(f"stored responses cannot be deleted: {_AWAY}") from away
        if not deleted:
            raise not_found(name)

    async def conversation(self, tenant: str, name: str | None, max_bytes: int) -> list[Item]:
        """All items of a response and of those before it, the oldest first.

        Args:
            tenant: Whose.
            name: The last response; None: no items.
            max_bytes: Of all of them, as this is a prompt that no body was too large for.

        Raises:
            PreviousResponseError: One of them is not there (any more).
            InvalidRequestError: They are too many, or too large.
            UnavailableError: Redis does not answer.
        """
        turns: list[list[dict[str, Any]]] = []
        size, at = 0, name
        while at is not None:
            kept = await self.find(tenant, at)
            if kept is None:
                raise PreviousResponseError(
                    f"previous_response_id: the response {at[:80]!r} is not stored here (any more)",
                    param="previous_response_id",
                )
            items = [*kept["input"], *kept["response"]["output"]]
            size += len(orjson.dumps(items))
            turns.append(items)
            if size > max_bytes or len(turns) > MAX_TURNS:
                raise InvalidRequestError(
                    f"previous_response_id: the conversation has more than {max_bytes} bytes or "
                    f"{MAX_TURNS} responses; begin a new one with the items that matter",
                    param="previous_response_id",
                )
            at = kept["response"]["previous_response_id"]
        return [Item.model_validate(item) for turn in reversed(turns) for item in turn]

    async def resolve(self, tenant: str, items: list[Item]) -> list[Item]:
        """The items, with those in the place of references that these name.

        Raises:
            InvalidRequestError: A referenced item is not there (any more).
            UnavailableError: Redis does not answer.
        """
        found: dict[str, dict[str, Any] | None] = {}
        resolved = []
        for index, item in enumerate(items):
            if item.type != "item_reference":
                resolved.append(item)
                continue
            place = place_of(item.id or "")
            if place is not None and place[0] not in found:
                found[place[0]] = await self.find(tenant, place[0])
            kept = found.get(place[0]) if place is not None else None
            resolved.append(_referenced(item, place, kept, f"input[{index}].id"))
        return resolved


def _referenced(
    item: Item, place: tuple[str, str, int] | None, kept: dict[str, Any] | None, param: str
) -> Item:
    if place is not None and kept is not None:
        items = kept["input"] if place[1] == "in" else kept["response"]["output"]
        if place[2] < len(items) and items[place[2]]["id"] == item.id:
            return Item.model_validate(items[place[2]])
    raise InvalidRequestError(
        f"{param}: the item {(item.id or '')[:80]!r} is not stored here (any more); send the item "
        "itself",
        param=param,
    )


def not_found(name: str) -> ResponseNotFoundError:
    """There is no such response, for this tenant."""
    return ResponseNotFoundError(
        f"the response {name[:80]!r} is not stored here (any more)", param="response_id"
    )
