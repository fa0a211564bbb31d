#!/usr/bin/env python3
"""Draws studies of state tracking (efla reproduce state-tracking): accuracy by length, and eigenvalues.

    bench/plot_state_tracking.py bench/results/archive/state-tracking.tar.xz docs/images/state-tracking.svg

Needs matplotlib.
"""

import json
import sys

import plots
import results

COLOURS = ["#0067b0", "#c4480a", "#00795a", "#a8447f", "#8a6a00", "#4a5a6a"]
STYLES = ["-", "--", ":", "-", "--", ":"]  # two lines may coincide


def draw_lengths(axes, found, mixers, task, title, chance):
    scores = {s["mixer"]: s["accuracy"] for s in found["scores"] if s["task"] == task and s["accuracy"]}
    lengths = sorted({p["length"] for points in scores.values() for p in points})
    for i, mixer in enumerate(mixers):
        points = [(p["length"], 100 * p["mean"], 100 * p["std"]) for p in scores.get(mixer, []) if p["mean"] is not None]
        x, mean, deviation = zip(*points)
        axes.plot(x, mean, STYLES[i], color=COLOURS[i], marker="o", markersize=3, label=mixer)
        axes.fill_between(x, [m - d for m, d in zip(mean, deviation)], [min(m + d, 100) for m, d in zip(mean, deviation)],
                          color=COLOURS[i], alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.set_ylim(chance, 101)
    axes.set_title(f"{title}: accuracy in per cent (bottom: chance, {chance})", fontsize=9)
    axes.set_xlabel("tokens; trained on the shortest length")


def draw_eigenvalues(axes, found, mixers):
    for i, mixer in enumerate(mixers):
        axes.plot(*zip(*found["eigenvalues"][mixer]), STYLES[i], color=COLOURS[i])
    axes.set_ylim(-1.05, 1.05)
    axes.set_title("Eigenvalue along the key", fontsize=9)
    axes.set_xlabel("x = β‖k‖², over the range that the mixer can choose")


def main(archive, target):
    parity, groups = (json.loads(results.text_of(f"{archive}/state-tracking-{task}.json")) for task in ("parity", "groups"))
    mixers = list(parity["eigenvalues"])[:len(COLOURS)]
    figure, axes = plots.figure(1, 3, 12, 3.8)
    draw_lengths(axes[0], parity, mixers, "parity", "Parity", 50)
    axes[0].legend(frameon=False)
    draw_lengths(axes[1], groups, mixers, "s3", "S3", 17)
    draw_eigenvalues(axes[2], parity, mixers)
    figure.suptitle("efla reproduce state-tracking --scale paper, means and standard deviations over three seeds", fontsize=8,
                    color="#666666")
    plots.save(figure, target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
