"""Draw the results as SVG: `python bench/plot.py bench/results/relocate-h200-DATE.json ...`.

Plain Python, no plotting library: bars of the share of the roof, one group a plan.
"""

from __future__ import annotations

import argparse
import html
import json
import pathlib
from typing import Any

WIDTH, LEFT, BAR, GAP = 900, 330, 16, 10
COLOURS = ("#1b6e5a", "#c25b3f", "#4a6fa5", "#b08a2e", "#7a5195", "#6b7280", "#2f9e9e", "#a34a6b")


def main() -> None:
    """Write one SVG beside each result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    for path in parser.parse_args().files:
        result = json.loads(path.read_text())
        target = path.with_suffix(".svg")
        target.write_text(draw(path.stem, result))
        print(target)


def draw(title: str, result: dict[str, Any]) -> str:
    """Return the SVG of one result; rows without bytes are left out."""
    lines = [r for r in result["rows"] if r["bytes"]]
    names = list(dict.fromkeys(r["provider"] for r in lines))
    colours = {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(names)}
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        params = ", ".join(f"{k} {v}" for k, v in line["params"].items() if k != "layers")
        groups.setdefault(f"{line['case']}: {params}", []).append(line)
    head = f"{title}: share of a device-to-device copy ({result['roof_gbps']:.0f} GB/s)"
    parts, y = [_text(10, 22, head, 15)], 40
    for i, name in enumerate(names):
        x = 10 + i % 4 * 220
        parts += [_bar(x, y + i // 4 * 20, 12, colours[name]),
                  _text(x + 18, y + 11 + i // 4 * 20, name)]  # fmt: skip
    y += 20 * (len(names) // 4 + 1) + GAP
    for group, members in groups.items():
        parts.append(_text(10, y + 12, group))
        y += BAR + 2
        for line in members:
            length = max(1.0, line["roof_ratio"] * (WIDTH - LEFT - 170))
            label = f"{line['roof_ratio']:.3f}  {line['us_p50']:,.1f} us"
            parts += [_text(30, y + 12, line["provider"]),
                      _bar(LEFT, y, length, colours[line["provider"]]),
                      _text(LEFT + length + 6, y + 12, label)]  # fmt: skip
            if "ceiling" in line:
                x = LEFT + line["ceiling"] * (WIDTH - LEFT - 170)
                parts.append(f'<path d="M{x:.1f} {y}v{BAR - 4}" stroke="#111"/>')
            y += BAR
        y += GAP
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, words: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{html.escape(words)}</text>'


def _bar(x: float, y: float, length: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{length:.1f}" height="{BAR - 4}" fill="{colour}"/>'
    )


if __name__ == "__main__":
    main()
