"""Draws how something grows with size: panels with two logarithmic axes, as SVG."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_WIDTH, _HEIGHT = 460, 300
_LEFT, _TOP, _RIGHT, _BOTTOM = 64, 44, 48, 64
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1c2733}.title{font-weight:600;font-size:14px}"
    ".grid{stroke:#d5dee8}.measured{stroke:#2f6db3;stroke-width:2;fill:none}.dot{fill:#2f6db3}"
    ".goal{fill:none;stroke:#c2571a;stroke-width:2}.sheet{fill:#fff}"
)


class Panel(NamedTuple):
    """One drawing; points are (size, value), all above 0."""

    title: str
    sizes: str
    measured: Sequence[tuple[float, float]]
    goals: Sequence[tuple[float, float]]


class _Axis(NamedTuple):
    """Whole decades from ``low`` on, over some pixels; backwards where they are below 0."""

    low: int
    decades: int
    at_px: float
    px: float

    @classmethod
    def of(cls, values: Sequence[float], at_px: float, px: float) -> "_Axis":
        low = math.floor(math.log10(min(values)))
        return cls(low, max(math.ceil(math.log10(max(values))) - low, 1), at_px, px)

    def place(self, value: float) -> float:
        return self.at_px + self.px * (math.log10(value) - self.low) / self.decades

    def marks(self) -> Iterator[float]:
        return (10.0 ** (self.low + decade) for decade in range(self.decades + 1))


def draw(panels: Sequence[Panel], caption: str) -> str:
    """All panels, one beside the other.

    Args:
        panels: What to draw.
        caption: Below them: where the figures are from.
    """
    width, height = _WIDTH * len(panels), _HEIGHT + 28
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
        f"<style>{_STYLE}</style>",
        '<rect class="sheet" width="100%" height="100%"/>',
    ]
    for number, panel in enumerate(panels):
        lines.append(f'<g transform="translate({number * _WIDTH} 0)">')
        lines += _drawn(panel)
        lines.append("</g>")
    lines.append(f'<text x="{_LEFT}" y="{height - 12}">{caption}; circles are goals</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _drawn(panel: Panel) -> Iterator[str]:
    points = [*panel.measured, *panel.goals]
    across = _Axis.of([size for size, _ in points], _LEFT, _WIDTH - _LEFT - _RIGHT)
    up = _Axis.of([value for _, value in points], _HEIGHT - _BOTTOM, _TOP + _BOTTOM - _HEIGHT)
    yield f'<text class="title" x="{_LEFT}" y="26">{panel.title}</text>'
    floor = _HEIGHT - _BOTTOM
    for mark in across.marks():
        x = across.place(mark)
        yield f'<path class="grid" d="M{x:.1f} {_TOP} V{floor}"/>'
        yield _text(x, floor + 18, "middle", f"{mark:,.0f}")
    for mark in up.marks():
        y = up.place(mark)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f} H{_WIDTH - _RIGHT}"/>'
        yield _text(_LEFT - 6, y + 4, "end", f"{mark:,.0f}")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, floor + 38, "middle", panel.sizes)
    places = [(across.place(size), up.place(value)) for size, value in panel.measured]
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline class="measured" points="{way}"/>'
    for kind, radius, marked in (("dot", 3, panel.measured), ("goal", 5, panel.goals)):
        for size, value in marked:
            x, y = across.place(size), up.place(value)
            told = f"{value:,.0f} at {size:,.0f}"
            yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
            yield f"<title>{told}</title></circle>"


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
