"""Log of ended requests, one line each, if ``logs.requests`` is set.

Lines have figures. They have prompt and response only if the tenant's key has ``log_text: true``,
with each match of a rule of ``logs.redact`` replaced by the rule's name.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

from baton.telemetry.logs import request_context
from baton.text.tokenizer import TextTokenizer
from router.request import GenerationRequest
from router.routing.checks.answers import AnswerChecks
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.call import Call
from router.settings import ProcessSettings
from router.tenants.access import AccessControl

_LOG = logging.getLogger("baton.requests")


_LONGEST_SECRET = 256  # in characters
_NOT_REDACTED = "[left out: redaction took too long]"


class RequestLog:
    """Writes the lines of the log."""

    def __init__(
        self, settings: ProcessSettings, access: AccessControl, checks: AnswerChecks
    ) -> None:
        self._logs = settings.logs
        self._shares_cache = settings.share_cache
        self._access = access
        self._checks = checks

    def closed(self, call: Call, active: ActiveRequest) -> None:
        """Log a request that has ended for its client (status 499 if it left), with its tokens."""
        if not self._logs.requests or active.request.probe:
            return
        with request_context(active.id, active.request.traceparent):
            fields = _figures(active, call.endpoint, call.status)
            if not self._may_log_texts(active.request):
                _log(fields)
                return
            choices = active.record.choices
            tokens = [active.request.prompt, *(choice.token_ids for choice in choices)]
            decode = partial(self._decoded, active.record.tokenizer)
            work = self._write_texts(active.request, fields, lambda: [*map(decode, tokens)])
            self._checks.spawn(work, "request log")

    async def _write_texts(
        self, request: GenerationRequest, fields: dict[str, Any], decode: Callable[[], list[str]]
    ) -> None:
        """Log a request with its prompt and its answers."""
        texts = await asyncio.to_thread(decode)
        redacted = await self._checks.redacted(self._logs.rules, texts, request.tenant)
        if self._may_log_texts(request):
            shown = [_NOT_REDACTED] * len(texts)
            if redacted is not None:
                shown = [self._cut(*pair) for pair in zip(redacted, texts, strict=True)]
            fields |= {"prompt": shown[0], "answers": shown[1:]}
        _log(fields)

    async def change_texts(self, active: ActiveRequest) -> dict[str, str]:
        """Return the redacted texts around the change of a session's prompt, if they may be seen.

        They are ``earlier`` and ``now``.
        """
        change = active.request.prompt_change
        if change is None or not self._may_log_texts(active.request):
            return {}
        decode = active.record.tokenizer.decode
        windows = [list(change.earlier), list(change.now)]
        texts = await asyncio.to_thread(lambda: [decode(window) for window in windows])
        redacted = await self._checks.redacted(self._logs.rules, texts, active.request.tenant)
        if redacted is None or not self._may_log_texts(active.request):
            return {}
        begin = 0 if change.shows_begin else _LONGEST_SECRET
        earlier, now = (text[begin:-_LONGEST_SECRET] for text in redacted)
        return {"earlier": earlier, "now": now}

    def _may_log_texts(self, request: GenerationRequest) -> bool:
        tenant = request.tenant
        policies = self._access.policies
        owner = policies.owner_of(tenant, shared=self._shares_cache)
        if policies.of(tenant).log_text is False:
            return False
        if request.cache_scope.partition("\0")[0] != owner:
            return False  # the tenant was deleted while the request was running
        return self._access.logs_text(tenant)

    def refused(self, call: Call) -> None:
        """Log a call that was refused before a request began; the context has its ids."""
        error = call.error
        if error is None or call.active or not self._logs.requests:
            return
        fields = {"endpoint": call.endpoint, "status": error.status, "tenant": call.label}
        fields |= {"end": error.code, "error": error.code, "reason": error.message}
        _LOG.info("%s %d: %s", call.endpoint, error.status, error.code, extra=fields)

    def _decoded(self, tokenizer: TextTokenizer, tokens: Sequence[int]) -> str:
        """Return the text that is redacted, which is longer than the logged text.

        Otherwise a secret that the cut divides would not be found.
        """
        most = self._most_given
        return tokenizer.decode(list(tokens[: 4 * most]))[:most]  # 4: bytes of a character

    def _cut(self, text: str, given: str) -> str:
        """Return the part of a redacted text that is logged.

        If the ``given`` text was cut, a part of a secret may be left at its end.
        """
        limit = self._logs.max_text_chars
        if len(given) < self._most_given:
            return text if len(text) <= limit else f"{text[:limit]}…"
        return f"{text[:-_LONGEST_SECRET][:limit]}…"

    @property
    def _most_given(self) -> int:
        return 2 * self._logs.max_text_chars + _LONGEST_SECRET


def _log(fields: dict[str, Any]) -> None:
    parts = ("endpoint", "status", "end", "prompt_tokens", "completion_tokens", "elapsed_s")
    message = "%s %d: %s, %d + %d tokens, %.3f s"
    _LOG.info(message, *map(fields.get, parts), extra=fields)


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
