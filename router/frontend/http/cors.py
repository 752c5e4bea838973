"""Pages of other origins may call the router, where the fleet file names them."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from baton.config.clients import ClientLimitsConfig

# What a page may read of an answer besides its body and type.
_SHOWN = (
    "x-request-id",
    "x-baton-route",
    "x-baton-ignored",
    "x-baton-emulated",
    "retry-after",
    "allow",
)
_PREFLIGHT_STANDS_S = 600


def allow_origins(app: FastAPI, clients: ClientLimitsConfig) -> None:
    """Answer preflights, and name the caller's origin in answers, if it is in the list.

    Any header may be sent: clients of browsers send many of their own (``x-stainless-*``). No
    cookies are taken, so none are allowed.
    """
    if clients.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(clients.cors_origins),
            allow_methods=["GET", "HEAD", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=list(_SHOWN),
            max_age=_PREFLIGHT_STANDS_S,
        )
