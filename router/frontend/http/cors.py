"""CORS: access for web pages of the origins in the fleet file."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from baton.config.clients import ClientLimitsConfig

# Response headers that pages may read.
_SHOWN = (
    "x-request-id",
    "x-baton-route",
    "x-baton-model",
    "x-baton-ignored",
    "x-baton-emulated",
    "x-baton-slo",
    "retry-after",
    "allow",
)
_PREFLIGHT_MAX_AGE_S = 600


def allow_origins(app: FastAPI, clients: ClientLimitsConfig) -> None:
    """Answer preflight requests and add CORS headers for the listed origins.

    All request headers are allowed, because client libraries send their own (``x-stainless-*``).
    Cookies are not used and not allowed.
    """
    if clients.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(clients.cors_origins),
            allow_methods=["GET", "HEAD", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=list(_SHOWN),
            max_age=_PREFLIGHT_MAX_AGE_S,
        )
