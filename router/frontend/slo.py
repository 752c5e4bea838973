"""Latency limits of a call, from its headers, its API key, its tenant or the fleet file."""

import math
from collections.abc import Mapping

from baton.config.clients import SloConfig
from baton.types.errors import InvalidRequestError
from baton.types.slo import Slo

TTFT = ("x-baton-slo-ttft-ms", "x-slo-ttft-ms")  # Baton's name, llm-d's name
ITL = ("x-baton-slo-itl-ms", "x-slo-tpot-ms")
_MAX_MS = 3_600_000.0


def slo_of(headers: Mapping[str, str], configured: SloConfig | Slo | None) -> Slo | None:
    """Return the limits of a call; None if neither the call nor the fleet has any.

    A header replaces one of the configured limits.

    Raises:
        InvalidRequestError: A header is not a positive number of milliseconds.
    """
    ttft_s = _seconds(headers, TTFT)
    itl_s = _seconds(headers, ITL)
    if configured is None:
        if ttft_s is None and itl_s is None:
            return None
        return Slo(ttft_s=ttft_s or _MAX_MS / 1000, itl_s=itl_s or _MAX_MS / 1000)
    return Slo(ttft_s=ttft_s or configured.ttft_s, itl_s=itl_s or configured.itl_s)


def _seconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    for name in names:
        raw = headers.get(name)
        if raw is None:
            continue
        try:
            value_ms = float(raw)
        except ValueError:
            value_ms = math.nan
        if not 0 < value_ms <= _MAX_MS:
            raise InvalidRequestError.at(
                name, f"must be from above 0 to {_MAX_MS:.0f} milliseconds (got {raw[:40]!r})"
            )
        return value_ms / 1000
    return None
