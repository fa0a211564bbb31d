#!/usr/bin/env python3
"""Draws the growth of the state over many tokens, as `efla bench stability` measures it.

    bench/plot_stability.py bench/results/archive/stability.tar.xz/stability.jsonl docs/images/stability.svg

The last run in the file counts. Needs matplotlib.
"""

import math
import sys

import plots
import results

RULES = {  # colours that differ in lightness too
    "euler": "#d55e00", "euler, erase 2 beta": "#b31b6f", "rk2": "#e6a000", "rk4": "#7a5195", "exact": "#0050a0",
    "implicit_euler": "#009e73", "trapezoid": "#56a8d6",
}
NORMALISED = {  # colour, style
    "float32": ("#222222", "-"), "bfloat16": ("#d55e00", "-"), "bfloat16, normalised inside": ("#0050a0", "-"),
    "bfloat16 state": ("#d55e00", "--"), "bfloat16 state, normalised inside": ("#0050a0", "--"),
}
LOW, HIGH = 1e-1, 1e7  # of the norm; a run beyond the bound is drawn at the upper edge


def norms(result, broken):
    return [HIGH if over else max(norm, LOW) for norm, over in zip(result["largest"], broken)]


def draw_products(axes, title, run, keys):
    chosen = [r for r in run if r["study"] == "products" and r["keys"] == keys and r["beta"] == 1]
    for r in chosen:
        y = norms(r, [b is not None for b in r["beyond"]])
        colour = RULES[r["rule"]]
        if r["precision"] == "float32":
            axes.plot(r["x"], y, color=colour, label=r["rule"].replace("beta", "β"))
            if r["limit"]:
                axes.axvline(r["limit"], color=colour, linestyle=":", linewidth=0.8)
        elif r["precision"] == "bfloat16 state":
            axes.plot(r["x"], y, "o", color=colour, markersize=3, markerfacecolor="white")
    axes.set_xscale("log")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("x = β‖k‖² of every token")


def draw_eta(axes, run):
    etas = []
    for r in run:
        if r["study"] == "eta" and r["keys"] == "repeated":
            etas = r["eta"]
            colour, style = NORMALISED[r["precision"]]
            axes.plot(range(len(etas)), norms(r, [b > 0 for b in r["broken"]]), style, color=colour, label=r["precision"])
    labels = [f"{eta:g}" if eta in (0.9, 0.999, 1.0) else f"1−2$^{{-{round(-math.log2(1 - eta))}}}$" for eta in etas]
    axes.set_xticks(range(len(etas)), labels)
    axes.set_title("η → 1, one key of unit length repeated", fontsize=9)
    axes.set_xlabel("η of I − 2η k kᵀ, the worst of 8 keys")


def main(source, target):
    run = results.last_run(source)
    tokens = next(r["tokens"] for r in run if r["study"] == "products")
    figure, axes = plots.figure(1, 3, 11, 4.4, sharey=True)
    draw_products(axes[0], "One key repeated", run, "repeated")
    draw_products(axes[1], "Keys of random directions", run, "random")
    draw_eta(axes[2], run)
    axes[0].set_yscale("log")
    axes[0].set_ylim(LOW, HIGH)
    axes[0].set_yticks([10.0**power for power in range(-1, 7)] + [HIGH],
                       [f"$10^{{{power}}}$" for power in range(-1, 7)] + ["broken"])
    axes[0].set_ylabel(f"largest norm of the state in {tokens:,} tokens")
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].legend(handles, labels, frameon=False, fontsize=7, ncols=2, loc="center right")
    axes[1].text(0.45, 0.6, "Lines: float32. Circles: bfloat16\ninputs and state. Dotted: theory,\n|1 − aλ| = 1.",
                 transform=axes[1].transAxes, fontsize=7, va="top")
    axes[2].legend(frameon=False, fontsize=7, loc="upper left")
    plots.save(figure, target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
