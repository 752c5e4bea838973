"""Log of ended requests, one line each, if ``logs.requests`` is set.

Lines have figures. They have prompt and response only if the tenant's key has ``log_text: true``,
with each match of a rule of ``logs.redact`` replaced by the rule's name.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from time import monotonic_ns, time_ns
from typing import Any

from baton.telemetry.logs import request_context
from baton.text.tokenizer import TextTokenizer
from baton.types.errors import BatonError
from router.request import GenerationRequest
from router.routing.requests.active_request import ActiveRequest
from router.settings import RouterSettings

_LOG = logging.getLogger("baton.requests")


class Redactor:
    """Replaces matches of rules, which are applied in order."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules = [(f"[{name}]", re.compile(rule)) for name, rule in rules.items()]

    def __call__(self, text: str) -> str:
        """Return the text, with ``[name]`` in place of each match of that rule."""
        for shown, rule in self._rules:
            text = rule.sub(shown, text)
        return text


class RequestLog:
    """Writes the lines of the log."""

    def __init__(
        self,
        settings: RouterSettings,
        tokenizer: TextTokenizer,
    ) -> None:
        self._settings = settings
        self._logs = settings.logs
        self._api_keys = settings.api_keys or {}
        self._issued_keys = settings.issued_keys
        self._redact = Redactor(settings.logs.rules)
        self._tokenizer = tokenizer

    def write(self, active: ActiveRequest, endpoint: str, status: int) -> None:
        """Log a request that has ended for its client (status 499 if it left), with its tokens."""
        if not self._logs.requests or active.request.probe:
            return
        with request_context(active.id, active.request.traceparent):
            fields = _figures(active, endpoint, status)
            message = "%s %d: %s, %d + %d tokens, %.3f s"
            parts = ("end", "prompt_tokens", "completion_tokens", "elapsed_s")
            if self._may_log_texts(active.request):
                fields |= self._texts(active)
            _LOG.info(message, endpoint, status, *map(fields.get, parts), extra=fields)

    def _may_log_texts(self, request: GenerationRequest) -> bool:
        tenant = request.tenant
        owner = self._settings.policies.owner_of(tenant, shared=self._settings.share_cache)
        if self._settings.policies.of(tenant).log_text is False:
            return False
        if request.cache_scope.partition("\0")[0] != owner:
            return False  # the tenant was deleted while the request was running
        now_ms = time_ns() // 1_000_000
        issued = self._issued_keys
        for spelled, rights in self._api_keys.items():
            of_tenant = rights.log_text and rights.tenant == tenant
            if of_tenant and not issued.is_ended(spelled, now_ms):
                return True
        return issued.logs_text(tenant, now_ms)

    def refused(self, error: BatonError, endpoint: str, tenant: str) -> None:
        """Log a request that was refused before it began; the context has its ids.

        The tenant is ``all`` if it is not known yet.
        """
        if self._logs.requests:
            fields = {"endpoint": endpoint, "status": error.status, "tenant": tenant}
            fields |= {"end": error.code, "error": error.code, "reason": error.message}
            _LOG.info("%s %d: %s", endpoint, error.status, error.code, extra=fields)

    def _texts(self, active: ActiveRequest) -> dict[str, Any]:
        answers = [self._text(choice.token_ids) for choice in active.record.choices]
        return {"prompt": self._text(active.request.prompt), "answers": answers}

    def _text(self, tokens: Sequence[int]) -> str:
        # Cut before decoding, as a prompt may be long, and redacted before the last cut, so that a
        # secret at the end is not missed because a part of it was cut off.
        limit = self._logs.max_text_chars
        text = self._redact(self._tokenizer.decode(list(tokens[: 2 * limit])))
        return text if len(text) <= limit else f"{text[:limit]}…"


def _figures(active: ActiveRequest, endpoint: str, status: int) -> dict[str, Any]:
    record = active.record
    request = active.request
    first_ns = record.first_token_ns
    arrived_ns = request.arrived_ns
    error = record.error.code if record.error is not None else None
    reasons = [choice.finish_reason for choice in record.choices]
    return {
        "endpoint": endpoint,
        "status": status,
        "tenant": request.tenant,
        "end": error or (",".join(map(str, reasons)) if record.finished else "client left"),
        "error": error,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "first_token_s": (first_ns - arrived_ns) / 1e9 if first_ns else None,
        "elapsed_s": (monotonic_ns() - arrived_ns) / 1e9,
        "attempts": record.attempt,
        "prefill": active.prefill_id or active.decode_id,
        "decode": active.decode_id,
    }
