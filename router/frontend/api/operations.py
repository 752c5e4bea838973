"""For operators: health, metrics, the workers, and why a request went where it went.

Where the fleet has API keys, health and version are open to all; metrics, load and workers are for
operators; what is told of a request is for its tenant and for operators.

``/health``, ``/ping``, ``/version`` and ``/load`` are what vLLM has, for tools that look for them.
"""

import importlib.metadata
from collections import Counter
from time import monotonic_ns
from typing import Annotated, Any

from fastapi import HTTPException, Query, Request, Response

from baton.types.errors import UnavailableError
from router.frontend.access import access_of, check_operator, is_operator
from router.frontend.api.parts import Endpoints, RouterParts
from router.routing.watch.rates import rates
from router.routing.watch.request_reports import Order, latest, report_of

_ROLES = ("prefill", "decode")
_WORKER_STATES = ("starting", "ready", "draining", "dead")


def routes(router: RouterParts) -> Endpoints:
    """``/health*``, ``/ping``, ``/version``, ``/load``, ``/metrics`` and ``/fleet*``."""
    api = Endpoints()
    version = importlib.metadata.version("baton-serve")

    @api.head("/health", include_in_schema=False)
    @api.get("/health")
    async def health() -> Response:
        """A worker is there to answer. Costs nothing; ``/health/ready`` tries it."""
        return _healthy(router)

    @api.head("/ping", include_in_schema=False)
    @api.get("/ping")
    @api.post("/ping")
    async def ping() -> Response:
        """The same, as SageMaker asks."""
        return _healthy(router)

    @api.get("/version")
    async def version_() -> dict[str, str]:
        """Baton's version."""
        return {"version": version}

    @api.get("/load")
    async def load(request: Request) -> dict[str, int]:
        """Requests of this router that are not over, those that wait included."""
        check_operator(request.headers, router.settings)
        return {"server_load": router.gateway.in_flight}

    @api.head("/health/live", include_in_schema=False)
    @api.get("/health/live")
    async def live() -> dict[str, str]:
        """This process answers."""
        return {"status": "live"}

    @api.head("/health/ready", include_in_schema=False)
    @api.get("/health/ready")
    async def ready(request: Request, response: Response) -> dict[str, Any]:
        """A real short request went through every live pair of workers, not long ago."""
        first = is_operator(request.headers, router.settings)
        result = await router.prober.check(first=first)
        response.status_code = 200 if result["status"] == "ready" else 503
        return result

    @api.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus' text format."""
        check_operator(request.headers, router.settings)
        _set_gauges(router)
        return Response(router.metrics.render(), media_type=router.metrics.content_type)

    @api.get("/fleet")
    async def fleet(request: Request) -> dict[str, Any]:
        """The workers as last reported; that was known to hold ``age_s`` ago: 2, rarely 5 s."""
        check_operator(request.headers, router.settings)
        return router.gateway.workers.describe()

    @api.get("/fleet/targets")
    async def targets(request: Request) -> list[dict[str, Any]]:
        """Prometheus' HTTP service discovery."""
        check_operator(request.headers, router.settings)
        return _targets(router, request.url.netloc)

    @api.get("/fleet/series")
    async def series(request: Request, after: int = 0) -> dict[str, Any]:
        """One sample for each of the last 600 seconds, those after number ``after``."""
        check_operator(request.headers, router.settings)
        samples = router.observer.series
        return {
            "last": samples.last,
            "samples": [sample.as_dict() for sample in samples.after(after)],
            "workers": rates(router.gateway.workers),
        }

    @api.get("/fleet/requests")
    async def requests(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
        order: Order = "newest",
    ) -> dict[str, Any]:
        """The latest requests: all of them to an operator, to a tenant its own.

        Their ages are as of ``at_s``, seconds since the host's start.
        """
        access = access_of(request.headers, router.settings)
        tenant = None if access.operator else access.tenant
        kept = router.gateway.kept.newest_first()
        now_ns = monotonic_ns()
        found = latest(kept, now_ns, tenant=tenant, limit=limit, order=order)
        return {"at_s": round(now_ns / 1e9, 6), "requests": found}

    @api.get("/fleet/requests/{request_id}")
    async def explain(request: Request, request_id: str) -> dict[str, Any]:
        """What was decided for a request, and why; by our id, or by the client's own."""
        access = access_of(request.headers, router.settings)
        tenant = None if access.operator else access.tenant
        explanation = report_of(router.gateway.kept, request_id, tenant)
        # A request of another tenant is not known to this one.
        if explanation is None or not (access.operator or _owner(explanation) == access.tenant):
            raise HTTPException(404, "this router does not know the request (any more)")
        return explanation

    return api


def _healthy(router: RouterParts) -> Response:
    if not router.gateway.workers.usable:
        raise UnavailableError("no worker is ready")
    return Response()


def _owner(explanation: dict[str, Any]) -> object:
    """The tenant of a request, or of the call whose parts are listed."""
    return explanation["parts"][0]["tenant"] if "parts" in explanation else explanation["tenant"]


def _set_gauges(router: RouterParts) -> None:
    """Set what is only counted when the page is asked for."""
    counts = Counter((slot.role, slot.state) for slot in router.gateway.workers)
    for role in _ROLES:
        for state in _WORKER_STATES:
            router.metrics.set("baton_workers", counts[role, state], role=role, state=state)
    running = 0
    waiting = router.gateway.admission.waiting
    total_blocks = leased_blocks = 0
    for slot in router.gateway.workers.usable:
        if slot.link is not None and slot.link.status is not None:
            status = slot.link.status
            running = running + status.running
            waiting = waiting + status.waiting
            total_blocks += status.kv_blocks.total
            leased_blocks += status.kv_blocks.leased
    router.metrics.set("baton_fleet_running_requests", running)
    router.metrics.set("baton_fleet_waiting_requests", waiting)
    router.metrics.set("baton_fleet_kv_usage_ratio", leased_blocks / max(total_blocks, 1))
    router.metrics.set("baton_mirror_names", router.prefix_index.total_hashes)
    router.metrics.set("baton_adapters_served", len(router.model.adapters.served()))


def _targets(router: RouterParts, own_address: str) -> list[dict[str, Any]]:
    fleet = router.settings.fleet
    settings = router.settings
    scheme = {"__scheme__": "https"} if settings.https is not None else {}
    own = {"targets": [own_address], "labels": {"component": "router", "fleet": fleet, **scheme}}
    scheme = {"__scheme__": "https"} if settings.tls is not None else {}
    workers = [
        {
            "targets": [slot.record.metrics_address],
            "labels": {
                "component": "worker",
                "fleet": fleet,
                "worker": slot.worker_id,
                "role": slot.role,
                **scheme,
            },
        }
        for slot in router.gateway.workers
        if slot.record.metrics_address and slot.state != "dead"
    ]
    return [own, *workers]
