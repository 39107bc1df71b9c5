"""A bar chart as SVG, for the README: groups of bars on a logarithmic axis. No library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_COLOURS = ("#1f6feb", "#8b949e", "#bc8cff", "#d29922", "#3fb950")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 760, 340, 60, 50, 50


def bars(title: str, unit: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """`groups`: label of the group → series → value, all above 0."""
    series = list(dict.fromkeys(name for values in groups.values() for name in values))
    found = [value for values in groups.values() for value in values.values()]
    low, high = math.floor(math.log10(min(found))), math.ceil(math.log10(max(found)))

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(value) - low) / max(1, high - low) * (_HEIGHT - _BOTTOM - _TOP)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        f' font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        out.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g} {escape(unit)}</text>')
    out += _legend(series)
    step = (_WIDTH - _LEFT - 10) / len(groups)
    for number, (label, values) in enumerate(groups.items()):
        left, width = _LEFT + number * step + step * 0.08, step * 0.84 / len(series)
        for place, name in enumerate(series):
            if name in values:
                top, x = y(values[name]), left + place * width
                out.append(
                    f'<rect x="{x:.1f}" y="{top:.1f}" width="{width * 0.92:.1f}" height="{_HEIGHT - _BOTTOM - top:.1f}"'
                    f' fill="{_COLOURS[place % len(_COLOURS)]}">'
                    f"<title>{escape(name)}: {values[name]:.4g}</title></rect>"
                )
        out.append(f'<text x="{left + step * 0.42:.1f}" y="{_HEIGHT - 30}" text-anchor="middle">{escape(label)}</text>')
    return "\n".join([*out, "</svg>", ""])


def _legend(series: Sequence[str]) -> list[str]:
    out = []
    for place, name in enumerate(series):
        x = _LEFT + place * 130
        out.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{_COLOURS[place % len(_COLOURS)]}"/>')
        out.append(f'<text x="{x + 15}" y="37">{escape(name)}</text>')
    return out
