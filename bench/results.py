#!/usr/bin/env python3
"""Reads benchmark results: JSON lines, one per result.

    bench/results.py FILE …      writes what all results of a run share into one line before them

A line {"environment": {…}} says where the results below it come from, up to the next such line: machine, commit, command. An
environment with a "part" adds to the last one without. Programs append results that have their environment inside. A file can
also be a member of an archive: bench/results/archive/NAME.tar.xz/MEMBER.
"""

import json
import pathlib
import sys
import tarfile

SHARED = ("gpu", "commit", "repeats", "versions", "method")  # fields of a GPU's results that belong to their environment


def text_of(path):
    """Returns the text of a file, or of a member of an archive."""
    archive, found, member = str(path).partition(".tar.xz/")
    if not found:
        return pathlib.Path(path).read_text("utf-8")
    with tarfile.open(archive + ".tar.xz") as files:
        return files.extractfile(member).read().decode("utf-8")


def lines_of(path):
    return [json.loads(line) for line in text_of(path).splitlines()]


def is_environment(line):
    return list(line) == ["environment"]


def read(path):
    """Returns the results in a file, each with its environment inside."""
    found, whole, environment = [], {}, {}
    for line in lines_of(path):
        if not is_environment(line):
            found.append({"environment": {} if "gpu" in line else environment, **line})
        elif "part" in line["environment"]:
            environment = {**whole, **line["environment"]}
        else:
            environment = whole = line["environment"]
    return found


def shortened(value):
    """Returns the value with seven significant digits for every number with a fraction."""
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shortened(each) for each in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def folded(lines):
    """Returns the text of a file in which results that have their environment inside, or a GPU's fields, share lines for it."""
    kept, last = [], {}
    for line in lines:
        if is_environment(line):
            kept.append(line)
            last = line["environment"]
            continue
        if "environment" in line or "gpu" in line:
            environment = {**line.pop("environment", {}), **{key: line.pop(key) for key in SHARED if key in line}}
            if environment != last:
                kept.append({"environment": environment})
                last = environment
        kept.append(shortened(line))
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in kept)


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


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        pathlib.Path(name).write_text(folded(lines_of(name)), "utf-8")
