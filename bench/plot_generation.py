#!/usr/bin/env python3
"""Draws bench/results/generation.jsonl as an SVG: time a token, memory and prefill against the context's length.

    bench/plot_generation.py bench/results/generation.jsonl docs/images/generation.svg

Of several results of a mixer and a context the last is drawn.
"""

import json
import math
import sys

import svg
from svg import line, rule, text

COLOURS = {"efla": "#0050a0", "softmax": "#d55e00"}
OTHERS = ["#009e73", "#7a5195", "#e6a000"]
WIDTH, PANEL, TOP, BASE, LEFT, GAP = 1080, 280, 60, 320, 66, 346
SHORTEST, LONGEST = 2**10, 2**20


def x_of(left, context):
    return left + PANEL * math.log(context / SHORTEST) / math.log(LONGEST / SHORTEST)


def label(value):
    """A power of ten as a reader writes it: 0.1, 10, 10 k, 1 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def panel(number, title, results, colours, value):
    """One quantity, on two logarithmic axes; the vertical one spans whole powers of ten."""
    left = LEFT + number * GAP
    values = [value(r) for r in results]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    y_of = lambda v: BASE - (math.log10(v) - low) / (high - low) * (BASE - TOP)
    parts = [text(left, TOP - 20, title, 14, more='font-weight="600"'),
             text(left + PANEL / 2, BASE + 38, "tokens taken in", 12, "middle")]
    for power in range(low, high + 1):
        parts += [rule(left, y_of(10.0**power), left + PANEL, y_of(10.0**power)),
                  text(left - 6, y_of(10.0**power) + 4, label(10.0**power), 11, "end")]
    for context, name in ((2**10, "1 k"), (2**14, "16 k"), (2**17, "128 k"), (2**20, "1 M")):
        parts += [rule(x_of(left, context), BASE, x_of(left, context), BASE + 4, "#999999"),
                  text(x_of(left, context), BASE + 17, name, 11, "middle")]
    for mixer, colour in colours.items():
        points = [(x_of(left, r["context"]), y_of(value(r))) for r in results if r["mixer"] == mixer]
        parts.append(line(points, colour))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="#ffffff" stroke="{colour}"/>' for x, y in points]
    return parts


def main(source, target):
    with open(source, encoding="utf-8") as lines:
        found = {(r["mixer"], r["context"]): r for r in map(json.loads, lines)}
    results = [found[key] for key in sorted(found)]
    others = iter(OTHERS)
    colours = {}
    for r in results:
        if r["mixer"] not in colours:
            colours[r["mixer"]] = COLOURS.get(r["mixer"]) or next(others)
    parts = panel(0, "Time a token, ms", results, colours, lambda r: r["ms_per_token"]["median"])
    parts += panel(1, "State, bytes", results, colours, lambda r: r["state_bytes"])
    parts += panel(2, "Prefill, tokens/s", results, colours, lambda r: r["prefill_tokens_per_s"])
    for n, (mixer, colour) in enumerate(colours.items()):
        x, y = LEFT + n * 150, BASE + 66
        parts += [rule(x, y - 4, x + 22, y - 4, colour), text(x + 28, y, mixer)]
    svg.write(target, WIDTH, BASE + 84, parts)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
