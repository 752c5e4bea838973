"""Sum of several routers' metrics pages. Sans-IO.

Counters and histograms are added, over restarts of the routers too: a sum that fell would look like
a restart of everything. Gauges are aggregated as declared (``MetricSpec.together``): most describe
the fleet, which every router sees whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.utils import floatToGoString

_ADD = "sum"
_LIKE_COUNTERS = (b"counter", b"histogram")


@dataclass(slots=True)
class _Family:
    header: list[bytes] = field(default_factory=list)
    kind: bytes = b"untyped"
    values: dict[bytes, float] = field(default_factory=dict)  # by series


class Pages:
    """Adds pages in Prometheus' text format.

    Args:
        together: ``sum`` or ``min`` for gauges whose aggregate is not the maximum.
    """

    def __init__(self, together: Mapping[str, str]) -> None:
        self._together = {name.encode(): how for name, how in together.items()}
        self._families: dict[bytes, _Family] = {}

    def add(self, page: bytes, *, past: bool = False) -> None:
        """Add a page; of a ``past`` router only its counters and histograms."""
        family = _Family()
        name = b""
        for line in page.splitlines():
            if line.startswith(b"# "):
                _, keyword, about, rest = line.split(b" ", 3)
                if about != name:
                    name = about
                    family = self._families.setdefault(name, _Family())
                if line not in family.header:
                    family.header.append(line)
                if keyword == b"TYPE":
                    family.kind = rest
            elif line and not (past and family.kind not in _LIKE_COUNTERS):
                series, _, value = line.rpartition(b" ")
                self._count(family, name, series, float(value))

    def _count(self, family: _Family, name: bytes, series: bytes, value: float) -> None:
        before = family.values.get(series)
        if before is None:
            family.values[series] = value
        elif family.kind in _LIKE_COUNTERS:
            family.values[series] = before + value
        else:
            how = self._together.get(name, "max")
            together = (
                before + value if how == _ADD else (min if how == "min" else max)(before, value)
            )
            family.values[series] = together

    def render(self) -> bytes:
        """Return the sum as one page."""
        lines: list[bytes] = []
        for family in self._families.values():
            lines += family.header
            for series, value in family.values.items():
                lines.append(b"%b %b" % (series, str(floatToGoString(value)).encode()))  # type: ignore[no-untyped-call]
        return b"".join(line + b"\n" for line in lines)
