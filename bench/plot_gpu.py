#!/usr/bin/env python3
"""Draws how many times as long as efla its peers take on a GPU, one panel per operation.

    bench/plot_gpu.py docs/images/performance-gpu.svg bench/results/cuda-peers.jsonl

bfloat16, one gate per head, K = V = 128. Needs matplotlib.
"""

import sys

import plots
from gpu_tables import gpu_times

COLOURS = {"flashinfer": "#cc79a7", "FlashQLA": "#e6a000", "fla": "#009e73"}
LABELS = {"flashinfer": "flashinfer", "FlashQLA": "FlashQLA", "fla": "flash-linear-attention"}


def draw(axes, operation, times):
    peers = [peer for peer in COLOURS if any(peer in of for of in times.values())]
    width = 0.8 / len(peers)
    for place, of in enumerate(times.values()):
        for offset, contender in enumerate(peers):
            if contender not in of:
                continue
            ratio = of[contender] / of["efla"]
            bar = axes.bar(place + (offset - (len(peers) - 1) / 2) * width, ratio, width * 0.92, color=COLOURS[contender],
                           label=LABELS[contender] if place == 0 else None)
            axes.bar_label(bar, [f"{ratio:.2f}"], fontsize=7, padding=1)
    axes.axhline(1, color="#0050a0", linewidth=1.5, label="efla")
    labels = [shape.replace("packed ", "packed\n").replace("x", " × ").replace("/", " / ") for shape in times]
    axes.set_xticks(range(len(times)), ["\n× ".join(label.rsplit(" × ", 1)) for label in labels], fontsize=7)
    axes.grid(False, axis="x")
    axes.set_title(operation, fontsize=9)


def main(target, path):
    figure, axes = plots.figure(1, 2, 13, 3.6, sharey=True)
    for each, (operation, times) in zip(axes, gpu_times(path).items()):
        draw(each, operation, times)
    axes[0].set_ylabel("time, as a multiple of efla's")
    handles, labels = axes[0].get_legend_handles_labels()  # of all peers
    axes[1].legend(handles, labels, frameon=False, ncols=4, fontsize=8)
    plots.save(figure, target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
