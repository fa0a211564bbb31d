#!/usr/bin/env python3
"""Renders the benchmark results of each machine as tables.

    bench/tables.py bench/results/*/            writes README.md into each of these folders
    bench/tables.py --readme README.md bench/results/*/    also replaces the small table of figures in README.md
    bench/tables.py --transformers bench/results/transformers.jsonl docs/python.md    replaces the tables of transformers' models in a page

A folder holds op.jsonl and, if they were measured, scaling.jsonl, model.jsonl, generation.jsonl and serving.jsonl. The last
run in op.jsonl and scaling.jsonl counts, and in the other files the last result of each case.
"""

import argparse
import pathlib
import re

import results
from results import median

GATES = {"none": "no gate", "scalar": "scalar gate", "channel": "channel gate"}
PEERS = ("eager", "ggml")
MARKS = re.compile(r"(<!-- bench/tables.py: begin -->\n).*?(<!-- bench/tables.py: end -->\n)", re.DOTALL)


def figure(x):
    return f"{x:#.3g}".rstrip(".")


def markdown(rows):
    """Returns rows of cells, the first of them the header, as a table."""
    lines = [[str(cell) for cell in row] for row in rows]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines) + "\n"


def environment_text(found):
    """The environment of the last result, and the commands that gave the results."""
    e = found[-1]["environment"]
    commit = e["commit"].removesuffix("-dirty")
    modified = ", **from a modified source tree**" if e["commit"].endswith("-dirty") else ""
    blas = f'BLAS core {e["blas_core"]}' if e["blas_core"] else "without OpenBLAS"
    commands = dict.fromkeys(r["environment"]["command"] for r in found)
    return (f'Commit {commit}{modified}, {e["time"][:10]}; {e["cpu"]} ({e["processor_signature"]}), kernels for '
            f'{e["simd"]["target"]}, {e["threads"]} threads; {e["compiler"]}, LibTorch {e["libtorch"]}, {blas}, '
            f'ggml {e["ggml"] or "none"}; load average {e["load_average"]:.1f}.\n\n' +
            "".join(f"    {command}\n" for command in commands) + "\n")


class Op:
    """The last run of `efla bench op` in a file."""

    def __init__(self, path):
        self.results = {(r["dtype"], r["operation"], r["contender"], r.get("decay", "none"), r["key_dim"]): r
                        for r in results.last_run(path)}
        self.first = next(iter(self.results.values()))
        self.dims = sorted({key[4] for key in self.results})

    def peer(self, case, dim, peer):
        dtype, operation, _, decay = case
        return self.results.get((dtype, operation, peer, decay, dim))

    def table(self, dtype):
        columns = ["% of peak", "eager", "ggml", "stream", "error"]
        yield ["operation", "algorithm", "gate"] + [c for d in self.dims for c in [f"d = {d}: µs"] + columns]
        cases = dict.fromkeys(key[:4] for key in self.results if key[0] == dtype and key[2] not in PEERS)
        for case in cases:
            yield [case[1], case[2], GATES[case[3]]] + [cell for dim in self.dims for cell in self.cells(case, dim)]

    def cells(self, case, dim):
        ours = self.results[(*case, dim)]
        peers = [self.peer(case, dim, name) for name in PEERS]
        return [figure(median(ours)), f'{100 * ours["share_of_matrix_peak"]:.0f}'] + [
            f"{median(p) / median(ours):.1f} ×" if p else "" for p in peers] + [
            f'{ours["times_stream"]:.2f} ×' if "times_stream" in ours else "", f'{ours["relative_rms_error"]:.1e}']

    def fastest(self, operation, dim, dtype="float32"):
        """Returns our fastest result without a gate, other than on cold states."""
        mine = [r for key, r in self.results.items()
                if key[:2] == (dtype, operation) and key[3:] == ("none", dim) and key[2] not in (*PEERS, "step, cold states")]
        return min(mine, key=median)

    def peers(self, operation, dim, dtype="float32"):
        """Returns the peers' results without a gate."""
        return {peer: r for peer in PEERS if (r := self.results.get((dtype, operation, peer, "none", dim)))}


def op_section(path):
    op = Op(path)
    text = "## Operator\n\n" + environment_text([op.first])
    text += (f'B = {op.first["batch"]}, T = {op.first["tokens"]}, H = {op.first["heads"]}, K = V = d, the exact step. '
             "Columns ([method](../../../docs/performance.md)): *µs*: median microseconds per token and head; *% of peak*: "
             "arithmetic per second relative to a large float32 matrix product of the BLAS; *eager*, *ggml*: how many times "
             "as long this peer takes in the same run; *stream*: time relative to reading and writing the state once on "
             "one core; *error*: relative RMS error against float64.\n\n")
    for dtype in dict.fromkeys(key[0] for key in op.results):
        text += f"### {dtype}\n\n" + markdown(op.table(dtype))
    return text


def scaling_section(path):
    run = results.last_run(path)
    tokens = sorted({r["tokens"] for r in run})
    cases = list(dict.fromkeys((r["operation"], r["contender"], r["key_dim"]) for r in run))
    found = {(r["operation"], r["contender"], r["key_dim"], r["tokens"]): r for r in run}
    rows = [["operation", "algorithm", "d"] + [f"T = {t:,}" for t in tokens]]
    rows += [[*case] + [figure(median(found[(*case, t)])) if (*case, t) in found else "" for t in tokens] for case in cases]
    return ("## Cost against the length of the sequence\n\n" + environment_text(run[:1]) +
            f'float32, H = {run[0]["heads"]}; median microseconds per token and head.\n\n' + markdown(rows))


def rate(result, prefix=""):
    unit = next(u for u in ("tokens", "images") if f"{u}_per_s" in result)
    return f"{result[f'{prefix}{unit}_per_s']:.0f} {unit}/s"


def model_section(path):
    found = [r for r in results.newest(path, lambda r: (r["study"], r["model"], r["operation"])) if r["study"] == "model"]
    rows = [["", *(f"{r['model']}, {r['operation']}" for r in found)],
            ["parameters", *(f"{r['parameters']:,}" for r in found)],
            ["efla", *(rate(r) for r in found)],
            ["operator in eager LibTorch", *(rate(r, "eager_") for r in found)],
            ["speedup", *(f"{r['times_eager']:.2f} ×" for r in found)]]
    for part in dict.fromkeys(part for r in found for part in r["shares"]):
        rows.append([f"share of the time: {part}", *(f"{100 * r['shares'].get(part, 0.0):.1f} %" for r in found)])
    return "## Whole models\n\n" + environment_text(found) + markdown(rows)


def generation_section(path):
    found = results.newest(path, lambda r: (r.get("device", "cpu"), r["preset"], r["mixer"], r["context"]))
    found = [r for r in found if r.get("device", "cpu") == "cpu"]
    rows = [["mixer", "context", "prefill, tokens/s", "ms per token, median", "ms per token, least", "bytes of state", "resident MB"]]
    rows += [[r["mixer"], f'{r["context"]:,}', f'{r["prefill_tokens_per_s"]:,.0f}', f'{r["ms_per_step"]["median"]:.2f}',
              f'{r["ms_per_step"]["min"]:.2f}', f'{r["state_bytes"]:,}', f'{r["resident_bytes"] / 1e6:.0f}'] for r in found]
    return (f'## Generation, {found[0]["preset"]} with random weights\n\n' + environment_text(found) + markdown(rows))


def serving_section(path):
    found = results.newest(path, lambda r: (r["study"], r["preset"], r.get("weights"), r.get("sessions")))
    rates = [r for r in found if r["study"] == "serving"]
    first = {(r["preset"], r["weights"]): r["tokens_per_s"]["median"] for r in rates if r["sessions"] == 1}
    wide = {(r["preset"], r["sessions"]): r["tokens_per_s"]["median"] for r in rates if r["weights"] == "float32"}

    def times(rate, base):
        return f"{rate / base:.2f} ×" if base else ""

    rows = [["model", "weights", "texts at once", "tokens/s, median", "least", "most", "relative to one text", "relative to float32"]]
    for r in rates:
        t = r["tokens_per_s"]
        rows.append([r["preset"], r["weights"], r["sessions"], *(f"{t[key]:,.0f}" for key in ("median", "min", "max")),
                     times(t["median"], first.get((r["preset"], r["weights"]))),
                     times(t["median"], wide.get((r["preset"], r["sessions"])))])
    stored = [["model", "bytes of a session", "fork, ms", "save, ms", "load, ms"]]
    stored += [[r["preset"], f'{r["session_bytes"]:,}', *(f'{r["ms"][key]:.3g}' for key in ("fork", "save", "load"))]
               for r in found if r["study"] == "serving sessions"]
    return ("## Many texts at once, models with random weights\n\n" + environment_text(found) + markdown(rows) +
            "Sessions, median of seven times:\n\n" + markdown(stored))


SECTIONS = {"op.jsonl": op_section, "scaling.jsonl": scaling_section, "model.jsonl": model_section,
            "generation.jsonl": generation_section, "serving.jsonl": serving_section}


def page(folder):
    op = Op(folder / "op.jsonl")
    text = f"# Benchmark results: {results.machine(op.first['environment'])}\n\n"
    text += "Generated by bench/tables.py from the JSON lines in this folder. Do not edit.\n\n"
    for name, section in SECTIONS.items():
        if (folder / name).exists():
            text += section(folder / name)
    return text.rstrip("\n") + "\n"


def readme_table(folders):
    """The operator at d = 128 on each machine: our microseconds per token and head, and the fastest peer's."""
    rows = [["machine", "forward, µs", "fastest peer", "forward + backward, µs", "fastest peer", "decode step, µs",
             "fastest peer"]]
    for folder in folders:
        op = Op(folder / "op.jsonl")
        cells = [f'[{results.machine(op.first["environment"])}]({folder / "README.md"})']
        for operation in ("forward", "forward+backward", "decode"):
            ours, peers = op.fastest(operation, 128), op.peers(operation, 128)
            best = min(peers, key=lambda p: median(peers[p]))
            cells += [figure(median(ours)), f"{best}, {median(peers[best]) / median(ours):.1f} × as long"]
        rows.append(cells)
    return markdown(rows).rstrip("\n") + "\n"


def transformers_tables(path):
    """The results of bench/transformers_speed.py, one table per machine and setting."""
    def setting(r):
        return (r["on"], r["device"], r["threads"], r["dtype"], r["batch"], r["tokens"], r.get("fla"))

    def change(pair):
        def shown(seconds):
            return f"{1000 * seconds:,.{1 if seconds < 0.1 else 0}f}"

        if pair["installed"] is None:
            return f"refused → {shown(pair['efla'])}"
        return f"{shown(pair['installed'])} → {shown(pair['efla'])} ({pair['installed'] / pair['efla']:.2f} ×)"

    found = results.newest(path, lambda r: (setting(r), r["model"]))
    text = ""
    for these in [[r for r in found if setting(r) == s] for s in dict.fromkeys(map(setting, found))]:
        first = these[0]
        versions = [f'PyTorch {first["torch"]}', f'transformers {first["transformers"]}']
        if first["device"] == "cuda":
            versions.append(f'flash-linear-attention {first["fla"]}' if "fla" in first else "without flash-linear-attention")
        threads = f', {first["threads"]} threads' if first["device"] == "cpu" else ""
        commits = " and ".join(dict.fromkeys(r["commit"] for r in these))
        fewer = "".join(f', {r["model"]} of {r["rounds"]}' for r in these if r["rounds"] != first["rounds"])
        text += (f'{first["on"]}{threads}, {first["dtype"]}, {first["batch"]} × {first["tokens"]} tokens; {", ".join(versions)}, '
                 f'commit{"s" if " and " in commits else ""} {commits}; medians of {first["rounds"]} rounds{fewer}:\n\n')
        rows = [["shape of", "parameters, millions", "prefill, ms", "forward + backward, ms", "delta rules of the prefill, ms", "their share"]]
        for r in these:
            share = [f"{100 * r['delta_share_of_prefill'][kind]:.0f}" for kind in ("installed", "efla")]
            parts = [change(r[part]) if part in r else "" for part in ("prefill", "train", "delta_rules_of_prefill")]
            rows.append([r["model"], f'{r["parameters"] / 1e6:.0f}', *parts, f"{share[0]} → {share[1]} %"])
        text += markdown(rows)
    return text.rstrip("\n") + "\n"


def replace_tables(page, text):
    """Replaces what stands between this tool's marks in a page. Raises ValueError without one pair of marks."""
    page_text, count = MARKS.subn(lambda m: m[1] + text + m[2], page.read_text("utf-8"))
    if count != 1:
        raise ValueError(f"{page} does not have one pair of marks of this tool")
    page.write_text(page_text, "utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", type=pathlib.Path)
    parser.add_argument("--transformers", type=pathlib.Path, nargs=2, metavar=("RESULTS", "PAGE"))
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    arguments = parser.parse_args()
    folders = [folder for folder in arguments.folders if (folder / "op.jsonl").exists()]
    if not folders and not arguments.transformers:
        parser.error("folders: got none with an op.jsonl, expected one or more or --transformers")
    try:
        if arguments.readme:
            replace_tables(arguments.readme, readme_table(folders))
        if arguments.transformers:
            replace_tables(arguments.transformers[1], transformers_tables(arguments.transformers[0]))
    except ValueError as error:
        parser.error(str(error))
    for folder in folders:
        (folder / "README.md").write_text(page(folder), "utf-8")


if __name__ == "__main__":
    main()
