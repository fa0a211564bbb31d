#!/usr/bin/env python3
"""Draws bench/results/stability.jsonl as an SVG.

    bench/plot_stability.py bench/results/stability.jsonl docs/images/stability.svg

Of several runs in the file the last is drawn.
"""

import math
import sys

import svg
from svg import line, rule, text

RULES = {  # colour, of seven that differ in lightness too
    "euler": "#d55e00",
    "euler, erase 2 beta": "#b31b6f",
    "rk2": "#e6a000",
    "rk4": "#7a5195",
    "exact": "#0050a0",
    "implicit_euler": "#009e73",
    "trapezoid": "#56a8d6",
}
NORMALISED = {  # colour, dashes
    "float32": ("#222222", ""),
    "bfloat16": ("#d55e00", ""),
    "bfloat16, normalised inside": ("#0050a0", ""),
    "bfloat16 state": ("#d55e00", "5 4"),
    "bfloat16 state, normalised inside": ("#0050a0", "5 4"),
}
WIDTH, PANEL, TOP, BASE, LEFT = 1080, 300, 70, 340, 62
GAP = 344  # from panel to panel
LOW, HIGH = 1e-1, 1e7  # of the norm; what passes the bound is drawn at the upper edge


def y_of(norm, broken):
    share = 1.0 if broken else math.log(max(norm, LOW) / LOW) / math.log(HIGH / LOW)
    return BASE - share * (BASE - TOP)


class Panel:
    def __init__(self, number, title, x_label, ticks, position):
        self.left = LEFT + number * GAP
        self.position = position  # of an x in [0, 1]
        self.parts = [
            text(self.left, TOP - 22, title, 14, more='font-weight="600"'),
            text(self.left + PANEL / 2, BASE + 38, x_label, 12, "middle"),
        ]
        for power in range(-1, 7):
            y = y_of(10.0**power, False)
            self.parts.append(rule(self.left, y, self.left + PANEL, y))
            self.parts.append(text(self.left - 6, y + 4, f"10<tspan dy='-4' font-size='9'>{power}</tspan>", 11, "end"))
        self.parts.append(rule(self.left, TOP, self.left + PANEL, TOP, "#999999"))
        self.parts.append(text(self.left - 6, TOP + 4, "broken", 11, "end"))
        for x, label in ticks:
            self.parts.append(rule(self.x(x), BASE, self.x(x), BASE + 4, "#999999"))
            self.parts.append(text(self.x(x), BASE + 17, label, 11, "middle"))

    def x(self, value):
        return self.left + PANEL * self.position(value)

    def mark(self, value, colour):
        self.parts.append(rule(self.x(value), TOP, self.x(value), BASE, colour, "2 3"))

    def draw(self, xs, norms, broken, colour, dashes="", circles=False):
        points = [(self.x(x), y_of(n, b)) for x, n, b in zip(xs, norms, broken)]
        if circles:
            self.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="#ffffff" stroke="{colour}"/>' for x, y in points]
        else:
            self.parts.append(line(points, colour, dashes))


def products_panel(number, title, results, keys):
    position = lambda x: math.log(x / 0.2) / math.log(2e4 / 0.2)
    panel = Panel(number, title, "x = β‖k‖² of every token", [(x, f"{x:g}") for x in (0.25, 1, 4, 32, 1000, 10000)], position)
    chosen = [r for r in results if r["study"] == "products" and r["keys"] == keys and r["beta"] == 1]
    for r in chosen:
        if r["limit"] and r["precision"] == "float32":
            panel.mark(r["limit"], RULES[r["rule"]])
    for precision in ("float32", "bfloat16 state"):
        for r in chosen:
            if r["precision"] == precision:
                broken = [b is not None for b in r["beyond"]]
                panel.draw(r["x"], r["largest"], broken, RULES[r["rule"]], circles=precision != "float32")
    return panel.parts


def eta_panel(number, results):
    etas = [0.9, 0.96875, 0.984375, 0.9921875, 0.99609375, 0.999, 1.0]
    labels = ["0.9", "1−2⁻⁵", "1−2⁻⁶", "1−2⁻⁷", "1−2⁻⁸", "0.999", "1"]
    position = lambda eta: 0.04 + 0.92 * etas.index(eta) / (len(etas) - 1)
    panel = Panel(number, "η → 1, one key of unit length repeated", "η of I − 2η k kᵀ, the worst of 8 keys", list(zip(etas, labels)), position)
    for r in results:
        if r["study"] == "eta" and r["keys"] == "repeated":
            colour, dashes = NORMALISED[r["precision"]]
            panel.draw(r["eta"], r["largest"], [b > 0 for b in r["broken"]], colour, dashes)
    return panel.parts


def legend():
    parts, y = [], BASE + 68
    for n, (name, colour) in enumerate(RULES.items()):
        x = LEFT + (n % 4) * 165
        parts += [line([(x, y + n // 4 * 20 - 4), (x + 22, y + n // 4 * 20 - 4)], colour),
                  text(x + 28, y + n // 4 * 20, name.replace("beta", "β"))]
    parts += [text(LEFT, y + 44, "Lines: float32. Circles: bfloat16 inputs and state. Dotted: where theory says |1 − aλ| = 1.",
                   colour="#666666")]
    for n, (name, (colour, dashes)) in enumerate(NORMALISED.items()):
        x, at = LEFT + 2 * GAP, y + n * 17
        parts += [line([(x, at - 4), (x + 22, at - 4)], colour, dashes), text(x + 28, at, name)]
    return parts


def main(source, target):
    results = svg.last_run(source)
    tokens = next(r["tokens"] for r in results if r["study"] == "products")
    parts = [text(LEFT - 40, 24, f"Largest norm of the state over {tokens:,} tokens, K = V = 16, values of unit variance", 15)]
    parts += products_panel(0, "One key repeated", results, "repeated")
    parts += products_panel(1, "Keys of random directions", results, "random")
    parts += eta_panel(2, results) + legend()
    svg.write(target, WIDTH, BASE + 150, parts)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
