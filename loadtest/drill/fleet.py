"""Fleet of a drill: its workers as the router reports them."""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec

from loadtest.drill.verdict import ShownWorker
from loadtest.reasons import http_reason

_TIMEOUT_S = 10.0
_CHANGE_S = 60.0
_POLL_S = 0.25


class DrillError(RuntimeError):
    """The drill cannot be run; the message has the reason. It is no verdict on the fleet."""


class DrillFaultError(RuntimeError):
    """The fleet did not handle the fault; the message is part of the verdict."""


class FleetView:
    """Client of a local router's ``GET /fleet``, which needs an operator's key."""

    def __init__(self, url: str, operator_key: str) -> None:
        headers = {"authorization": f"Bearer {operator_key}"} if operator_key else {}
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=_TIMEOUT_S,
            trust_env=False,
            verify=ssl.create_default_context(),
        )

    async def __aenter__(self) -> "FleetView":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def workers(self) -> list[ShownWorker]:
        """Return every worker that the router has."""
        try:
            return msgspec.convert((await self._get("/fleet")).get("workers"), list[ShownWorker])
        except msgspec.ValidationError as error:
            raise DrillError(f"{self._http.base_url}/fleet: {error}") from error

    async def models(self) -> dict[str, Any]:
        """Return the models of the fleet, and the routes of names with their gates."""
        return await self._get("/fleet/models")

    async def slo(self) -> tuple[float, float] | None:
        """Return the fleet's limits of TTFT and ITL in seconds; None if it has none."""
        slo = (await self._get("/fleet/planner"))["slo"]
        return None if slo is None else (float(slo["ttft_s"]), float(slo["itl_s"]))

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            answer = (await self._http.get(path)).raise_for_status()
            found: dict[str, Any] = answer.json()
        except httpx.HTTPError as error:
            raise DrillError(f"{self._http.base_url}{path}: {http_reason(error)}") from error
        except ValueError as error:
            raise DrillError(f"{self._http.base_url}{path}: {error}") from error
        return found

    async def change_models(self, body: dict[str, Any]) -> str:
        """Change the routes of a name, or the golden prompts of a model; return the error or ""."""
        try:
            answer = await self._http.post("/fleet/models", json=body, timeout=_CHANGE_S)
        except httpx.HTTPError as error:
            raise DrillError(f"{self._http.base_url}/fleet/models: {http_reason(error)}") from error
        return "" if answer.is_success else answer.text

    async def victim(self, role: str) -> ShownWorker:
        """Return the busiest ready worker of a role, on this machine."""
        ready = [w for w in await self.workers() if w.role == role and w.state == "ready"]
        if not ready:
            raise DrillError(f"no {role} worker is ready")
        chosen = max(ready, key=lambda worker: (worker.running, worker.kv_blocks["leased"]))
        if chosen.host != socket.gethostname():
            raise DrillError(
                f"{chosen.id} runs on {chosen.host}: drills signal local processes only"
            )
        return chosen

    async def wait(
        self, condition: Callable[[Sequence[ShownWorker]], bool], limit_s: float
    ) -> list[ShownWorker]:
        """Poll until the condition holds or time is up; return the last state."""
        until_s = time.monotonic() + limit_s
        while True:
            workers = await self.workers()
            if condition(workers) or time.monotonic() > until_s:
                return workers
            await asyncio.sleep(_POLL_S)


def all_ready(workers: Sequence[ShownWorker]) -> bool:
    """Return whether every worker accepts requests."""
    return all(worker.state == "ready" for worker in workers)


def all_at_rest(workers: Sequence[ShownWorker]) -> bool:
    """Return whether every worker is ready and has no requests or leased blocks."""
    return all_ready(workers) and not any(worker.leaks() for worker in workers)
