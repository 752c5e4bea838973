"""Calls to a server before and after a load test: model, supported options, counters."""

import ssl

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from loadtest.client.records import ServerOptions
from loadtest.reasons import answer_reason, http_reason

_TIMEOUT_S = 60.0
_TOOL = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object"}}}


class ServerError(RuntimeError):
    """The server cannot be used as requested; the message has the reason."""


class Server:
    """Calls to a server outside the measurement; a trailing ``/v1`` of its URL is removed."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # A server may close an idle connection just as the next request is sent on it.
        once = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=_TIMEOUT_S,
            trust_env=False,
            limits=once,
            verify=ssl.create_default_context(),  # unlike httpx's, it uses SSL_CERT_FILE
        )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """Return the first model in ``/v1/models``."""
        try:
            answer = self._http.get("/v1/models").raise_for_status().json()
            return str(answer["data"][0]["id"])
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}/v1/models: {http_reason(error)}") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ServerError(
                f"{self.url}/v1/models: not a list of models ({error!r}); set --model"
            ) from error

    def emulated(self) -> str:
        """Return the timing model of a Baton with emulated workers; "" for all other servers."""
        try:
            return str(self._http.get("/v1/models").json()["data"][0].get("emulated") or "")
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError):
            return ""

    def settle(self, options: ServerOptions) -> ServerOptions:
        """Return the options that the server supports, found by one to three short requests.

        ``ignore_eos`` and ``stream_options`` are dropped if the server rejects them. If it
        rejects tools, as emulated workers do, the system prompt describes them.

        Raises:
            ServerError: The server rejects the request also without them.
        """
        tried = [options]
        if options.ignore_eos:
            tried.append(msgspec.structs.replace(options, ignore_eos=False))
        if options.tools:
            tried.append(msgspec.structs.replace(tried[-1], tools="described"))
        tried.append(msgspec.structs.replace(tried[-1], include_usage=False))
        for attempt in tried:
            answer = self._probe(attempt)
            if answer.status_code == 200:
                return attempt
            if answer.status_code not in (400, 422):
                break
        raise ServerError(f"{self.url}: {answer_reason(answer)}")

    def _probe(self, options: ServerOptions) -> httpx.Response:
        body: dict[str, object] = {"model": options.model, "max_tokens": 1, "stream": True}
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.include_usage:
            body["stream_options"] = {"include_usage": True}
        if options.endpoint == "chat":
            path = "chat/completions"
            body["messages"] = [{"role": "user", "content": "hello"}]
            if options.tools == "callable":
                body["tools"] = [_TOOL]
        else:
            path = "completions"
            body["prompt"] = [1000, 1001] if options.token_ids else "hello"
        try:
            return self._http.post(f"/v1/{path}", json=body, headers=options.headers)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}: {http_reason(error)}") from error

    def prefix_tokens_by_source(self) -> dict[str, float]:
        """Return Baton's counter ``baton_prefix_tokens`` by source; empty for other servers."""
        try:
            answer = self._http.get("/metrics")
        except httpx.HTTPError:
            return {}
        if answer.status_code != 200 or "baton_prefix_tokens" not in answer.text:
            return {}
        return {
            sample.labels["source"]: sample.value
            for family in text_string_to_metric_families(answer.text)
            if family.name == "baton_prefix_tokens"
            for sample in family.samples
            if sample.name == "baton_prefix_tokens_total"
        }
