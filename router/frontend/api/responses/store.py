"""Responses that stay for later turns: `baton.registry.stored_responses`, as this API uses it.

Redis may be away: then a response is answered all the same, with ``store: false`` and the reason
in ``not_stored``. What needs an earlier one is refused with 503: it cannot be answered without.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.stored_responses import StoredResponses
from baton.telemetry.metrics import Metrics
from baton.types.errors import (
    InvalidRequestError,
    PreviousResponseError,
    ResponseNotFoundError,
    UnavailableError,
)
from router.frontend.api.prepare import off_loop
from router.frontend.api.responses.body import ResponsesItem
from router.frontend.api.responses.format import place_of

MAX_RESPONSES = 1024
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
        value = orjson.dumps({"response": response, "input": given})  # as `Kept`
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

    async def find(self, tenant: str, name: str) -> bytes | None:
        """A response of this tenant's as it was kept: ``response`` and ``input``, as JSON.

        Raises:
            UnavailableError: Redis does not answer.
        """
        with _told_if_away("read"):
            if self._stored is None:
                raise RegistryUnavailableError
            async with asyncio.timeout(_CALL_LIMIT_S):
                return await self._stored.get(tenant, name)

    async def get(self, tenant: str, name: str) -> "Kept":
        """As `find`, decoded.

        Raises:
            ResponseNotFoundError: It is not there, or is another tenant's.
            UnavailableError: Redis does not answer.
        """
        value = await self.find(tenant, name)
        kept = None if value is None else _read(value)
        if kept is None:
            raise _not_found(name)
        return kept

    async def delete(self, tenant: str, name: str) -> None:
        """Take a response away.

        Raises:
            ResponseNotFoundError: It is not there, or is another tenant's.
            UnavailableError: Redis does not answer.
        """
        with _told_if_away("deleted"):
            if self._stored is None:
                raise RegistryUnavailableError
            async with asyncio.timeout(_CALL_LIMIT_S):
                deleted = await self._stored.delete(tenant, name)
        if not deleted:
            raise _not_found(name)


class Kept(msgspec.Struct, frozen=True):
    """A response and what was given for it."""

    response: dict[str, Any]
    input: list[dict[str, Any]]


def _read(value: bytes) -> Kept | None:
    """What was kept; None if another version kept it, and this one cannot read it."""
    try:
        return msgspec.json.decode(value, type=Kept)
    except msgspec.DecodeError:
        return None


@dataclass(frozen=True, slots=True)
class _Turn:
    """A response as later ones see it: what it was given, its output, and the one before it."""

    given: list[ResponsesItem]
    output: list[ResponsesItem]
    previous: str | None

    @classmethod
    def of(cls, value: bytes) -> "_Turn | None":
        """Of what is kept; None if this version cannot read it."""
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


async def _turn_of(value: bytes) -> _Turn | None:
    """See `_Turn.of`: of a megabyte of small items it takes a tenth of a second."""
    return await off_loop(len(value), lambda: _Turn.of(value))


class EarlierResponses:
    """What one call reads of earlier responses; together no more than a body may have.

    Attributes:
        bytes_read: So far.

    Args:
        store: Where they are.
        tenant: Whose.
        max_bytes: Of all of them.
    """

    def __init__(self, store: ResponseStore, tenant: str, max_bytes: int) -> None:
        self._store = store
        self._tenant = tenant
        self._max_bytes = max_bytes
        self.bytes_read = 0
        self._found: dict[str, _Turn | None] = {}

    async def conversation(self, name: str | None) -> list[ResponsesItem]:
        """All items of a response and of those before it, the oldest first.

        Args:
            name: The last response; None: no items.

        Raises:
            PreviousResponseError: One of them is not there (any more).
            InvalidRequestError: They are too many, or too large.
            UnavailableError: Redis does not answer.
        """
        turns: list[_Turn] = []
        param = "previous_response_id"
        at = name
        while at is not None:
            turn = await self._find(at, param)
            if turn is None:
                raise PreviousResponseError(
                    f"{param}: the response {at[:80]!r} is not stored here (any more)", param=param
                )
            turns.append(turn)
            at = turn.previous
        return [item for turn in reversed(turns) for item in (*turn.given, *turn.output)]

    async def resolve(self, items: list[ResponsesItem]) -> list[ResponsesItem]:
        """The items, with those in the place of references that these name.

        Raises:
            InvalidRequestError: A referenced item is not there (any more), or they are too many.
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
        raise InvalidRequestError(
            f"{param}: the item {name[:80]!r} is not stored here (any more); send the item itself",
            param=param,
        )

    async def _find(self, name: str, param: str) -> _Turn | None:
        if name not in self._found:
            value = await self._store.find(self._tenant, name)
            self.bytes_read += len(value or b"")
            if self.bytes_read > self._max_bytes or len(self._found) >= MAX_RESPONSES:
                raise InvalidRequestError(
                    f"{param}: the earlier responses have more than {self._max_bytes} bytes, or "
                    f"are more than {MAX_RESPONSES}; begin anew with the items that matter",
                    param=param,
                )
            self._found[name] = await _turn_of(value) if value is not None else None
        return self._found[name]


@contextmanager
def _told_if_away(what: str) -> Iterator[None]:
    try:
        yield
    except (RegistryUnavailableError, TimeoutError) as away:
        raise UnavailableError(f"stored responses cannot be {what}: {_AWAY}") from away


def _not_found(name: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(
        f"the response {name[:80]!r} is not stored here (any more)", param="response_id"
    )
