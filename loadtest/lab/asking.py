"""Client of a fleet for labs, which reads streams chunk by chunk, and fleet state."""

import ssl
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from loadtest.client.server import ServerError
from loadtest.lab.table import LabContext
from loadtest.reasons import http_reason

_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Streamed:
    """Response of a stream, with times on the lab's clock."""

    sent_s: float
    chunk_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    route: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to the first chunk with text in seconds."""
        return self.chunk_s[0] - self.sent_s


class Fleet:
    """Client of a router, closed with its context."""

    def __init__(self, context: LabContext) -> None:
        key = context.api_key
        self._http = httpx.Client(
            base_url=context.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=_TIMEOUT_S,
            trust_env=False,
            verify=ssl.create_default_context(),
        )

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def model(self) -> str:
        """Return the first served model name."""
        return str(self._get("/v1/models").json()["data"][0]["id"])

    def workers(self) -> list[dict[str, Any]]:
        """Return the workers in ``/fleet``, which is at most half a second old."""
        workers: list[dict[str, Any]] = self._get("/fleet").json()["workers"]
        return workers

    def total(self, name: str) -> tuple[float, float]:
        """Return sum and count of a histogram of the router."""
        samples: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(self._get("/metrics").text):
            for sample in family.samples:
                samples[sample.name] += sample.value
        return samples[f"{name}_sum"], samples[f"{name}_count"]

    def stream(
        self, prompt: str, max_tokens: int, *, stop_after: int | None = None, **body: Any
    ) -> Streamed:
        """Read a greedy response to its end, or disconnect after ``stop_after`` chunks."""
        request = {
            "model": self.model(),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        streamed = Streamed(time.monotonic())
        with self._http.stream("POST", "/v1/completions", json=request) as answer:
            if answer.status_code != httpx.codes.OK:
                answer.read()
                raise ServerError(f"{answer.status_code}: {answer.text[:300]}")
            streamed.route = answer.headers.get("x-baton-route", "")
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                _take(streamed, msgspec.json.decode(line.removeprefix("data: ")))
                if stop_after is not None and len(streamed.chunk_s) >= stop_after:
                    return streamed
        return streamed

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._http.get(path).raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"{path}: {http_reason(error)}") from error


def _take(streamed: Streamed, event: dict[str, Any]) -> None:
    if "error" in event:
        raise ServerError(str(event["error"]["message"]))
    if any(choice.get("text") for choice in event["choices"]):
        streamed.chunk_s.append(time.monotonic())
    if usage := event.get("usage"):
        streamed.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        streamed.cached_tokens = details.get("cached_tokens") or 0
