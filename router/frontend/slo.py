"""Latency limits of a call, from its headers, its API key, its tenant or the fleet file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from baton.config.clients import SloConfig
from baton.types.errors import InvalidRequestError
from baton.types.slo import Slo

# Baton's name, llm-d's name, and its older one.
TTFT = ("x-baton-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
ITL = ("x-baton-slo-itl-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
_MAX_MS = 3_600_000.0


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of a call, without those of its model.

    Attributes:
        ttft_s: Limit of a header; None: there is none.
        itl_s: Likewise.
        caller: Limits of the API key or its tenant; None: there are none.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    caller: SloConfig | Slo | None = None

    @classmethod
    def read(cls, headers: Mapping[str, str], caller: SloConfig | Slo | None) -> Self:
        """Read the headers.

        Raises:
            InvalidRequestError: One of Baton's headers is not a positive number of milliseconds.
        """
        return cls(_seconds(headers, TTFT), _seconds(headers, ITL), caller)

    def at(self, model: SloConfig | Slo | None) -> Slo | None:
        """Return the limits of the call at a model with these limits; None if there are none.

        A header replaces one of the configured limits.
        """
        configured = self.caller or model
        if configured is None:
            if self.ttft_s is None and self.itl_s is None:
                return None
            configured = Slo(ttft_s=_MAX_MS / 1000, itl_s=_MAX_MS / 1000)
        return Slo(ttft_s=self.ttft_s or configured.ttft_s, itl_s=self.itl_s or configured.itl_s)


NO_LIMITS = CallLimits()


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
            if name != names[0]:
                return None  # as at llm-d
            raise InvalidRequestError.at(
                name, f"must be from above 0 to {_MAX_MS:.0f} milliseconds (got {raw[:40]!r})"
            )
        return value_ms / 1000
    return None
