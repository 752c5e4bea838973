"""Endpoints for operators: health, metrics, workers, request reports.

If the fleet has API keys, health and version need no key. Metrics, load and scrape targets need a
key with the role ``metrics`` or ``operator``, workers an operator's key. Request reports are
available to their tenant and to operators.

``/health``, ``/ping``, ``/version`` and ``/load`` are compatible with vLLM.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from time import monotonic, monotonic_ns, time_ns
from typing import Annotated, Any

import msgspec
from fastapi import HTTPException, Query, Request, Response

from baton.telemetry import openmetrics
from baton.telemetry.version import version
from baton.types.errors import UnavailableError
from baton.types.geometry import BLOCK_TOKENS
from router.frontend.api.endpoints import Endpoints
from router.frontend.off_loop import Shared
from router.frontend.operators.tenant_gauges import TenantGauges
from router.lane import Lane
from router.process import Process
from router.routing.reports.request_reports import Order, latest
from router.routing.reports.worker_cells import COLUMNS, rates

_ROLES = ("prefill", "decode")
_WORKER_STATES = ("starting", "ready", "draining", "dead", "parked")


def routes(router: Process) -> Endpoints:
    """Return ``/health*``, ``/ping``, ``/version``, ``/load``, ``/metrics`` and ``/fleet*``."""
    api = Endpoints()
    tenant_gauges = TenantGauges()

    def refresh() -> None:
        _set_gauges(router)
        tenant_gauges.update(router.metrics, router.quotas.quotas, router.access)

    router.refresh_gauges = refresh
    _add_health(api, router)
    _add_fleet(api, router)
    _add_requests(api, router)
    return api


def _add_health(api: Endpoints, router: Process) -> None:
    own_version = version()

    @api.head("/health", include_in_schema=False)
    @api.get("/health")
    async def health() -> Response:
        """Check that a worker is ready, without a request. ``/health/ready`` sends requests."""
        return _healthy(router)

    @api.head("/ping", include_in_schema=False)
    @api.get("/ping")
    @api.post("/ping")
    async def ping() -> Response:
        """Check that a worker is ready, for SageMaker."""
        return _healthy(router)

    @api.get("/version")
    async def version_() -> dict[str, str]:
        """Return the version of Baton without its commit: the endpoint needs no key."""
        return {"version": own_version.partition("+")[0]}

    @api.get("/load")
    async def load(request: Request) -> dict[str, int]:
        """Count the running and waiting requests of this router."""
        router.access.check_scrape(request.headers)
        return {"server_load": router.lanes.in_flight}

    @api.head("/health/live", include_in_schema=False)
    @api.get("/health/live")
    async def live() -> dict[str, str]:
        """Check that this process responds."""
        return {"status": "live"}

    @api.head("/health/ready", include_in_schema=False)
    @api.get("/health/ready")
    async def ready(request: Request, response: Response) -> dict[str, Any]:
        """Check that each pair of workers recently served a short request."""
        first = router.access.is_operator(request.headers)
        result = _together(
            await asyncio.gather(*(lane.prober.check(first=first) for lane in _loaded(router)))
        )
        response.status_code = 200 if result["status"] == "ready" else 503
        return result


def _add_fleet(api: Endpoints, router: Process) -> None:
    own_version = version()
    pages: dict[bool, Shared[bytes]] = {True: Shared(), False: Shared()}

    @api.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return metrics in Prometheus' text format, or OpenMetrics if ``Accept`` names it."""
        router.access.check_scrape(request.headers)
        modern = openmetrics.is_wanted(request.headers.get("accept", ""))

        async def render() -> bytes:
            router.refresh_gauges()
            return await asyncio.to_thread(router.metrics.render, in_openmetrics=modern)

        page = await pages[modern].get(render)
        kind = openmetrics.CONTENT_TYPE if modern else router.metrics.content_type
        return Response(page, media_type=kind)

    @api.get("/fleet")
    async def fleet(request: Request) -> dict[str, Any]:
        """List the workers as reported ``age_s`` seconds ago (2 s, rarely 5 s)."""
        router.access.check_operator(request.headers)
        return router.lanes.describe()

    @api.get("/fleet/cells", include_in_schema=False)
    async def cells(request: Request) -> Response:
        """List the workers in short rows, for the live page."""
        router.access.check_operator(request.headers)
        return _json(
            {
                "fleet": router.settings.fleet,
                "version": own_version,
                "emulated": router.lanes.first.settings.emulated or None,
                "transfers": router.lanes.transfers(),
                "columns": COLUMNS,
                "workers": [row for lane in router.lanes for row in lane.worker_cells.rows()],
            }
        )

    @api.get("/fleet/targets")
    async def targets(request: Request) -> list[dict[str, Any]]:
        """List scrape targets for Prometheus' HTTP service discovery."""
        router.access.check_scrape(request.headers)
        return _targets(router, request.url.netloc)

    @api.get("/fleet/series")
    async def series(request: Request, after: int = 0, workers: bool = True) -> Response:
        """Return samples of the last 600 seconds whose number is greater than ``after``.

        ``workers`` adds the measured rates of each worker.
        """
        router.access.check_operator(request.headers)
        samples = router.observer.series
        return _json(
            {
                "last": samples.last,
                "samples": [sample.as_dict() for sample in samples.after(after)],
                "workers": rates(router.lanes.slots) if workers else {},
            }
        )


def _add_requests(api: Endpoints, router: Process) -> None:
    @api.get("/server_info", include_in_schema=False)
    async def server_info(request: Request, config_format: str = "text") -> dict[str, Any]:
        """Return the main settings of the first model as vLLM does, and of each by its name."""
        router.access.check_operator(request.headers)
        models = {
            lane.model.names[0]: {
                "model_config": {"max_model_len": lane.model.max_context_tokens},
                "scheduler_config": {"max_num_seqs": lane.settings.window_requests},
                "cache_config": {"block_size": BLOCK_TOKENS},
            }
            for lane in router.lanes
        }
        own = models[router.lanes.first.model.names[0]]
        shown = own if config_format == "json" else str(own)
        system = {"baton": version()}
        return {"vllm_config": shown, "vllm_env": {}, "system_env": system, "models": models}

    @api.get("/fleet/requests")
    async def requests(
        request: Request, limit: Annotated[int, Query(ge=1, le=500)] = 50, order: Order = "newest"
    ) -> dict[str, Any]:
        """List the latest requests: all of them for operators, otherwise the tenant's own.

        Ages refer to ``at_s``, seconds since the host's start.
        """
        access = router.access.of(request.headers)
        tenant = None if access.operator else access.tenant
        kept = router.lanes.newest_first()
        now_ns = monotonic_ns()
        others = (router.refused.newest_first(tenant), router.past_reports.newest_first(tenant))
        lines = latest(kept, others, now_ns, tenant=tenant, limit=limit, order=order)
        return {"at_s": round(now_ns / 1e9, 6), "requests": lines}

    @api.get("/fleet/requests/{request_id}")
    async def explain(request: Request, request_id: str) -> dict[str, Any]:
        """Return the request report, by Baton's request id or the client's own."""
        access = router.access.of(request.headers)
        tenant = None if access.operator else access.tenant
        explanation = router.lanes.report(request_id, tenant)
        if explanation is None:
            others = (router.refused, router.past_reports)
            found = (reports.get(request_id, tenant) for reports in others)
            if (past := next(filter(None, found), None)) is not None:
                return past
        # Requests of other tenants are reported as unknown.
        if explanation is None or not (access.operator or _owner(explanation) == access.tenant):
            raise HTTPException(404, "the request is unknown to this router, or no longer recorded")
        kept = router.lanes.find(explanation["id"]) if explanation.get("prompt_change") else None
        if kept is not None:
            explanation["prompt_change"] |= await router.request_log.change_texts(kept[1])
        return explanation


def _json(content: dict[str, Any]) -> Response:
    """Return a large answer, which FastAPI would check field by field."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def _healthy(router: Process) -> Response:
    ready = any(
        lane.gateway.workers.usable or lane.gateway.starts_from_zero for lane in router.lanes
    )
    if not ready:
        raise UnavailableError("no worker is ready")
    return Response()


def _loaded(router: Process) -> list[Lane]:
    """Return the lanes that should have workers; all if none should."""
    loaded = [lane for lane in router.lanes if lane.is_loaded]
    return loaded or list(router.lanes)


def _together(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the readiness of all lanes; the fleet is ready if each of them is."""
    if len(results) == 1:
        return results[0]
    return {
        "status": "ready" if all(r["status"] == "ready" for r in results) else "not ready",
        "pairs": [pair for result in results for pair in result["pairs"]],
        "starting": [name for result in results for name in result["starting"]],
        "age_s": max(result["age_s"] for result in results),
    }


def _owner(explanation: dict[str, Any]) -> object:
    """Return the tenant of a request, or of a call with several requests."""
    return explanation["parts"][0]["tenant"] if "parts" in explanation else explanation["tenant"]


def _set_gauges(router: Process) -> None:
    """Set the gauges that are computed only when metrics are read."""
    _set_key_gauges(router)
    slots = router.lanes.slots
    counts = Counter((str(slot.role), slot.state) for slot in slots)
    for role in _ROLES:
        for state in _WORKER_STATES:
            router.metrics.set("baton_workers", counts[role, state], role=role, state=state)
        wanted = sum(slot.is_wanted for slot in slots if slot.role == role)
        router.metrics.set("baton_workers_wanted", wanted, role=role)
    turns = max(lane.gateway.workers.last_turn() for lane in router.lanes)
    router.metrics.set("baton_role_turns", turns)
    for lane in router.lanes:
        _set_load(lane)
        _set_adapter_info(lane)
    hashes = sum(lane.prefix_index.total_hashes for lane in router.lanes)
    router.metrics.set("baton_prefix_index_hashes", hashes)
    adapters = sum(len(lane.model.adapters.served()) for lane in router.lanes)
    router.metrics.set("baton_adapters_served", adapters)


def _set_load(lane: Lane) -> None:
    links = [slot.link for slot in lane.gateway.workers.usable if slot.link is not None]
    statuses = [link.status for link in links if link.status is not None]
    waiting = lane.gateway.admission.waiting + sum(status.waiting for status in statuses)
    total = sum(status.kv_blocks.total for status in statuses)
    leased = sum(status.kv_blocks.leased for status in statuses)
    metrics = lane.metrics
    metrics.set("baton_fleet_running_requests", sum(status.running for status in statuses))
    metrics.set("baton_fleet_waiting_requests", waiting)
    metrics.set("baton_fleet_kv_usage_ratio", leased / max(total, 1))
    metrics.set_cache_info(total, BLOCK_TOKENS)


def _set_adapter_info(lane: Lane) -> None:
    """Name the adapters of the lane's requests."""
    by_state: tuple[set[str], set[str]] = (set(), set())
    for active in lane.gateway.active.values():
        if active.request.adapter is not None:
            by_state[active.decode_id is not None].add(active.request.adapter.name)
    waiting, running = by_state
    lane.metrics.set_adapter_info(lane.settings.max_adapters, running, waiting)


def _set_key_gauges(router: Process) -> None:
    table = router.access.issued_keys
    for state, count in table.counts(time_ns() // 1_000_000).items():
        router.metrics.set("baton_keys", count, state=state)
    if table.compared_s is not None:
        router.metrics.set("baton_keys_age_seconds", monotonic() - table.compared_s)


def _targets(router: Process, own_address: str) -> list[dict[str, Any]]:
    def target(address: str, component: str, tls: object, **more: str) -> dict[str, Any]:
        scheme = {"__scheme__": "https"} if tls is not None else {}
        labels = {"component": component, "fleet": router.settings.fleet, **more, **scheme}
        return {"targets": [address], "labels": labels}

    return [
        target(own_address, "router", router.settings.https),
        *(
            target(address, "worker", router.core.tls, worker=slot.worker_id, role=slot.role)
            for slot in router.lanes.slots
            if (address := slot.record.metrics_address) and slot.state not in ("dead", "parked")
        ),
    ]
