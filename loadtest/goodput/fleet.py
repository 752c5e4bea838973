"""Router of a fleet with latency limits: its planner, its sizes, orders to its controller."""

import ssl
import time
from typing import Any

import httpx

from loadtest.client.server import ServerError

_TIMEOUT_S = 60.0
_POLL_S = 0.5


class SizedFleet:
    """Client of a router, for an operator; closed with its context."""

    def __init__(self, url: str, operator_key: str) -> None:
        self._http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {operator_key}"} if operator_key else {},
            timeout=_TIMEOUT_S,
            trust_env=False,
            verify=ssl.create_default_context(),
        )

    def __enter__(self) -> "SizedFleet":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def slo(self) -> tuple[float, float] | None:
        """Return the fleet's limits of TTFT and ITL in seconds; None if it has none."""
        slo = self.planner()["slo"]
        return None if slo is None else (float(slo["ttft_s"]), float(slo["itl_s"]))

    def planner(self) -> dict[str, Any]:
        """Return the planner's mode and last decisions, the newest first."""
        planner: dict[str, Any] = self._ask("GET", "/fleet/planner")
        return planner

    def sizes(self) -> dict[str, int]:
        """Return the number of ready workers by role."""
        ready = [w for w in self._ask("GET", "/fleet")["workers"] if w["state"] == "ready"]
        return {role: sum(w["role"] == role for w in ready) for role in ("prefill", "decode")}

    def decisions(self, since: float) -> list[tuple[float, str]]:
        """Return the turns and sizes that the planner applied since a Unix time, with reasons."""
        return [
            (decided["at"], f"{_what(decided['decision'])}: {decided['decision']['reason']}")
            for decided in reversed(self.planner()["decisions"])
            if decided["done"] and decided["at"] >= since
        ]

    def plan(self, mode: str) -> None:
        """Let the planner change roles (``auto``), or not (``hold``)."""
        self._order(roles=mode)

    def split(self, prefill: int, decode: int, limit_s: float = 60.0) -> None:
        """Change the pool sizes, and wait until the router sees them.

        Raises:
            ServerError: The controller refuses, or the workers are not ready in time.
        """
        self._order(prefill=prefill, decode=decode)
        until_s = time.monotonic() + limit_s
        while self.sizes() != {"prefill": prefill, "decode": decode}:
            if time.monotonic() > until_s:
                raise ServerError(f"the fleet is not {prefill} + {decode} after {limit_s:g} s")
            time.sleep(_POLL_S)

    def _order(self, **arguments: int | str) -> None:
        body = {"verb": "scale", "arguments": arguments, "timeout_s": 30}
        self._ask("POST", "/fleet/orders", body)

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        try:
            answer = self._http.request(method, path, json=body)
            if answer.is_error:
                raise ServerError(f"{path}: {answer.status_code}: {answer.text[:300]}")
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(f"{path}: {error}") from error


def _what(decision: dict[str, Any]) -> str:
    if decision["type"] == "turn":
        return f"{decision['worker_id']} to {decision['role']}"
    return f"{decision['prefill']} + {decision['decode']}"
