"""Generator of the Grafana dashboards: `python -m deploy.grafana.dashboards`.

Writes the JSON files in ``deploy/grafana/`` from a table of panels. A test compares the files, and
runs every query against a real Prometheus.
"""

import json
from pathlib import Path
from typing import Any

from deploy.grafana.dashboard_panels import DASHBOARDS, PRICE, Panel

FOLDER = Path(__file__).parent
DEFAULT_PRICE = "1.0"

_PANEL_WIDTH = 12
_PANEL_HEIGHT = 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(name: str) -> dict[str, Any]:
    """Return one dashboard in Grafana's import format."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"baton-{name}",
        "title": title,
        "tags": ["baton"],
        "schemaVersion": 39,
        "timezone": "",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables(name)},
        "panels": [_panel(place, panel) for place, panel in enumerate(panels)],
    }


def _variables(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {
            "name": "fleet",
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": "label_values(baton_workers, fleet)", "refId": "fleet"},
            "refresh": 2,
        },
    ]
    if name == "cost":
        found.append(
            {
                "name": PRICE,
                "label": "price per worker and hour",
                "type": "textbox",
                "query": DEFAULT_PRICE,
                "current": {"text": DEFAULT_PRICE, "value": DEFAULT_PRICE},
            }
        )
    return found


def _panel(place: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(place, 2)
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    custom = {"fillOpacity": 30 if panel.stacked else 0, "stacking": stacking}
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "gridPos": {
            "x": column * _PANEL_WIDTH,
            "y": row * _PANEL_HEIGHT,
            "w": _PANEL_WIDTH,
            "h": _PANEL_HEIGHT,
        },
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _DATASOURCE,
                "expr": query,
                "legendFormat": legend,
            }
            for number, (legend, query) in enumerate(panel.queries)
        ],
    }


def text_of(name: str) -> str:
    """Return the content of a dashboard's JSON file."""
    return json.dumps(dashboard(name), indent=1) + "\n"


def main() -> None:
    """Write the JSON files of all dashboards."""
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(text_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
