"""Sender and options of a call, from its headers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from baton.telemetry.tracing import MAX_PARENT, passed_on
from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.fields import Ignored
from router.frontend.api.call_headers import client_id_of
from router.frontend.off_loop import TENANT
from router.frontend.slo import NO_LIMITS, CallLimits
from router.process import Process
from router.request import Mode, Routed
from router.sessions.hints import FINAL_HEADER, unread_hints
from router.sessions.identity import NO_SESSION, Session, flow_of_headers, session_of_headers

_OBJECTIVES = ("x-llm-d-inference-objective", "x-gateway-inference-objective")  # older: the second
_MODES: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}
_MAX_TIMEOUT_MS = 24 * 3600 * 1000
_MAX_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Sender and options of a call, from its headers, and what is ignored of it.

    ``priority`` is that of llm-d's objective, if the body names none.
    """

    tenant: str
    mode: Mode
    timeout_s: float
    traceparent: str = ""
    tracestate: str = ""
    baggage: str = ""
    min_priority: int | None = None
    client_id: str = ""
    limits: CallLimits = NO_LIMITS
    models: tuple[str, ...] | None = None
    key_id: str = ""
    routed: Routed | None = None
    may_fall_back: bool = False
    shadow: str = ""  # model that runs a copy of the call
    session: Session = NO_SESSION
    session_ends: bool = False
    flow: str = ""
    priority: int = 0
    ignored: Ignored = field(default_factory=Ignored)


def read_headers(
    headers: Mapping[str, str], router: Process, ignored: Ignored | None = None
) -> Caller:
    """Read the sender and the options of a call from its headers.

    ``ignored`` collects the parts of the call that have no effect.
    """
    headers = dict(reversed(list(headers.items())))  # of several values the first
    mode = headers.get("x-baton-mode", "auto")
    if mode not in _MODES:
        raise InvalidRequestError.at(
            "x-baton-mode", f"must be auto, disaggregated or colocated (got {mode[:40]!r})"
        )
    ignored = Ignored() if ignored is None else ignored
    for name in unread_hints(headers):
        ignored.hint(name)
    access = router.access.of(headers)
    traceparent = passed_on(headers.get("traceparent", ""), MAX_PARENT)
    TENANT.set(access.tenant)
    return Caller(
        tenant=access.tenant,
        min_priority=access.min_priority,
        mode=_MODES[mode],
        timeout_s=_timeout_s(headers.get("x-baton-timeout-ms"), router.settings.default_timeout_s),
        traceparent=traceparent,
        tracestate=passed_on(headers.get("tracestate", "")) if traceparent else "",
        baggage=passed_on(headers.get("baggage", "")),
        client_id=client_id_of(headers),
        limits=CallLimits.read(headers, access.slo),
        models=access.models,
        key_id=access.key_id,
        may_fall_back=_may_fall_back(headers),
        session=session_of_headers(headers),
        session_ends=headers.get(FINAL_HEADER, "").lower() == "true",
        flow=flow_of_headers(headers),
        priority=_priority(headers, router.settings.clients.objectives),
        ignored=ignored,
    )


def _priority(headers: Mapping[str, str], objectives: Mapping[str, int]) -> int:
    """Return the priority of the objective that the call names, as llm-d does: unknown ones 0."""
    named = (headers.get(name, "") for name in _OBJECTIVES)
    return objectives.get(next(filter(None, named), ""), 0)


def _may_fall_back(headers: Mapping[str, str]) -> bool:
    value = headers.get("x-baton-fallback", "never")
    if value not in ("never", "allow"):
        raise InvalidRequestError.at(
            "x-baton-fallback", f"must be never or allow (got {value[:40]!r})"
        )
    return value == "allow"


def _timeout_s(raw: str | None, default_s: float) -> float:
    if raw is None:
        return default_s
    timeout_ms = number_of(raw)
    if timeout_ms is None or not 0 < timeout_ms <= _MAX_TIMEOUT_MS:
        raise InvalidRequestError.at(
            "x-baton-timeout-ms", f"must be from 1 to {_MAX_TIMEOUT_MS} (got {raw[:40]!r})"
        )
    return timeout_ms / 1000


def number_of(raw: str) -> int | None:
    """Parse a number of ASCII digits without a leading zero; None if ``raw`` is none.

    Two spellings of one token id would be two entries of the same bias.
    """
    if not (raw.isascii() and raw.isdigit()) or len(raw) > _MAX_DIGITS:
        return None
    return int(raw) if raw == "0" or raw[0] != "0" else None
