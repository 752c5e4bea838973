"""For operators: health, metrics, the workers, and why a request went where it went."""

from collections import Counter
from typing import Any

from fastapi import HTTPException, Request, Response

from router.api.parts import Endpoints, RouterParts
from router.api.prepare import tenant_of

_ROLES = ("prefill", "decode")
_WORKER_STATES = ("starting", "ready", "draining", "dead")


def routes(router: RouterParts) -> Endpoints:
    """``/health/*``, ``/metrics`` and ``/fleet*``."""
    api = Endpoints()

    @api.get("/health/live")
    async def live() -> dict[str, str]:
        """This process answers."""
        return {"status": "live"}

    @api.get("/health/ready")
    async def ready(response: Response) -> dict[str, Any]:
        """A real short request went through every live pair of workers."""
        result = await router.prober.check()
        response.status_code = 200 if result["status"] == "ready" else 503
        return result

    @api.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        _set_gauges(router)
        return Response(router.metrics.render(), media_type=router.metrics.content_type)

    @api.get("/fleet")
    async def fleet() -> dict[str, Any]:
        """The workers as they last reported, ``age_s`` ago: half a second at most."""
        return router.gateway.workers.describe()

    @api.get("/fleet/targets")
    async def targets(request: Request) -> list[dict[str, Any]]:
        """Prometheus' HTTP service discovery."""
        return _targets(router, request.url.netloc)

    @api.get("/fleet/requests/{request_id}")
    async def explain(request: Request, request_id: str) -> dict[str, Any]:
        """What was decided for a request, and why."""
        tenant_of(request.headers, router.settings)
        explanation = router.gateway.explain(request_id)
        if explanation is None:
            raise HTTPException(404, "this router does not know the request (any more)")
        return explanation

    return api


def _set_gauges(router: RouterParts) -> None:
    """Set what is only counted when the page is asked for."""
    counts = Counter((slot.role, slot.state) for slot in router.gateway.workers)
    for role in _ROLES:
        for state in _WORKER_STATES:
            router.metrics.set("baton_workers", counts[role, state], role=role, state=state)
    router.metrics.set("baton_mirror_names", router.prefix_index.total_hashes)
    router.metrics.set("baton_adapters_served", len(router.model.adapters.served()))


def _targets(router: RouterParts, own_address: str) -> list[dict[str, Any]]:
    fleet = router.settings.fleet
    own = {"targets": [own_address], "labels": {"component": "router", "fleet": fleet}}
    workers = [
        {
            "targets": [slot.record.metrics_address],
            "labels": {
                "component": "worker",
                "fleet": fleet,
                "worker": slot.worker_id,
                "role": slot.role,
            },
        }
        for slot in router.gateway.workers
        if slot.record.metrics_address and slot.state != "dead"
    ]
    return [own, *workers]
