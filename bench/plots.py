"""The common style of the figures in the documents."""

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({
    "font.family": "sans-serif", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#dddddd", "grid.linewidth": 0.6,
    "svg.fonttype": "none", "svg.hashsalt": "efla",  # text as text, and the same bytes for the same data
})
import matplotlib.pyplot as plt  # noqa: E402 (after the choice of a backend)


def figure(rows, columns, width, height, **options):
    """Returns a figure and the flat list of its axes. Sizes are in inches."""
    made, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained", **options)
    return made, list(axes.flat)


def save(made, target):
    made.savefig(target, metadata={"Date": None})
    plt.close(made)
