#!/usr/bin/env python3
"""Writes the figures of bench/results/lm-table1.json into a document, as tables between marks.

    bench/perplexity_table.py bench/results/lm-table1.json experiments/table1/README.md

Tables: "ranking", the mean of the seeds at each mixer's best learning rate with its standard error; "rates", the first seed
at every learning rate.
"""

import json
import sys

import marked_tables


def number(value):
    return "diverged" if value is None else f"{value:.3f}"


def ranking(results):
    yield ["mixer", "learning rate", "perplexity a byte", "seeds"]
    for row in results["table"]:
        error = "" if row["standard_error"] is None else f" ± {row['standard_error']:.3f}"
        runs = [r for r in results["runs"] if r["mixer"] == row["mixer"] and r["lr"] == row["lr"]]
        yield [row["mixer"], f"{row['lr']:g}", number(row["perplexity"]) + error, ", ".join(number(r["perplexity"]) for r in runs)]


def rates(results):
    first = [run for run in results["runs"] if run["seed"] == results["table"][0]["seeds"][0]]
    columns = sorted({run["lr"] for run in first})
    yield ["mixer", *(f"{lr:g}" for lr in columns)]
    for row in results["table"]:
        found = {run["lr"]: run["perplexity"] for run in first if run["mixer"] == row["mixer"]}
        yield [row["mixer"], *(number(found[lr]) for lr in columns)]


def main(arguments):
    if len(arguments) < 2:
        sys.exit(__doc__)
    path, *documents = arguments
    with open(path, encoding="utf-8") as file:
        results = json.load(file)
    tables = {"ranking": ranking, "rates": rates}
    marked_tables.fill("perplexity_table.py", documents, lambda which: marked_tables.markdown(tables[which](results)))


main(sys.argv[1:])
