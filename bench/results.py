"""Reads the benchmark results of one machine: JSON lines as `efla bench --out` appends them."""

import json


def read(path):
    """Returns the results in a file of JSON lines."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def last_run(path):
    """Returns the results of the last run in a file, without those that failed their check."""
    results = read(path)
    last = max(r["environment"]["time"] for r in results)
    return [r for r in results if r["environment"]["time"] == last and "fault" not in r]


def newest(path, key):
    """Returns the newest result for each value of `key`, in the order of the first ones."""
    return list({key(r): r for r in read(path)}.values())


def median(result):
    """Returns the microseconds per token and head of a result of `efla bench op`."""
    return result["us_per_token_head"]["median"]


def machine(environment):
    """Returns a machine's name: processor and instruction set."""
    target = {"AVX3": "AVX-512"}.get(environment["simd"]["target"], environment["simd"]["target"])
    return f'{environment["cpu"].replace("(R)", "")}, {target}'
