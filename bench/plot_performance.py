#!/usr/bin/env python3
"""Draws the operator's time beside its peers', one panel per machine.

    bench/plot_performance.py docs/images/performance.svg bench/results/*/

float32, no gate, d = 128; the last run in each folder's op.jsonl. Needs matplotlib.
"""

import pathlib
import sys

import plots
import results
from tables import Op

OPERATIONS = {"forward": "forward", "forward+backward": "forward +\nbackward", "decode": "decode step"}
COLOURS = {"efla": "#0050a0", "eager": "#e6a000", "ggml": "#009e73"}
LABELS = {"efla": "efla", "eager": "eager LibTorch", "ggml": "ggml"}


def draw(axes, op):
    width = 0.8 / len(COLOURS)
    for place, operation in enumerate(OPERATIONS):
        times = {"efla": op.fastest(operation, 128), **op.peers(operation, 128)}
        for offset, contender in enumerate(COLOURS):
            if contender not in times:
                continue
            time = results.median(times[contender])
            bar = axes.bar(place + (offset - 1) * width, time, width * 0.92, color=COLOURS[contender],
                           label=LABELS[contender] if place == 0 else None)
            axes.bar_label(bar, [f"{time:.3g}"], fontsize=7, padding=1)
    axes.set_xticks(range(len(OPERATIONS)), OPERATIONS.values())
    axes.set_yscale("log")
    axes.set_ylim(0.1, 60)  # bars on a logarithmic axis start at its lower end
    axes.grid(False, axis="x")
    axes.set_title(results.machine(op.first["environment"]), fontsize=9)


def main(target, *folders):
    runs = [Op(pathlib.Path(folder) / "op.jsonl") for folder in folders if (pathlib.Path(folder) / "op.jsonl").exists()]
    figure, axes = plots.figure(1, len(runs), 11, 3.8, sharey=True)
    for each, op in zip(axes, runs):
        draw(each, op)
    axes[0].set_ylabel("µs per token and head, median")
    contenders = {label: handle for each in axes for handle, label in zip(*each.get_legend_handles_labels())}
    axes[-1].legend(contenders.values(), contenders.keys(), frameon=False)
    plots.save(figure, target)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
