"""Endpoints of usage: OpenAI's form for tools, and lines with costs for `baton usage`.

GET /v1/organization/usage/completions
GET /fleet/usage?start_time=S&end_time=S&by=tenant,key,model

Operators receive all tenants' usage, and others their own. Other routers' usage of the last second
may be missing.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import Request
from starlette.datastructures import QueryParams

from baton.registry.redis_store import RegistryUnavailableError
from baton.tenants.usage.bill import GROUPS, Prices, bill, worker_seconds
from baton.tenants.usage.ledger import HOUR_S, WORKERS, Counters, RowName, summed
from baton.tenants.usage.shared import KEPT_DAYS, HourUsage, SharedUsage
from baton.types.errors import InvalidRequestError, UnavailableError
from baton.types.lanes import lane_of
from router.frontend.api.endpoints import Endpoints
from router.process import Process

_DAY_S = 24 * HOUR_S
_WIDTHS = {"1h": (HOUR_S, 24, 168), "1d": (_DAY_S, 7, 31)}  # seconds, default and largest limit
_GROUPS = ("project_id", "api_key_id", "model", "batch")
_BATCH_KEY = "batch"


def routes(router: Process, shared: SharedUsage) -> Endpoints:
    """Return the endpoints of usage."""
    api = Endpoints()

    async def read(begin: int, end: int) -> list[HourUsage]:
        """Return the usage of hours, with that of this router until now."""
        oldest = int(time.time()) // HOUR_S - KEPT_DAYS * 24
        with suppress(RegistryUnavailableError):
            await router.usage.flush()
        try:
            return await shared.read(range(max(begin, oldest), end))
        except RegistryUnavailableError as error:
            raise UnavailableError(
                "the fleet's Redis, which has the usage, is unavailable; routers keep theirs; "
                "repeat the request when it answers"
            ) from error

    @api.get("/v1/organization/usage/completions")
    async def completions_usage(request: Request) -> dict[str, Any]:
        """Return usage in OpenAI's form: `project_id` is the tenant."""
        access = router.access.of(request.headers)
        query = _Query(request.query_params)
        hours = await read(query.begin_s // HOUR_S, query.end_s // HOUR_S)
        only = None if access.operator else access.tenant
        return query.page(hours, only)

    @api.get("/fleet/usage", include_in_schema=False)
    async def usage(request: Request) -> dict[str, Any]:
        """Return usage and costs by line."""
        access = router.access.of(request.headers)
        only = None if access.operator else access.tenant
        given = request.query_params
        by = [name for name in given.get("by", "tenant").split(",") if name]
        unknown = [name for name in by if name not in GROUPS]
        if unknown:
            raise InvalidRequestError.at(
                "by", f"{unknown[0][:40]!r} is none of {', '.join(GROUPS)}"
            )
        end_s = _seconds(given, "end_time", _open_end_s())
        begin_s = _seconds(given, "start_time", end_s - _DAY_S)
        hours = await read(begin_s // HOUR_S, -(-end_s // HOUR_S))
        price = router.lanes.first.settings.price_per_hour
        return {
            "start_time": begin_s // HOUR_S * HOUR_S,
            "end_time": -(-end_s // HOUR_S) * HOUR_S,
            "price_per_hour": price,
            "worker_seconds": worker_seconds(hours) if only is None else {},
            "lines": msgspec.to_builtins(bill(hours, by, price, only, _prices(router))),
        }

    return api


class _Query:
    """Parameters of OpenAI's call; times are whole buckets, and ``end_s`` is the page's."""

    def __init__(self, given: QueryParams) -> None:
        width = given.get("bucket_width", "1d")
        if width not in _WIDTHS:
            raise InvalidRequestError.at(
                "bucket_width", f"must be 1h or 1d, since usage is kept by the hour (got {width!r})"
            )
        self.width_s, default, most = _WIDTHS[width]
        limit = _seconds(given, "limit", default)
        if not 1 <= limit <= most:
            raise InvalidRequestError.at("limit", f"must be from 1 to {most} (got {limit})")
        if "start_time" not in given:
            raise InvalidRequestError.at("start_time", "is required, in Unix seconds")
        last_s = _seconds(given, "end_time", _open_end_s())
        self.last_s = -(-last_s // self.width_s) * self.width_s
        begin_s = _seconds(given, "start_time", 0)
        if "page" in given:
            begin_s = _seconds(given, "page", 0)
        self.begin_s = begin_s // self.width_s * self.width_s
        if self.begin_s >= self.last_s:
            raise InvalidRequestError.at("end_time", "must be after start_time")
        self.end_s = min(self.last_s, self.begin_s + limit * self.width_s)
        self.groups = _listed(given, "group_by")
        for name in self.groups:
            if name not in _GROUPS:
                raise InvalidRequestError.at(
                    "group_by", f"{name[:40]!r} is none of {', '.join(_GROUPS)}"
                )
        if _listed(given, "user_ids"):
            raise InvalidRequestError.at("user_ids", "usage is not kept by user")
        filters = {"tenant": "project_ids", "key": "api_key_ids", "model": "models"}
        only = {field: set(_listed(given, name)) for field, name in filters.items()}
        self.only = {field: names for field, names in only.items() if names}
        self.is_batch = given["batch"] == "true" if "batch" in given else None

    def page(self, hours: Sequence[HourUsage], tenant: str | None) -> dict[str, Any]:
        rows = [row for hour in hours for row in hour.rows.items() if self._has(row[0], tenant)]
        sums = summed(rows, self._named)
        results: dict[int, list[dict[str, Any]]] = {}
        for name in sorted(sums):
            results.setdefault(name.hour, []).append(self._result(name, sums[name]))
        more = self.end_s < self.last_s
        return {
            "object": "page",
            "data": [
                {
                    "object": "bucket",
                    "start_time": at_s,
                    "end_time": at_s + self.width_s,
                    "results": results.get(at_s, []),
                }
                for at_s in range(self.begin_s, self.end_s, self.width_s)
            ],
            "has_more": more,
            "next_page": str(self.end_s) if more else None,
        }

    def _has(self, name: RowName, tenant: str | None) -> bool:
        if name.tenant == WORKERS or tenant not in (None, name.tenant):
            return False
        if self.is_batch is not None and self.is_batch != (name.key == _BATCH_KEY):
            return False
        return all(getattr(name, field) in names for field, names in self.only.items())

    def _named(self, name: RowName) -> RowName:
        """Return the name of the result that a row belongs to; ``hour`` is its bucket's start."""
        by_key = "api_key_id" in self.groups
        return RowName(
            name.hour * HOUR_S // self.width_s * self.width_s,
            name.tenant if "project_id" in self.groups else "",
            name.key if by_key or ("batch" in self.groups and name.key == _BATCH_KEY) else "",
            name.model if "model" in self.groups else "",
        )

    def _result(self, name: RowName, counters: Counters) -> dict[str, Any]:
        groups = self.groups
        return {
            "object": "organization.usage.completions.result",
            "input_tokens": counters.input_tokens,
            "output_tokens": counters.output_tokens,
            "input_cached_tokens": counters.cached_tokens,
            "input_audio_tokens": 0,
            "output_audio_tokens": 0,
            "num_model_requests": counters.requests,
            "project_id": name.tenant if "project_id" in groups else None,
            "user_id": None,
            "api_key_id": name.key if "api_key_id" in groups else None,
            "model": name.model if "model" in groups else None,
            "batch": name.key == _BATCH_KEY if "batch" in groups else None,
            "service_tier": None,
        }


def _listed(given: QueryParams, name: str) -> list[str]:
    """Return the values of a list, as OpenAI's clients spell it or with one name."""
    return [*given.getlist(name), *given.getlist(f"{name}[]")]


def _prices(router: Process) -> Prices:
    """Return the prices of all lanes; none in a fleet with one model."""
    if len(router.lanes) == 1:
        return Prices()
    return Prices(
        lanes={lane_of(lane.settings.fleet): lane.settings.price_per_hour for lane in router.lanes},
        models={
            name: lane.settings.price_per_hour
            for lane in router.lanes
            for name in lane.model.served_names()
        },
    )


def _open_end_s() -> int:
    """Return the end of the current second, so that a full hour begins its own bucket."""
    return int(time.time()) + 1


def _seconds(given: QueryParams, name: str, default: int) -> int:
    raw = given.get(name)
    if raw is None:
        return default
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 11):
        raise InvalidRequestError.at(name, f"must be a number, at least 0 (got {raw[:40]!r})")
    return int(raw)
