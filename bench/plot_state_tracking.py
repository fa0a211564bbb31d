#!/usr/bin/env python3
"""Draws a study of state tracking (efla reproduce state-tracking): accuracy by length, and eigenvalues.

    bench/plot_state_tracking.py bench/results/state-tracking.json docs/images/state-tracking.svg

Needs matplotlib.
"""

import json
import sys

import plots

COLOURS = ["#0067b0", "#c4480a", "#00795a", "#a8447f", "#8a6a00", "#4a5a6a"]
STYLES = ["-", "--", ":", "-", "--", ":"]  # two lines may coincide


def draw_lengths(axes, found, mixers):
    scores = {s["mixer"]: s["accuracy"] for s in found["scores"] if s["task"] == "parity" and s["accuracy"]}
    lengths = sorted({p["length"] for points in scores.values() for p in points})
    for i, mixer in enumerate(mixers):
        points = [(p["length"], 100 * p["mean"]) for p in scores.get(mixer, []) if p["mean"] is not None]
        axes.plot(*zip(*points), STYLES[i], color=COLOURS[i], marker="o", markersize=3, label=mixer)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.set_ylim(50, 101)
    axes.set_title("Parity: accuracy in per cent (50: chance)", fontsize=9)
    axes.set_xlabel("tokens; trained on the shortest length")
    axes.legend(frameon=False)


def draw_eigenvalues(axes, found, mixers):
    for i, mixer in enumerate(mixers):
        axes.plot(*zip(*found["eigenvalues"][mixer]), STYLES[i], color=COLOURS[i])
    axes.set_ylim(-1.05, 1.05)
    axes.set_title("Eigenvalue along the key", fontsize=9)
    axes.set_xlabel("x = β‖k‖², over the range that the mixer can choose")


def main(source, target):
    with open(source, encoding="utf-8") as file:
        found = json.load(file)
    mixers = list(found["eigenvalues"])[:len(COLOURS)]
    figure, axes = plots.figure(1, 2, 9, 3.8)
    draw_lengths(axes[0], found, mixers)
    draw_eigenvalues(axes[1], found, mixers)
    figure.suptitle(f'{found["command"]}, means over seeds', fontsize=8, color="#666666")
    plots.save(figure, target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
