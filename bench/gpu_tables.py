#!/usr/bin/env python3
"""Replaces the tables of a page by tables of the results on NVIDIA GPUs.

    bench/gpu_tables.py docs/performance-gpu.md

A table stands between the marks `<!-- bench/gpu_tables.py: NAME -->` and `<!-- bench/gpu_tables.py: end -->`, below a line that says
on which GPU and at which commit its results were measured. A table has the results of one commit; peers were measured beside it or, where
a column says so, in a run of their own. Where a case was measured several times the table has the median.
"""

import pathlib
import re
import statistics
import sys

import results
from tables import markdown

FOLDER = pathlib.Path(__file__).parent / "results"
MARKS = re.compile(r"(<!-- bench/gpu_tables.py: ([\w-]+) -->\n).*?(<!-- bench/gpu_tables.py: end -->\n)", re.DOTALL)
GPU_PEERS = {"flashinfer": "flashinfer", "FlashQLA": "FlashQLA", "flash-linear-attention": "fla"}
STEP_CASES = [(state, texts) for state in ("float32", "bfloat16") for texts in (64, 256)]


class Results:
    """The results of one commit in a file, and the line that says so."""

    def __init__(self, file, commit=None, **environment):
        self.file = file
        wanted = {**environment, **({"commit": commit} if commit else {})}
        self.found = [r for r in results.read(FOLDER / file) if wanted.items() <= r["environment"].items()]
        if not self.found:
            sys.exit(f"gpu_tables: {FOLDER / file}: no result of {wanted}")
        self.environment = self.found[0]["environment"]

    def caption(self, unit="", others=()):
        """others: the other files that the table has columns of."""
        commit = self.environment["commit"].removesuffix("-dirty")
        modified = ", from a modified source tree" if self.environment["commit"].endswith("-dirty") else ""
        files = ", ".join(f"[results{n}](../bench/results/{f})" for n, f in zip(("", " 2"), (self.file, *others)))
        return f'{self.environment["gpu"]}, commit {commit}{modified} ({files}){unit}:\n\n'

    def all(self, **case):
        return [r for r in self.found if case.items() <= r.items()]

    def ms(self, **case):
        """The median of the milliseconds of a case; None if it was not measured."""
        times = [r["ms"] for r in self.all(**case) if "ms" in r]
        return statistics.median(times) if times else None

    def error(self, **case):
        """The largest error of a case, of its output or of its gradients, as text; "" if none was measured."""
        errors = [e for r in self.all(**case) for e in r.get("errors") or [r.get("error")] if e is not None]
        return f"{max(errors):.1e}" if errors else ""


def cell(ms, digits=3):
    return "" if ms is None else f"{ms:.{digits}f}"


def size(shape):
    return shape.replace("x", " × ").replace("/", " / ")


def gpu_times(path):
    """Returns the milliseconds of one run of efla and its peers on a GPU: time[operation][shape][contender].

    A peer that was also timed where no gate decays has these times under the contender's name and " (g = 0)".
    """
    operations = {"fwd": "forward", "fwd+bwd": "forward + backward", "delta_forward": "forward",
                  "delta_forward_backward": "forward + backward"}
    times = {"forward": {}, "forward + backward": {}}
    for r in results.read(path):
        what = r.get("op") or r.get("what", "")
        operation = operations.get(what.removesuffix(" g=0"))
        if operation is None or r.get("algorithm", "chunk") != "chunk":
            continue
        contender = "efla" if "op" in r else GPU_PEERS[r["contender"].split()[0].rstrip(",")]
        if what.endswith(" g=0"):
            contender += " (g = 0)"
        times[operation].setdefault(r["shape"], {})[contender] = r["ms"]
    return times


def operator_peers():
    """The times of the operator and of its peers in one run."""
    times = gpu_times(FOLDER / "cuda-peers.jsonl")
    rows = [["B × T × H (/ value heads)"]]
    for operation, by_shape in times.items():
        peers = [peer for peer in GPU_PEERS.values() if any(peer in of for of in by_shape.values())]
        rows[0] += [operation, *peers]
        for i, shape in enumerate(times["forward"], 1):
            if len(rows) == i:
                rows.append([size(shape)])
            of = by_shape[shape]
            for contender in ("efla", *peers):
                still = of.get(f"{contender} (g = 0)")
                rows[i].append(cell(of.get(contender)) + (f" ({still:.3f})" if still else ""))
    return Results("cuda-peers.jsonl", "82682ce4c273").caption(", in ms") + markdown(rows)


def operator():
    """The operator as training calls it: the forward saves states."""
    forward, both = Results("cuda-forward.jsonl", "c65368eb35c7"), Results("cuda-backward.jsonl", "c65368eb35c7")
    rows = [["B × T × H (/ value heads)", "forward, saving states", "backward", "forward + backward"]]
    for r in both.all(op="delta_forward_backward"):
        shape = r["shape"]
        rows.append([size(shape), cell(forward.ms(shape=shape)), cell(both.ms(op="delta_backward", shape=shape)), cell(r["ms"])])
    return both.caption(", in ms", ["cuda-forward.jsonl"]) + markdown(rows)


def small_keys():
    """Forward + backward with K = V = 64 beside K = V = 128 at the same commit."""
    narrow, wide = Results("cuda-sizes.jsonl", "82682ce4c273"), Results("cuda-peers.jsonl", "82682ce4c273")
    rows = [["B × T × H (/ value heads)", "K = V = 64", "K = V = 128", "ratio"]]
    for r in narrow.all(op="delta_forward_backward", dim=64):
        both = wide.ms(op="delta_forward_backward", shape=r["shape"])
        rows.append([size(r["shape"]), cell(r["ms"]), cell(both), f'{r["ms"] / both:.2f}'])
    return narrow.caption(", forward + backward in ms", ["cuda-peers.jsonl"]) + markdown(rows)


def lengths():
    """The forward of one sequence by its length."""
    run = Results("cuda-sizes.jsonl", "82682ce4c273")
    found = run.all(op="delta_forward", dim=128)
    rows = [["tokens", *(f'{int(r["shape"].split("x")[1]):,}' for r in found)], ["forward, ms", *(cell(r["ms"]) for r in found)]]
    return run.caption() + markdown(rows)


def large_keys():
    """Keys and values of 256 dimensions, beside fla, which ran alone."""
    run = Results("cuda-float16.jsonl", "0b9f4a236f71-dirty")
    fla = [r for r in results.read(FOLDER / "cuda-peers-earlier.jsonl") if r.get("dim") == 256 and r["rule"] == "gdn"]
    rows = [["B × T × H", "forward", "fla, forward", "forward + backward", "fla, forward + backward",
             "forward + backward by efla's token recurrence"]]
    for shape in ("16x2048x8", "1x8192x16"):
        peer = {r["op"]: r["ms"] for r in fla if r["shape"] == shape}
        case = {"rule": "gdn", "dim": 256, "shape": shape, "dtype": "bfloat16"}
        rows.append([size(shape), cell(run.ms(op="delta_forward", algorithm="chunk", interval=0, **case)), cell(peer.get("forward")),
                     cell(run.ms(op="delta_forward_backward", algorithm="chunk", **case)), cell(peer.get("forward+backward")),
                     cell(run.ms(op="delta_forward_backward", algorithm="recurrent", **case), 1)])
    return run.caption(", in ms", ["cuda-peers-earlier.jsonl"]) + markdown(rows)


def half(rule, commit, shapes):
    """Times and errors of float16 inputs beside bfloat16."""
    run = Results("cuda-float16.jsonl", commit)
    rows = [["B × T × H (/ value heads)", "forward", "in bfloat16", "forward + backward", "in bfloat16", "errors", "errors in bfloat16"]]
    for shape in shapes:
        times, errors = [], []
        for op, more in (("delta_forward", {"interval": 0}), ("delta_forward_backward", {})):
            cases = [{"op": op, "rule": rule, "dim": 128, "algorithm": "chunk", "shape": shape, "dtype": dtype, **more}
                     for dtype in ("float16", "bfloat16")]
            times += [cell(run.ms(**case)) for case in cases]
            errors.append([run.error(**case) for case in cases])
        rows.append([size(shape), *times, *(", ".join(filter(None, pair)) for pair in zip(*errors))])
    return run.caption(", in ms") + markdown(rows)


def channel_gate():
    """One gate per key channel beside one gate per head."""
    run = Results("cuda-backward.jsonl", "305393307096-dirty")
    rows = [["B × T × H (/ value heads)"] + [f"{text}{more}" for text in ("forward + backward", "backward")
                                             for more in (", per channel", ", per head", ", ratio")]]
    for shape in ("16x2048x8", "1x8192x16", "1x8192x16/64", "1x2048x16"):
        rows.append([size(shape)])
        for op in ("delta_forward_backward", "delta_backward"):
            channel, head = (run.ms(op=op, rule=rule, shape=shape) for rule in ("kda", "gdn"))
            rows[-1] += [cell(channel), cell(head), f"{channel / head:.1f}"]
    return run.caption(", in ms") + markdown(rows)


def float32():
    """Float32 inputs by chunks beside the token recurrence."""
    run = Results("cuda-float32.jsonl", "82ee8ac")
    rows = [["B × T × H", "by chunks", "by the token recurrence"]]
    for r in run.all(op="delta_forward_backward", rule="efla", algorithm="chunk"):
        slow = run.ms(op="delta_forward_backward", rule="efla", algorithm="recurrent", shape=r["shape"])
        rows.append([size(r["shape"]), cell(r["ms"]), cell(slow)])
    return run.caption(", forward + backward in ms") + markdown(rows)


def decode_peers():
    """One decode step of one token beside its peers, in the run of operator_peers."""
    run = Results("cuda-peers.jsonl", "82682ce4c273")
    peers = {(GPU_PEERS[r["contender"].split()[0].rstrip(",")], r["what"].split()[1], r["batch"]): r["ms"]
             for r in results.read(FOLDER / "cuda-peers.jsonl") if r.get("what", "").startswith("decode")}
    rows = [["state", "texts", "efla", "flashinfer", "fla"]]
    for state, texts in STEP_CASES:
        short = {"float32": "fp32", "bfloat16": "bf16"}[state]
        rows.append([state, texts, cell(run.ms(op="delta_step", state=state, batch=texts), 4),
                     *(cell(peers.get((peer, short, texts)), 4) for peer in ("flashinfer", "fla"))])
    return run.caption(", in ms") + markdown(rows)


def decode():
    """Decode steps of one, four and eight tokens."""
    run = Results("cuda-sizes.jsonl", "c65368eb35c7")
    rows = [["state", "texts", "one token", "share of the copy", "four tokens", "eight tokens"]]
    for state, texts in STEP_CASES:
        case = {"op": "delta_step", "dim": 128, "state": state, "batch": texts}
        one = run.all(tokens=1, **case)[0]
        rows.append([state, texts, cell(one["ms"], 4), f'{100 * one["copy_ms"] / one["ms"]:.0f} %',
                     *(cell(run.ms(tokens=tokens, **case), 4) for tokens in (4, 8))])
    return run.caption(", in ms") + markdown(rows)


def training():
    """Training of language models: the median of the steps after the first, or the rate of a whole run."""
    large = Results("gpu-training.jsonl", log="gpu-training.txt", part=1)
    whole = Results("gpu-training.jsonl", log="gpu-training.txt", part=2)
    rate = statistics.median(r["tokens/s"] for r in large.found if r["step"] > 1)
    rows = [["preset", "parameters", "sequences at a time", "tokens/s"],
            ["efla-340m", "342 million", 16, f'{whole.all(mixer="efla")[0]["tokens/s"]:,}'],
            ["efla-1.3b", "1,366 million", 8, f"{rate:,.0f}"]]
    return large.caption() + markdown(rows)


def shares():
    """Where the time of a training step goes."""
    run = Results("gpu-training.jsonl", log="gpu-training.txt", part=4, shares=True)
    return run.caption() + markdown([["", "share"], *([r["part of the time"], f'{r["per cent"]} %'] for r in run.found)])


def two_gpus():
    """Rates of one and of two GPUs at the same tokens per step and GPU."""
    run = Results("gpu-training.jsonl", log="two-gpus.txt")
    rows = [["tokens per step and GPU", "one GPU, tokens/s", "two GPUs, tokens/s", "rate per GPU relative to one GPU"]]
    for name in "ab":
        one, two = (statistics.median(r["median"] for r in run.all(run=f"{name}{gpus}")) for gpus in (1, 2))
        tokens = run.all(run=f"{name}1")[0]["tokens_per_step"]
        rows.append([f"{tokens:,}", f"{one:,.0f}", f"{two:,.0f}", f"{50 * two / one:.1f} %"])
    return run.caption() + markdown(rows)


def layers():
    """The layers around the delta rule in training."""
    run = Results("cuda-layers.jsonl", "89c136ffed35")
    names = {"short_conv": "short convolution of 3072 channels, SiLU", "rms_norm": "RMS norm of 128 columns",
             "rms_norm gated": "RMS norm of 128 columns, gated by SiLU", "add_rms_norm": "residual sum (float32) and RMS norm of 1024 columns",
             "glu": "SwiGLU of 2816 columns"}
    rows = [["layer", "forward, ms", "TB/s", "backward, ms", "TB/s"]]
    for name, text in names.items():
        rows.append([text])
        for direction in ("forward", "backward"):
            (r,) = run.all(op=f"layer/{name}/{direction}")
            rows[-1] += [cell(r["ms"]), f'{r["bytes"] / r["ms"] / 1e9:.1f}']
    return run.caption() + markdown(rows)


def generation():
    """Generation at 1,024 tokens of context."""
    run = Results("cuda-generation.jsonl", "c65368eb35c7")
    rows = [["texts", "weights", "prefill, tokens/s", "ms per step", "tokens/s"]]
    for r in run.found:
        step = r["ms_per_step"]["median"]
        rows.append([r["texts"], r["weights"], f'{r["prefill_tokens_per_s"]:,.0f}', cell(step), f'{1000 * r["texts"] / step:,.0f}'])
    return run.caption() + markdown(rows)


def contexts():
    """Generation by the length of the context."""
    run = Results("cuda-decode.jsonl", log="cuda-decode.txt", part=10, command="efla bench generate")
    found = {(r["environment"]["texts"], r["environment"]["weights"], r["context"]): r for r in run.found}
    rows = [["texts", "weights", "context, tokens", "prefill, tokens/s", "ms per step", "tokens/s"]]
    for (texts, weights, context), r in found.items():
        rows.append([texts, weights, f"{context:,}", f'{r["prefill tokens/s"]:,}', cell(r["ms per step"]), f'{1000 * texts / r["ms per step"]:,.0f}'])
    return run.caption() + markdown(rows)


def softmax():
    """Generation with softmax attention as mixer."""
    run = Results("cuda-decode.jsonl", log="cuda-decode.txt", part=14)
    rows = [["texts", "weights", "ms per step", "tokens/s"]]
    for r in run.all(case="after"):
        rows.append([r["texts"], r["weights"], cell(r["ms per step"]), f'{1000 * r["texts"] / r["ms per step"]:,.0f}'])
    return run.caption() + markdown(rows)


def server():
    """The server's engine with several texts at once."""
    run = Results("gpu-serving.jsonl", "234141ef")
    rows = [["texts at once", "tokens/s", "least", "most"]]
    rows += [[r["texts at once"], *(f"{r[key]:,.0f}" for key in ("tokens/s", "least", "most"))]
             for r in run.found]
    return run.caption() + markdown(rows)


TABLES = {
    "operator-peers": operator_peers, "operator": operator, "small-keys": small_keys, "lengths": lengths, "large-keys": large_keys,
    "float16": lambda: half("gdn", "0b9f4a236f71-dirty", ("16x2048x8", "1x8192x16", "1x8192x16/64")),
    "float16-channel-gate": lambda: half("kda", "132d5cb40b5f", ("16x2048x8", "1x8192x16")),
    "channel-gate": channel_gate, "float32": float32, "decode-peers": decode_peers, "decode": decode, "training": training,
    "shares": shares, "two-gpus": two_gpus, "layers": layers, "generation": generation, "contexts": contexts, "softmax": softmax,
    "server": server,
}


def main(arguments):
    if len(arguments) != 1:
        sys.exit(__doc__)
    page = pathlib.Path(arguments[0])
    text = page.read_text("utf-8")
    missing = set(TABLES) ^ {name for _, name, _ in MARKS.findall(text)}
    if missing:
        sys.exit(f"gpu_tables: {page}: got other marks than the tables: {', '.join(sorted(missing))}")
    page.write_text(MARKS.sub(lambda m: m[1] + TABLES[m[2]]().rstrip("\n") + "\n" + m[3], text), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
