#!/usr/bin/env python3
"""Draws the cost of a token as sequences grow (efla bench op --scaling) as an SVG.

    bench/plot_scaling.py bench/results/scaling.jsonl docs/images/scaling.svg

Of several runs in the file the last is drawn.
"""

import math
import sys

import svg
from svg import line, rule, text

COLOURS = {"chunk": "#0050a0", "recurrent": "#d55e00", "auto": "#009e73"}
DASHES = {64: "5 4", 128: ""}
PANELS = {"forward": "Forward", "forward+backward": "Forward and backward"}
WIDTH, PANEL, TOP, BASE, LEFT = 820, 330, 88, 328, 52
GAP = 406  # from panel to panel
STEPS = 5  # of the vertical axis, about


def tick_size(highest):
    """The round number of which about STEPS reach as high."""
    unit = 10 ** math.floor(math.log10(highest / STEPS))
    return next(n * unit for n in (1, 2, 5, 10) if n * unit * STEPS >= highest)


def thousands(tokens):
    return f"{tokens // 1024}k"


def panel(number, title, results):
    left = LEFT + number * GAP
    tokens = sorted({r["tokens"] for r in results})
    tick = tick_size(max(r["us_per_token_head"]["median"] for r in results))
    top = tick * math.ceil(max(r["us_per_token_head"]["median"] for r in results) / tick)
    x_of = lambda t: left + PANEL * (0.03 + 0.94 * math.log(t / tokens[0]) / math.log(tokens[-1] / tokens[0]))
    y_of = lambda us: BASE - (BASE - TOP) * us / top
    parts = [text(left, TOP - 16, title, 14, more='font-weight="600"'),
             text(left + PANEL / 2, BASE + 38, "T, tokens (1k = 1,024)", 12, "middle")]
    for n in range(round(top / tick) + 1):
        parts.append(rule(left, y_of(n * tick), left + PANEL, y_of(n * tick), "#999999" if n == 0 else "#dddddd"))
        parts.append(text(left - 6, y_of(n * tick) + 4, f"{n * tick:g}", 11, "end"))
    parts += [text(x_of(t), BASE + 17, thousands(t), 11, "middle") for t in tokens]
    for contender, colour in COLOURS.items():
        for dim, dashes in DASHES.items():
            chosen = sorted((r["tokens"], r["us_per_token_head"]["median"]) for r in results
                            if r["contender"] == contender and r["key_dim"] == dim)
            if not chosen:
                continue
            points = [(x_of(t), y_of(us)) for t, us in chosen]
            parts.append(line(points, colour, dashes))
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in points]
    return parts


def legend():
    parts, x, y = [], LEFT, BASE + 66
    for contender, colour in COLOURS.items():
        for dim, dashes in DASHES.items():
            parts += [line([(x, y - 4), (x + 26, y - 4)], colour, dashes), text(x + 32, y, f"{contender}, d = {dim}")]
            x += 132
    return parts


def main(source, target):
    results = [r for r in svg.last_run(source) if "fault" not in r]
    heads, machine = results[0]["heads"], results[0]["environment"]
    parts = [text(LEFT - 36, 24, f"Microseconds a token and head, median; B = 1, H = {heads}, K = V = d, float32", 15),
             text(LEFT - 36, 42, f'{machine["cpu"]}, {machine["threads"]} threads, {machine["simd"]["target"]}', 11,
                  colour="#666666")]
    for number, (operation, title) in enumerate(PANELS.items()):
        parts += panel(number, title, [r for r in results if r["operation"] == operation])
    svg.write(target, WIDTH, BASE + 84, parts + legend())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
