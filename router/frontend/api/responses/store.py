"""Stored responses: the Responses API's use of `baton.registry.stored_responses`.

If Redis is unavailable, a response is still returned, with ``store: false`` and the reason in
``not_stored``. Requests that refer to an earlier response are rejected with 503.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.stored_responses import StoredResponses
from baton.telemetry.metrics import Metrics
from baton.types.errors import (
    InvalidRequestError,
    PreviousResponseError,
    ResponseNotFoundError,
    UnavailableError,
)
from router.frontend.api.responses.body import ResponsesItem
from router.frontend.api.responses.format import place_of
from router.frontend.off_loop import off_loop
from router.tenants.policies import TenantPolicies

MAX_RESPONSES = 1024
_CALL_LIMIT_S = 1.0
_PAUSE_S = 5.0  # after a failure, responses do not wait for Redis
_AWAY = "Redis does not answer"


class ResponseStore:
    """Access of one router to stored responses, of up to ``max_bytes`` including the input.

    All methods except ``keep`` raise UnavailableError if Redis does not answer.
    """

    def __init__(
        self,
        stored: StoredResponses | None,
        max_bytes: int,
        metrics: Metrics,
        policies: TenantPolicies,
    ) -> None:
        self._stored = stored
        self._policies = policies
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._away_until_s = 0.0

    async def keep(self, tenant: str, response: dict[str, Any], given: list[dict[str, Any]]) -> str:
        """Store a response with its input. Return "" or the reason why it is not stored."""
        result, reason = await self._kept(tenant, response, given)
        self._metrics.inc("baton_stored_responses", result=result)
        return reason

    async def _kept(
        self, tenant: str, response: dict[str, Any], given: list[dict[str, Any]]
    ) -> tuple[str, str]:
        keep_s = self._policies.of(tenant).keep_s
        if keep_s == 0:
            return "not_kept", "the policy of this tenant stores nothing (keep_s: 0)"
        value = msgspec.json.encode({"response": response, "input": given})  # format of `Kept`
        if len(value) > self._max_bytes:
            return (
                "too_large",
                f"the response has {len(value)} bytes; the limit is {self._max_bytes}",
            )
        loop = asyncio.get_running_loop()
        if self._stored is None or loop.time() < self._away_until_s:
            return "failed", _AWAY
        try:
            async with asyncio.timeout(_CALL_LIMIT_S):
                await self._stored.put(tenant, response["id"], value, keep_s)
        except (RegistryUnavailableError, TimeoutError):
            self._away_until_s = loop.time() + _PAUSE_S
            return "failed", _AWAY
        return "stored", ""

    async def find(self, tenant: str, name: str) -> bytes | None:
        """Return a response of this tenant in stored form (``response`` and ``input`` as JSON)."""
        async with self._available("read") as stored:
            return await stored.get(tenant, name, self._policies.of(tenant).keep_s)

    async def get(self, tenant: str, name: str) -> "Kept":
        """Return a response of this tenant; raise ResponseNotFoundError if there is none."""
        value = await self.find(tenant, name)
        kept = None if value is None else _read(value)
        if kept is None:
            raise _not_found(name)
        return kept

    async def delete(self, tenant: str, name: str) -> None:
        """Delete a response of this tenant; raise ResponseNotFoundError if there is none."""
        async with self._available("deleted") as stored:
            deleted = await stored.delete(tenant, name)
        if not deleted:
            raise _not_found(name)

    @asynccontextmanager
    async def _available(self, action: str) -> AsyncIterator[StoredResponses]:
        try:
            if self._stored is None:
                raise RegistryUnavailableError
            async with asyncio.timeout(_CALL_LIMIT_S):
                yield self._stored
        except (RegistryUnavailableError, TimeoutError) as away:
            raise UnavailableError(f"stored responses cannot be {action}: {_AWAY}") from away


class Kept(msgspec.Struct, frozen=True):
    """A response and its input items."""

    response: dict[str, Any]
    input: list[dict[str, Any]]


def _read(value: bytes) -> Kept | None:
    """Decode a stored response; None if it is in an unknown format of another version."""
    try:
        return msgspec.json.decode(value, type=Kept)
    except msgspec.DecodeError:
        return None


@dataclass(frozen=True, slots=True)
class _Turn:
    """Input and output of a response, and the id of the one before it."""

    given: list[ResponsesItem]
    output: list[ResponsesItem]
    previous: str | None

    @classmethod
    def of(cls, value: bytes) -> "_Turn | None":
        """Decode a stored response; None if it is in an unknown format of another version."""
        kept = _read(value)
        if kept is None:
            return None
        try:
            return cls(
                [ResponsesItem.model_validate(item) for item in kept.input],
                [ResponsesItem.model_validate(item) for item in kept.response["output"]],
                kept.response["previous_response_id"],
            )
        except (ValueError, LookupError, TypeError):
            return None


class EarlierResponses:
    """Reader of the earlier responses that one request refers to, up to ``max_bytes`` in total."""

    def __init__(self, store: ResponseStore, tenant: str, max_bytes: int) -> None:
        self._store = store
        self._tenant = tenant
        self._max_bytes = max_bytes
        self.bytes_read = 0
        self._found: dict[str, _Turn | None] = {}

    async def conversation(self, name: str | None) -> list[ResponsesItem]:
        """Return all items of the response ``name`` and of its predecessors, oldest first.

        Raises:
            PreviousResponseError: A response is not stored or no longer stored.
            InvalidRequestError: The responses are too many or too large.
            UnavailableError: Redis does not answer.
        """
        turns: list[_Turn] = []
        param = "previous_response_id"
        at = name
        while at is not None:
            turn = await self._find(at, param)
            if turn is None:
                raise PreviousResponseError.at(
                    param, f"response {at[:80]!r} is not stored, or no longer stored"
                )
            turns.append(turn)
            at = turn.previous
        return [item for turn in reversed(turns) for item in (*turn.given, *turn.output)]

    async def resolve(self, items: list[ResponsesItem]) -> list[ResponsesItem]:
        """Return the items, with references replaced by the items that they refer to.

        Raises:
            InvalidRequestError: A referenced item is not stored, or they are too many.
            UnavailableError: Redis does not answer.
        """
        resolved = []
        for index, item in enumerate(items):
            if item.type == "item_reference":
                resolved.append(await self._referenced(item.id or "", f"input[{index}].id"))
            else:
                resolved.append(item)
        return resolved

    async def _referenced(self, name: str, param: str) -> ResponsesItem:
        place = place_of(name)
        turn = await self._find(place.response_id, param) if place is not None else None
        if place is not None and turn is not None:
            items = turn.given if place.given else turn.output
            if place.position < len(items) and items[place.position].id == name:
                return items[place.position]
        raise InvalidRequestError.at(
            param, f"item {name[:80]!r} is not stored, or no longer stored; send the item itself"
        )

    async def _find(self, name: str, param: str) -> _Turn | None:
        if name not in self._found:
            value = await self._store.find(self._tenant, name)
            self.bytes_read += len(value or b"")
            if self.bytes_read > self._max_bytes or len(self._found) >= MAX_RESPONSES:
                raise InvalidRequestError.at(
                    param,
                    f"the earlier responses have more than {self._max_bytes} bytes, or "
                    f"there are more than {MAX_RESPONSES}; start a new conversation with the items "
                    "that matter",
                )
            turn = None
            if value is not None:  # decoding a megabyte of small items takes 0.1 s
                turn = await off_loop(len(value), partial(_Turn.of, value))
            self._found[name] = turn
        return self._found[name]


def _not_found(name: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(
        f"response {name[:80]!r} is not stored, or no longer stored", param="response_id"
    )
