#!/usr/bin/env python3
"""Writes the figures of bench/results/model.jsonl into a document, as a table between two marks.

    bench/model_table.py bench/results/model.jsonl docs/speed.md
    bench/model_table.py --check bench/results/model.jsonl docs/speed.md    says whether it has the recorded figures

Of several results of a model and an operation the last counts.
"""

import json
import sys

import marked_tables



def rate(result, prefix=""):
    unit = next(u for u in ("tokens", "images") if f"{u}_per_s" in result)
    return f"{result[f'{prefix}{unit}_per_s']:.0f} {unit}/s"


def rows(path):
    with open(path, encoding="utf-8") as lines:
        results = {(r["model"], r["operation"]): r for r in map(json.loads, lines)}.values()
    yield ["", *(f"{r['model']}, {r['operation']}" for r in results)]
    yield ["parameters", *(f"{r['parameters']:,}" for r in results)]
    yield ["efla", *(rate(r) for r in results)]
    yield ["eager operator", *(rate(r, "eager_") for r in results)]
    yield ["times as fast", *(f"{r['times_eager']:.2f}" for r in results)]
    for part in dict.fromkeys(part for r in results for part in r["shares"]):
        yield [part, *(f"{1e2 * r['shares'].get(part, 0.0):.1f} %" for r in results)]


def main(arguments):
    check = arguments[:1] == ["--check"]
    results, *documents = arguments[check:] or [None]
    if not documents:
        sys.exit(__doc__)
    table = marked_tables.markdown(rows(results))
    marked_tables.fill("model_table.py", results, documents, lambda which: table, check)


main(sys.argv[1:])
