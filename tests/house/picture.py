"""Draws ``docs/architecture.svg`` from the imports: ``python -m tests.house.picture``.

Rooms stand on floors, each above everything that it imports, so that every arrow runs down. Arrows
that others imply are left out.
"""

from html import escape

from tests.house.imports import ROOT, Graph, direct, floors, imports, rooms

TARGET = ROOT / "docs" / "architecture.svg"
_ROOM, _FLOOR, _GAP, _MARGIN = (132, 40), 84, 14, 24
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1c2733}"
    ".title{font-weight:600;font-size:15px}.small{font-size:10px;fill:#5b6b7b}"
    "rect{fill:#eef3f8;stroke:#7d93a8;rx:5}path{fill:none;stroke:#5b7fa6;stroke-width:1.2}"
    ".sheet{fill:#fff;stroke:none;rx:0}"
)


def drawing() -> str:
    """The whole picture: the packages, then the rooms of ``baton`` and of the router."""
    graph = imports()
    sheets = [
        ("The packages", rooms(graph)),
        ("Inside baton/", rooms(graph, "baton")),
        ("Inside baton/engine/", rooms(graph, "baton.engine")),
        ("Inside router/", rooms(graph, "router")),
        ("Inside router/frontend/", rooms(graph, "router.frontend")),
        ("Inside router/routing/", rooms(graph, "router.routing")),
    ]
    parts, top, width = [], _MARGIN, 0
    for title, sheet in sheets:
        drawn, size = _sheet(title, sheet, top)
        parts += drawn
        top += size[1] + 2 * _MARGIN
        width = max(width, size[0])
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 2 * _MARGIN} {top}" '
        f'width="{width + 2 * _MARGIN}" height="{top}">\n<style>{_STYLE}</style>\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" style="fill:#5b7fa6;stroke:none"/>'
        "</marker></defs>\n"
        '<rect class="sheet" width="100%" height="100%"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def _sheet(title: str, graph: Graph, top: int) -> tuple[list[str], tuple[int, int]]:
    levels = floors(graph)
    room_width, room_height = _ROOM
    width = max(len(level) for level in levels) * (room_width + _GAP) - _GAP
    width = max(width, 5 * (room_width + _GAP))
    parts = [f'<text class="title" x="{_MARGIN}" y="{top + 14}">{escape(title)}</text>']
    boxes: dict[str, tuple[float, float]] = {}
    for number, level in enumerate(levels):
        span = len(level) * (room_width + _GAP) - _GAP
        begin = _MARGIN + (width - span) / 2
        for place, name in enumerate(level):
            boxes[name] = (begin + place * (room_width + _GAP), top + 30 + number * _FLOOR)
    for name, targets in sorted(direct(graph).items()):
        x, y = boxes[name]
        for target in sorted(targets):
            to_x, to_y = boxes[target]
            from_x, end_x = x + room_width / 2, to_x + room_width / 2
            bend = (to_y - y - room_height) / 2
            # An arrow over several floors goes around the rooms in between.
            aside = 0 if to_y - y <= _FLOOR else room_width * (1 if end_x >= from_x else -1)
            parts.append(
                f'<path marker-end="url(#tip)" d="M{from_x:g} {y + room_height:g} '
                f"C{from_x + aside:g} {y + room_height + bend:g} "
                f'{end_x + aside:g} {to_y - bend:g} {end_x:g} {to_y:g}"/>'
            )
    for name, (x, y) in sorted(boxes.items()):
        middle = x + room_width / 2
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="{room_width}" height="{room_height}"/>')
        parts.append(
            f'<text x="{middle:g}" y="{y + 25:g}" text-anchor="middle">{escape(name)}</text>'
        )
    return parts, (width, 30 + len(levels) * _FLOOR - (_FLOOR - room_height))


if __name__ == "__main__":
    TARGET.write_text(drawing(), encoding="utf-8")
