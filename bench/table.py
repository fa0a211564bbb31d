#!/usr/bin/env python3
"""Writes the figures of bench/results/op.jsonl into the README, as a table between its two marks.

    bench/table.py bench/results/op.jsonl README.md
    bench/table.py --check bench/results/op.jsonl README.md    says whether the README has the recorded figures

Of several runs in the file the last counts. Microseconds a token and head, medians.
"""

import sys

from svg import last_run

BEGIN, END = "<!-- bench/table.py writes this -->\n", "<!-- to here -->\n"
ROWS = [("forward", "recurrent"), ("forward", "chunk"), ("forward+backward", "chunk"), ("decode", "step")]
DECAYS = {"none": "", "scalar": ", decay per head", "channel": ", decay per key channel"}
PEERS = ["eager", "ggml"]


def figure(x):
    return f"{x:#.3g}".rstrip(".")


def median(result):
    return result["us_per_token_head"]["median"]


class Run:
    def __init__(self, results):
        self.results = {(r["dtype"], r["key_dim"], r.get("decay", "none"), r["operation"], r["contender"]): r
                        for r in results if "fault" not in r}
        self.dims = sorted({key[1] for key in self.results})
        self.peers = [p for p in PEERS if any(key[4] == p for key in self.results)]

    def cells(self, dtype, dim, decay, operation, contender):
        ours = self.results.get((dtype, dim, decay, operation, contender))
        if ours is None:
            return ["–"] * (1 + len(self.peers))
        cells = [figure(median(ours))]
        for name in self.peers:
            peer = self.results.get((dtype, dim, decay, operation, name))
            cells.append(f"{figure(median(peer))} ({median(peer) / median(ours):.1f} ×)" if peer else "")
        return cells

    def streaming(self, dtype, dim):
        """What one core takes to read and write the state, and the decode step over that."""
        step = self.results.get((dtype, dim, "none", "decode", "step"), {})
        if "stream_us_per_token_head" not in step:
            return None
        return [f'{figure(step["stream_us_per_token_head"])} ({step["times_stream"]:.2f} ×)'] + [""] * len(self.peers)

    def rows(self):
        for dtype in sorted({key[0] for key in self.results}, reverse=True):
            for operation, contender in ROWS:
                for decay, words in DECAYS.items():
                    if not any(key[0] == dtype and key[2:] == (decay, operation, contender) for key in self.results):
                        continue
                    name = f'{operation.replace("+", " + ")}, {contender}'.replace("decode, step", "decode step")
                    yield [f"{dtype}, {name}{words}"] + [
                        c for dim in self.dims for c in self.cells(dtype, dim, decay, operation, contender)]
            streaming = [self.streaming(dtype, dim) for dim in self.dims]
            if all(streaming):
                yield [f"{dtype}, state through one core (step over it)"] + [c for cells in streaming for c in cells]


def table(path):
    run = Run(last_run(path))
    heads = [""] + [h for dim in run.dims for h in [f"d = {dim}"] + run.peers]
    lines = [heads, ["---"] * len(heads), *run.rows()]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def main(arguments):
    check = arguments[:1] == ["--check"]
    if len(arguments) != 2 + check:
        sys.exit(__doc__)
    source, target = arguments[check:]
    with open(target, encoding="utf-8") as file:
        text = file.read()
    before, rest = text.split(BEGIN)
    written, after = rest.split(END)
    made = table(source)
    if check and written != made:
        sys.exit(f"table.py: {target} does not have the figures of {source}; run bench/table.py {source} {target}")
    if not check:
        with open(target, "w", encoding="utf-8") as file:
            file.write(before + BEGIN + made + END + after)


if __name__ == "__main__":
    main(sys.argv[1:])
