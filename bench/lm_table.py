#!/usr/bin/env python3
"""Table 1 of the EFLA paper at the size of a laptop: held-out perplexity of language models that differ in their mixer.

    efla data tokenize TRAIN.txt --tokenizer bytes --out tokens/train
    efla data tokenize VALID.txt --tokenizer bytes --out tokens/validation
    bench/lm_table.py --efla build/bin/efla --out runs/table1 --results bench/results/lm-table1.json

Each mixer is trained at three learning rates (appendix C of the paper), then with two more seeds at the best of them, chosen on
the held-out text that the table is of. The model is that of configs/table1.toml. A run that an interruption left is gone on
with; one that is finished is not made again.
"""

import argparse
import concurrent.futures
import json
import math
import pathlib
import statistics
import subprocess
import sys

MIXERS = ["efla", "efla-adaptive", "efla-loose", "deltanet", "gdn"]
RATES = [1e-3, 3e-3, 1e-2]
SEEDS = [1, 2, 3]
CONFIG = "configs/table1.toml"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--efla", default="build/bin/efla", help="the program")
    parser.add_argument("--tokens", default="tokens", help="folder that holds the shards train and validation")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the runs")
    parser.add_argument("--results", type=pathlib.Path, required=True, help="JSON file for the table")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
    return parser.parse_args()


def settings(tokens, mixer, rate, seed):
    values = {
        "model.mixer": mixer,
        "data.train": f"{tokens}/train",
        "data.validation": f"{tokens}/validation",
        "training.lr": repr(rate),
        "training.min_lr": repr(rate / 10),
        "training.seed": seed,
    }
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def records(folder):
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be cut by a kill


def final_evaluation(folder, steps):
    """The evaluation after the last step, or None while the run is unfinished."""
    found = [r for r in records(folder) if r["event"] == "evaluation" and r["step"] == steps]
    return found[-1] if found and (folder / "checkpoints" / f"step-{steps:06d}").exists() else None


def run_program(command, log):
    """Whether the run came to its end: False where its loss was not finite, as the program says."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log.write_text(done.stdout)
    if done.returncode != 0 and "training stopped at step" not in done.stdout:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}; see {log}")
    return done.returncode == 0


def train(args, steps, mixer, rate, seed):
    """One run of the table, trained where that is still to do. A loss that is not finite ends it: it has no perplexity."""
    folder = args.out / f"{mixer}-lr{rate:g}-seed{seed}"
    result = {"mixer": mixer, "lr": rate, "seed": seed}
    diverged = args.out / f"{folder.name}.diverged"
    if not diverged.exists() and final_evaluation(folder, steps) is None:
        new = [args.efla, "train", "lm", CONFIG, *settings(args.tokens, mixer, rate, seed), "--out", str(folder)]
        command = [args.efla, "train", "lm", "--resume", str(folder)] if (folder / "run.json").exists() else new
        if not run_program([*command, "--threads", "1"], args.out / f"{folder.name}.log"):
            diverged.touch()
    evaluation = None if diverged.exists() else final_evaluation(folder, steps)
    if evaluation is None or not math.isfinite(evaluation["perplexity"] or math.nan):
        return result | {"diverged": True, "perplexity": None}
    return result | {
        "diverged": False,
        "tokens": evaluation["tokens"],
        "perplexity": evaluation["perplexity"],
        "bits_per_byte": evaluation["bits_per_byte"],
    }


def loss_of(run):
    return math.inf if run["diverged"] else run["perplexity"]


def row(mixer, runs):
    values = [run["perplexity"] for run in runs if not run["diverged"]]
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {
        "mixer": mixer,
        "lr": runs[0]["lr"],
        "seeds": [run["seed"] for run in runs],
        "diverged": sum(run["diverged"] for run in runs),
        "perplexity": statistics.fmean(values) if values else None,
        "standard_error": None if deviation is None else deviation / math.sqrt(len(values)),
    }


def main():
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = pathlib.Path(CONFIG).read_text().splitlines()
    steps = next(int(line.split("=")[1].split("#")[0]) for line in lines if line.startswith("steps"))
    pool = concurrent.futures.ThreadPoolExecutor(args.jobs)
    try:
        sweep = {m: [] for m in MIXERS}
        for rate in RATES:
            for m in MIXERS:
                sweep[m].append(pool.submit(train, args, steps, m, rate, SEEDS[0]))
        # The other seeds of a mixer as soon as its own rates are done, so that no job waits for the slowest.
        more, waiting = {}, list(MIXERS)
        while waiting:
            concurrent.futures.wait([sweep[m][-1] for m in waiting], return_when=concurrent.futures.FIRST_COMPLETED)
            for m in [m for m in waiting if sweep[m][-1].done()]:
                waiting.remove(m)
                sweep[m] = [run.result() for run in sweep[m]]
                best = min(sweep[m], key=loss_of)
                more[m] = [pool.submit(train, args, steps, m, best["lr"], seed) for seed in SEEDS[1:]]
        more = {m: [run.result() for run in more[m]] for m in MIXERS}
    finally:
        pool.shutdown(cancel_futures=True)
    table = [row(m, [min(sweep[m], key=loss_of), *more[m]]) for m in MIXERS]
    table.sort(key=lambda r: math.inf if r["perplexity"] is None else r["perplexity"])
    version = json.loads(subprocess.run([args.efla, "info", "--json"], capture_output=True, check=True).stdout)
    runs = [run for m in MIXERS for run in sweep[m] + more[m]]
    command = " ".join(["bench/lm_table.py", *sys.argv[1:]])
    results = {"table": table, "runs": runs, "environment": version, "command": command}
    args.results.write_text(json.dumps(results, indent=1) + "\n")
    for r in table:
        error = "" if r["standard_error"] is None else f" ± {r['standard_error']:.3f}"
        perplexity = "diverged" if r["perplexity"] is None else f"{r['perplexity']:.3f}{error}"
        print(f"{r['mixer']:14} lr {r['lr']:g}  perplexity {perplexity}")


main()
