#!/usr/bin/env python3
"""Writes the figures of bench/results/op.jsonl into documents, as tables between two marks.

    bench/table.py bench/results/op.jsonl README.md docs/speed.md
    bench/table.py --check bench/results/op.jsonl README.md docs/speed.md    says whether they have the recorded figures

The first mark says which table: `table.py: float32 without decay` or `table.py: everything`. Of several runs in the
file the last counts. Microseconds a token and head, medians.
"""

import sys

import marked_tables
from svg import last_run

DECAYS = {"none": "", "scalar": ", decay per head", "channel": ", decay per key channel"}
PEERS = ["eager", "ggml"]


def figure(x):
    return f"{x:#.3g}".rstrip(".")


def median(result):
    return result["us_per_token_head"]["median"]


class Run:
    def __init__(self, results):
        self.results = {(r["dtype"], r.get("decay", "none"), r["operation"], r["contender"], r["key_dim"]): r
                        for r in results if "fault" not in r}
        self.dims = sorted({key[4] for key in self.results})
        self.peers = [p for p in PEERS if any(key[3] == p for key in self.results)]

    def cases(self):
        """Each case and contender of ours, in the order of the run."""
        return list(dict.fromkeys(key[:4] for key in self.results if key[3] not in PEERS))

    def short(self):
        """One type, no decay: our time, the peers' times and how many times longer they take."""
        yield [""] + [h for dim in self.dims for h in [f"d = {dim}"] + self.peers]
        for case in self.cases():
            dtype, decay, operation, contender = case
            if dtype == "float32" and decay == "none":
                yield [name(operation, contender)] + [c for dim in self.dims for c in self.times(case, dim)]

    def times(self, case, dim):
        ours = median(self.results[(*case, dim)])
        cells = [figure(ours)]
        for peer in self.peers:
            result = self.results.get((*case[:3], peer, dim))
            cells.append(f"{figure(median(result))} ({median(result) / ours:.1f} ×)" if result else "")
        return cells

    def everything(self):
        """Our time, share of the matrix product's peak, peers' times over ours, error; for decoding, time over streaming."""
        columns = ["µs", "peak"] + [f"× {p}" for p in self.peers] + ["× stream", "error"]
        yield [""] + [f"{h}, d = {dim}" if h == "µs" else h for dim in self.dims for h in columns]
        for case in self.cases():
            dtype, decay, operation, contender = case
            yield [f"{dtype}, {name(operation, contender)}{DECAYS[decay]}"] + [
                c for dim in self.dims for c in self.cells(case, dim)]

    def cells(self, case, dim):
        ours = self.results[(*case, dim)]
        peers = [self.results.get((*case[:3], peer, dim)) for peer in self.peers]
        return [figure(median(ours)), f'{100 * ours["share_of_matrix_peak"]:.0f} %'] + [
            f"{median(p) / median(ours):.1f}" if p else "" for p in peers] + [
            f'{ours["times_stream"]:.2f}' if "times_stream" in ours else "", f'{ours["relative_rms_error"]:.1e}']


def name(operation, contender):
    return f'{operation.replace("+", " + ")}, {contender}'.replace("decode, step", "decode step")


def main(arguments):
    check = arguments[:1] == ["--check"]
    source, *targets = arguments[check:] or [None]
    if not targets:
        sys.exit(__doc__)
    run = Run(last_run(source))
    rows = {"float32 without decay": run.short, "everything": run.everything}
    marked_tables.fill("table.py", source, targets, lambda which: marked_tables.markdown(rows[which]()), check)


if __name__ == "__main__":
    main(sys.argv[1:])
