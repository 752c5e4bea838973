"""Reports as one HTML file that needs nothing else, and files that are whole or not there."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2

_STYLE = Path(__file__).parent / "report.css"
_VENDOR = Path(__file__).parent / "vendor"


def rendered(
    folder: Path, data: object, filters: Mapping[str, Callable[..., str]], **values: object
) -> str:
    """``report.html.jinja`` of a folder, with its ``report.js``, uPlot and the style of all.

    Args:
        folder: Of template and script.
        data: What the script plots; made of what JSON knows.
        filters: For the template.
        values: For the template.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(filters)
    parts: dict[str, Any] = {
        "uplot_js": (_VENDOR / "uPlot.iife.min.js").read_text(encoding="utf-8"),
        "uplot_css": (_VENDOR / "uPlot.min.css").read_text(encoding="utf-8"),
        "style": _STYLE.read_text(encoding="utf-8"),
        "report_js": (folder / "report.js").read_text(encoding="utf-8"),
        # Within a script element only `<` could end it.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return environment.get_template("report.html.jinja").render(**parts, **values)


def write_whole(file: Path, content: bytes) -> Path:
    """Write a file, its folder too, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(".new")
    scratch.write_bytes(content)
    scratch.replace(file)
    return file
