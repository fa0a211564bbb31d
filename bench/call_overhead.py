#!/usr/bin/env python3
"""Times what a call of efla's functions from Python costs beside its kernels.

    python3 bench/call_overhead.py [--device cpu|cuda] [--out FILE.jsonl]

On a GPU: a chunk function called one time after the other, against a CUDA graph that replays the same calls. If a call's kernels
take longer than Python needs for the next call, both are equal. On short sequences the kernels are shorter, and the first time is
what Python needs. On a CPU: a decode step with states so small that the call is nearly all.
Medians of --rounds rounds, in microseconds per call.
"""

import argparse
import json
import pathlib
import statistics
import time

import torch

import efla

CALLS = 100  # per round


def tensors(tokens, heads, size, device, dtype):
    """q, k, v, g and beta of one sequence."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, size, device=device, dtype=dtype) for _ in range(3))
    beta = torch.rand(1, tokens, heads, device=device, dtype=dtype)
    return {"q": q, "k": k, "v": v, "g": -torch.rand(1, tokens, heads, device=device), "beta": beta}


def micros_per_call(run, calls, wait, rounds):
    """Returns the median over rounds of the time of `run`, which makes `calls` calls, after one round that warms up."""
    seconds = []
    for _ in range(rounds + 1):
        wait()
        began = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(seconds[1:]) / calls


@torch.no_grad()
def on_gpu(rounds):
    rows = []
    for name, function in (("chunk_gated_delta_rule", efla.chunk_gated_delta_rule), ("chunk_efla", efla.chunk_efla)):
        for tokens in (64, 2048):
            x = tensors(tokens, 16, 128, "cuda", torch.bfloat16)

            def call():
                return function(**x, use_qk_l2norm_in_kernel=True, output_final_state=True)

            def calls():
                for _ in range(CALLS):
                    call()

            calls()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                calls()
            eager = micros_per_call(calls, CALLS, torch.cuda.synchronize, rounds)
            replayed = micros_per_call(graph.replay, CALLS, torch.cuda.synchronize, rounds)
            rows.append({"call": f"{name}, 1 × {tokens} × 16, K = V = 128", "eager_us": eager, "graph_us": replayed})
    return rows


@torch.no_grad()
def on_cpu(rounds):
    x = {name: tensor[:, 0] for name, tensor in tensors(1, 1, 8, "cpu", torch.float32).items()}
    state = torch.zeros(1, 1, 8, 8)

    def calls():
        for _ in range(CALLS):
            efla.delta_rule_step(**x, state=state, step="exact")

    micros = micros_per_call(calls, CALLS, lambda: None, rounds)
    return [{"call": "delta_rule_step, 1 × 1, K = V = 8", "eager_us": micros}]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, help="append one JSON line per call")
    options = parser.parse_args()
    for row in (on_gpu if options.device == "cuda" else on_cpu)(options.rounds):
        print(", ".join(f"{name} {value:.1f}" if isinstance(value, float) else value for name, value in row.items()))
        if options.out:
            with options.out.open("a") as out:
                out.write(json.dumps({**row, "device": options.device, "torch": torch.__version__}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
