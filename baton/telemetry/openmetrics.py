"""Conversion of a metrics page to the OpenMetrics format, which has exemplars."""

import contextlib
from collections.abc import Iterable, Mapping

from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.samples import Exemplar

__all__ = ["CONTENT_TYPE", "is_wanted", "openmetrics", "series_text"]
_MEDIA_TYPE = "application/openmetrics-text"


def is_wanted(accept: str) -> bool:
    """Return whether a client prefers OpenMetrics to the text format, by its ``Accept``."""
    weights = {"text/plain": 0.0, _MEDIA_TYPE: 0.0}
    for item in accept.split(","):
        kind, *parameters = (part.strip() for part in item.split(";"))
        weight = next((each[2:] for each in parameters if each.startswith("q=")), "1")
        with contextlib.suppress(ValueError):
            weights[kind] = max(weights.get(kind, 0.0), float(weight))
    return weights[_MEDIA_TYPE] > 0 and weights[_MEDIA_TYPE] >= weights["text/plain"]


def series_text(name: str, labels: Mapping[str, str]) -> str:
    """Return a series as it stands on a page."""
    escaped = (
        (label, value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"'))
        for label, value in sorted(labels.items())
    )
    shown = ",".join(f'{label}="{value}"' for label, value in escaped)
    return f"{name}{{{shown}}}"


def openmetrics(page: bytes, exemplars: Mapping[str, Exemplar]) -> bytes:
    """Return a page of the text format in OpenMetrics, with exemplars by series."""
    return "\n".join((*_lines(page.decode(), exemplars), "# EOF", "")).encode()


def _lines(page: str, exemplars: Mapping[str, Exemplar]) -> Iterable[str]:
    counters = {line.split(" ", 3)[2] for line in page.splitlines() if line.endswith(" counter")}
    for line in page.splitlines():
        if line.startswith("# "):
            mark, keyword, name, rest = line.split(" ", 3)
            family = name.removesuffix("_total") if name in counters else name
            if keyword == "HELP":
                rest = rest.replace('"', '\\"')
            yield f"{mark} {keyword} {family} {rest}"
            continue
        series = line.rpartition(" ")[0]
        exemplar = exemplars.get(series)
        if exemplar is None:
            yield line
        else:
            of = series_text("", exemplar.labels)
            yield f"{line} # {of} {exemplar.value!r} {exemplar.timestamp:.3f}"
