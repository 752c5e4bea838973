"""Self-contained HTML reports, and atomic writes of files."""

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
    """Render ``report.html.jinja`` and ``report.js`` of a folder with the common style."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(filters)
    parts: dict[str, Any] = {
        "uplot_js": (_VENDOR / "uPlot.iife.min.js").read_text(encoding="utf-8"),
        "uplot_css": (_VENDOR / "uPlot.min.css").read_text(encoding="utf-8"),
        "style": _STYLE.read_text(encoding="utf-8"),
        "report_js": (folder / "report.js").read_text(encoding="utf-8"),
        # Within a script element only `<` can end it.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return environment.get_template("report.html.jinja").render(**parts, **values)


def write_whole(file: Path, content: bytes) -> Path:
    """Write a file atomically, and create its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(".new")
    scratch.write_bytes(content)
    scratch.replace(file)
    return file
