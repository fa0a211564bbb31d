#!/usr/bin/env python3
"""Draws time per token, memory and prefill of a language model against the length of its context.

    bench/plot_generation.py bench/results/MACHINE/generation.jsonl docs/images/generation.svg

The last result of each mixer and context counts. Needs matplotlib.
"""

import sys

import plots
import results

PANELS = {"ms per token, median": lambda r: r["ms_per_step"]["median"], "bytes of state": lambda r: r["state_bytes"],
          "prefill, tokens/s": lambda r: r["prefill_tokens_per_s"]}
COLOURS = {"efla": "#0050a0", "softmax": "#d55e00"}


def main(source, target):
    found = sorted(results.newest(source, lambda r: (r["mixer"], r["context"])), key=lambda r: r["context"])
    figure, axes = plots.figure(1, len(PANELS), 11, 3.4)
    for each, (title, value) in zip(axes, PANELS.items()):
        for mixer in dict.fromkeys(r["mixer"] for r in found):
            chosen = [r for r in found if r["mixer"] == mixer]
            each.loglog([r["context"] for r in chosen], [value(r) for r in chosen], "o-", markersize=4, label=mixer,
                        color=COLOURS.get(mixer))
        each.set_title(title, fontsize=9)
        each.set_xlabel("tokens of context")
        each.set_xscale("log", base=2)
        each.set_xticks([2**10, 2**14, 2**17, 2**20], ["1k", "16k", "128k", "1M"])
    axes[0].legend(frameon=False)
    plots.save(figure, target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
