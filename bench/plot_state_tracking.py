#!/usr/bin/env python3
"""Draws a study of state tracking (efla reproduce state-tracking) as an SVG: parity by length, and eigenvalues.

    bench/plot_state_tracking.py bench/results/state-tracking.json docs/images/state-tracking.svg
"""

import json
import math
import sys

import svg
from svg import line, rule, text

COLOURS = ["#0067b0", "#c4480a", "#00795a", "#a8447f", "#8a6a00", "#4a5a6a"]
DASHES = ["", "6 3", "2 3", "", "6 3", "2 3"]  # two lines may lie on one another
WIDTH, PANEL, TOP, BASE, LEFT, GAP = 820, 330, 88, 328, 52, 406


def axes(left, title, label, ticks, y_of, text_of):
    parts = [text(left, TOP - 16, title, 14, more='font-weight="600"'),
             text(left + PANEL / 2, BASE + 38, label, 12, "middle")]
    for tick in ticks:
        parts.append(rule(left, y_of(tick), left + PANEL, y_of(tick)))
        parts.append(text(left - 6, y_of(tick) + 4, text_of(tick), 11, "end"))
    return parts


def lengths_panel(results, mixers):
    scores = {s["mixer"]: s["accuracy"] for s in results["scores"] if s["task"] == "parity" and s["accuracy"]}
    lengths = sorted({p["length"] for points in scores.values() for p in points})
    x_of = lambda n: LEFT + PANEL * (0.03 + 0.94 * math.log(n / lengths[0]) / math.log(lengths[-1] / lengths[0]))
    y_of = lambda share: BASE - (BASE - TOP) * (share - 0.5) / 0.5
    parts = axes(LEFT, "Parity: accuracy, chance at the foot", "tokens; trained on the shortest", [0.5, 0.6, 0.7, 0.8, 0.9, 1.0], y_of,
                 lambda share: f"{100 * share:.0f} %")
    parts += [text(x_of(n), BASE + 17, str(n), 11, "middle") for n in lengths]
    for i, mixer in enumerate(mixers):
        points = [(x_of(p["length"]), y_of(p["mean"])) for p in scores.get(mixer, []) if p["mean"] is not None]
        parts.append(line(points, COLOURS[i], DASHES[i]))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[i]}"/>' for x, y in points]
    return parts


def eigenvalues_panel(results, mixers):
    left, curves = LEFT + GAP, results["eigenvalues"]
    largest = max(curve[-1][0] for curve in curves.values())
    x_of = lambda x: left + PANEL * x / largest
    y_of = lambda value: BASE - (BASE - TOP) * (value + 1) / 2
    parts = axes(left, "Eigenvalue along the key", "x = β‖k‖², as far as the mixer can choose it", [-1, -0.5, 0, 0.5, 1], y_of,
                 lambda value: f"{value:g}".replace("-", "−"))
    parts += [text(x_of(x), BASE + 17, str(x), 11, "middle") for x in range(round(largest) + 1)]
    for i, mixer in enumerate(mixers):
        parts.append(line([(x_of(x), y_of(value)) for x, value in curves.get(mixer, [])], COLOURS[i], DASHES[i]))
    return parts


def main(source, target):
    with open(source, encoding="utf-8") as file:
        results = json.load(file)
    mixers = list(results["eigenvalues"])[:len(COLOURS)]
    parts = [text(LEFT - 36, 24, "Which step sizes follow a parity beyond the training length, and why", 15),
             text(LEFT - 36, 42, f'{results["command"]}, means over seeds', 11, colour="#666666")]
    parts += lengths_panel(results, mixers) + eigenvalues_panel(results, mixers)
    x = LEFT
    for i, mixer in enumerate(mixers):
        parts += [line([(x, BASE + 62), (x + 26, BASE + 62)], COLOURS[i], DASHES[i]), text(x + 32, BASE + 66, mixer)]
        x += 52 + 8 * len(mixer)
    svg.write(target, WIDTH, BASE + 84, parts)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
