"""A timeline of groups of layers as SVG: computed, asked for, placed; one panel per transport."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WIDTH, _LEFT, _RIGHT, _TOP = 900, 110, 20, 46
_ROW, _GAP, _AXIS = 3, 44, 20
_COLOURS = {"computed": "#9aa5b1", "waiting": "#f0b429", "moving": "#2f80ed"}


@dataclass(slots=True)
class Group:
    """One group of layers of one chunk, in seconds since prefill began."""

    computed_s: float = 0.0
    asked_s: float = 0.0
    stored_s: float = 0.0


def draw(panels: Mapping[str, Sequence[Group]], tokens: int) -> str:
    """The picture.

    Args:
        panels: Groups by transport.
        tokens: Of the prompt.
    """
    end_s = max(group.stored_s for groups in panels.values() for group in groups) * 1.02
    scale = (_WIDTH - _LEFT - _RIGHT) / end_s
    parts, top = [_title(tokens)], _TOP
    for name, groups in panels.items():
        rows = sorted(groups, key=lambda group: group.computed_s)
        parts.append(_text(8, top + 12, name))
        begun_s = 0.0
        for number, group in enumerate(rows):
            y = top + number * _ROW
            spans = (
                ("computed", begun_s, group.computed_s),
                ("waiting", group.computed_s, group.asked_s),
                ("moving", max(group.asked_s, group.computed_s), group.stored_s),
            )
            parts += [_bar(kind, scale, begin_s, till_s, y) for kind, begin_s, till_s in spans]
            begun_s = group.computed_s
        bottom = top + len(rows) * _ROW
        computed_x = _LEFT + begun_s * scale
        parts.append(
            f'<line x1="{computed_x:.1f}" x2="{computed_x:.1f}" y1="{top}" y2="{bottom + 4}" '
            'stroke="#d64545" stroke-dasharray="3 2"/>'
        )
        last_s = max(group.stored_s for group in rows)
        parts.append(
            _text(
                _LEFT,
                bottom + _AXIS,
                f"computed after {begun_s * 1e3:.0f} ms, all placed after "
                f"{last_s * 1e3:.0f} ms: {(last_s - begun_s) * 1e3:.1f} ms exposed",
            )
        )
        top = bottom + _GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" '
    return head + 'font-family="sans-serif" font-size="12">\n' + "\n".join(parts) + "\n</svg>\n"


def _title(tokens: int) -> str:
    marks = (
        ("computed", "computing"),
        ("waiting", "computed, not asked for"),
        ("moving", "asked for until placed"),
    )
    parts = [_text(8, 16, f"Groups of layers of a prompt of {tokens} tokens, one row each")]
    for number, (kind, words) in enumerate(marks):
        x = _LEFT + number * 190
        parts.append(f'<rect x="{x}" y="24" width="10" height="10" fill="{_COLOURS[kind]}"/>')
        parts.append(_text(x + 15, 33, words))
    return "\n".join(parts)


def _bar(kind: str, scale: float, begin_s: float, end_s: float, y: float) -> str:
    x, width = _LEFT + begin_s * scale, max(0.0, (end_s - begin_s) * scale)
    place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 1}"'
    return f'<rect {place} fill="{_COLOURS[kind]}"/>'


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}">{words}</text>'
