"""Errors in the format of Anthropic's API."""

from collections.abc import Mapping
from typing import Any

from baton.types.errors import BatonError
from router.frontend.errors import ErrorShape
from router.frontend.rate_limits import Headers, anthropic_headers
from router.tenants.quota import Standing

_OVERLOADED = 529
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


class _MessagesErrors(ErrorShape):
    def status(self, error: BatonError) -> int:
        """Return Anthropic's own status instead of 503."""
        return _OVERLOADED if error.status == 503 else error.status

    def body(self, error: BatonError, request_id: str) -> dict[str, Any]:
        status = self.status(error)
        kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        # Anthropic's clients read `details`; its two fields are Baton's own.
        details = {"error_code": error.code, "param": error.param}
        fields = {"type": kind, "message": error.message, "details": details}
        return {"type": "error", "error": fields, "request_id": request_id}

    def id_headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        spelled = request_id.encode()
        return [(b"x-request-id", spelled), (b"request-id", spelled)]

    def limit_headers(self, standings: Mapping[str, Standing]) -> Headers:
        """Return Anthropic's headers beside OpenAI's."""
        return [*super().limit_headers(standings), *anthropic_headers(standings)]


MESSAGES_ERRORS = _MessagesErrors()
