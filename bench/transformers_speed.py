#!/usr/bin/env python3
"""Times models of transformers as they are installed and with efla.patch_transformers(), interleaved in one process.

    PYTHONPATH=python EFLA_TORCH_LIBRARY=… bench/transformers_speed.py --device cpu --threads 2 --out bench/results/transformers.jsonl

The models have random weights and the shapes of small Qwen3.5, Qwen3-Next, OLMo-Hybrid and Kimi-Linear models: 8 layers, of which 6
have a delta rule, and width 1024. As installed they take flash-linear-attention's functions on a GPU where it is installed, and the
reference in PyTorch elsewhere. Printed and written: seconds (medians) of a prefill without gradients, of forward + backward, and of
the delta rules in a prefill, with their share of it.
"""

import argparse
import contextlib
import importlib
import json
import pathlib
import re
import statistics
import subprocess
import sys
import time
import warnings

import torch
import transformers

import efla

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/python"))
from transformers_models import MODELS, Sizes, make  # noqa: E402 (of the tests)

SIZES = Sizes(
    vocabulary=32000,
    width=1024,
    inner_width=2816,
    layers=8,
    positions=65536,
    heads=8,
    kv_heads=2,
    head_dim=128,
    delta_heads=16,
    delta_value_heads=16,
    delta_key_dim=128,
    delta_value_dim=128,
    latent=256,
    rope_dim=64,
    experts=8,
    expert_width=512,
)
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")


class Clock:
    """Adds up the seconds between enter and exit, waiting for the GPU at both."""

    def __init__(self, device):
        self.seconds, self.wait = 0.0, torch.cuda.synchronize if device == "cuda" else lambda: None

    def __enter__(self):
        self.wait()
        self.began = time.perf_counter()

    def __exit__(self, *_):
        self.wait()
        self.seconds += time.perf_counter() - self.began


def delta_seconds(modeling, run, device):
    """Returns the seconds of `run` that the delta rules of a model's module take."""
    clock, originals = Clock(device), {name: getattr(modeling, name) for name in DELTA_RULES if hasattr(modeling, name)}

    def timed(function):
        def call(*arguments, **named):
            with clock:
                return function(*arguments, **named)

        return call

    for name, function in originals.items():
        setattr(modeling, name, timed(function))
    try:
        run()
    finally:
        for name, function in originals.items():
            setattr(modeling, name, function)
    return clock.seconds


def measure(name, options):
    modeling, made = make(name, SIZES)
    made = made.to(options.device, getattr(torch, options.dtype))
    ids = torch.randint(3, SIZES.vocabulary, (options.batch, options.tokens), device=options.device)

    @torch.no_grad()
    def prefill():
        made(ids, use_cache=True, logits_to_keep=1)

    def train():
        made(ids, labels=ids, use_cache=False).loss.backward()
        made.zero_grad()

    seconds = {(run.__name__, patched): [] for run in (prefill, train) for patched in (False, True)}
    refused = set()
    parts, shares = {False: [], True: []}, {False: [], True: []}
    for round_ in range(options.rounds + 1):  # the first warms up
        for patched in (False, True):
            with efla.patch_transformers() if patched else contextlib.nullcontext():
                for run in (prefill, train):
                    clock = Clock(options.device)
                    if (run, patched) in refused:
                        continue
                    try:
                        with clock:
                            run()
                    except RuntimeError as error:  # flash-linear-attention refuses some versions of Triton
                        if patched or run is not train or "Triton" not in str(error):
                            raise
                        print(f"{name}: forward + backward as installed: {error}", file=sys.stderr)
                        made.zero_grad()
                        refused.add((run, patched))
                        continue
                    if round_ > 0:
                        seconds[run.__name__, patched].append(clock.seconds)
                if round_ > 0:
                    whole = Clock(options.device)
                    with whole:
                        part = delta_seconds(modeling, prefill, options.device)
                    parts[patched].append(part)
                    shares[patched].append(part / whole.seconds)
    row = {"model": name, "parameters": sum(p.numel() for p in made.parameters())}
    taken = {run: [seconds[run, patched] for patched in (False, True)] for run in ("prefill", "train")}
    for part, (before, after) in {**taken, "delta_rules_of_prefill": [parts[False], parts[True]]}.items():
        before, after = statistics.median(before) if before else None, statistics.median(after)
        row[part] = {"installed": before, "efla": after, "ratio": before and before / after}
    row["delta_share_of_prefill"] = {kind: statistics.median(shares[patched]) for kind, patched in (("installed", False), ("efla", True))}
    return row


def processor():
    """Returns the processor's name, "CPU" where the system does not tell."""
    info = pathlib.Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.is_file() else []
    return names[0] if names else "CPU"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    folder = pathlib.Path(__file__).resolve().parent
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True).stdout.strip()
    settings = {name: value for name, value in vars(options).items() if name not in ("models", "out")}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "commit": commit}
    versions["on"] = torch.cuda.get_device_name() if options.device == "cuda" else processor()
    if importlib.util.find_spec("fla"):
        versions["fla"] = importlib.import_module("fla").__version__
    columns = ("prefill, s", "forward + backward, s", "delta rules of the prefill, s")
    print(f"{'model':12}", *(f"{column:>30}" for column in columns), f"{'their share':>14}")
    for name in options.models.split(","):
        row = measure(name, options)
        runs = [row[part] for part in ("prefill", "train", "delta_rules_of_prefill")]
        shown = [
            f"{run['installed']:9.4f} → {run['efla']:8.4f} ({run['ratio']:4.2f} ×)" if run["installed"] else f"refused → {run['efla']:8.4f}"
            for run in runs
        ]
        share = row["delta_share_of_prefill"]
        print(f"{name:12}", *(f"{text:>30}" for text in shown), f"{share['installed']:7.0%} → {share['efla']:.0%}", flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps({**row, **settings, **versions}) + "\n")


if __name__ == "__main__":
    main()
