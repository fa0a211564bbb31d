#!/usr/bin/env python3
"""Times what a call of efla's functions from Python costs beside its kernels.

    python3 bench/call_overhead.py [--device cpu|cuda] [--out FILE.jsonl]

On a GPU: a chunk function and its gradients, called one time after the other, against a CUDA graph that replays the same calls. If
a call's kernels take longer than Python needs for the next call, both are equal. On short sequences the kernels are shorter, and the
first time is what Python needs. On a CPU: tokens and states so small that the call is nearly all.
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


def calls_of(function, x):
    """Returns a forward, and a forward with its backward, of a function of sequences with the arguments x."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in x.items()}
    gradient = torch.randn_like(x["v"])

    @torch.no_grad()
    def forward():
        return function(**x, use_qk_l2norm_in_kernel=True, output_final_state=True)

    def forward_and_backward():
        return torch.autograd.grad(function(**leaves, use_qk_l2norm_in_kernel=True)[0], list(leaves.values()), gradient)

    return {"forward": forward, "forward + backward": forward_and_backward}


def repeated(call):
    """Returns a function that makes CALLS calls."""

    def calls():
        for _ in range(CALLS):
            call()

    return calls


def replayed(calls):
    """Returns the replay of a CUDA graph of the calls."""
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay


def on_gpu(rounds):
    rows = []
    for name, function in (("chunk_gated_delta_rule", efla.chunk_gated_delta_rule), ("chunk_efla", efla.chunk_efla)):
        for tokens in (64, 2048):
            x = tensors(tokens, 16, 128, "cuda", torch.bfloat16)
            for what, call in calls_of(function, x).items():
                eager, graph = (
                    micros_per_call(run, CALLS, torch.cuda.synchronize, rounds) for run in (repeated(call), replayed(repeated(call)))
                )
                rows.append({"call": f"{name}, {what}, 1 × {tokens} × 16, K = V = 128", "eager_us": eager, "graph_us": graph})
    return rows


def on_cpu(rounds):
    x = tensors(1, 1, 8, "cpu", torch.float32)
    token = {name: tensor[:, 0] for name, tensor in x.items()}
    state = torch.zeros(1, 1, 8, 8)

    @torch.no_grad()
    def step():
        return efla.delta_rule_step(**token, state=state, step="exact")

    calls = {"delta_rule_step": step}
    calls.update({f"chunk_gated_delta_rule, {what}": call for what, call in calls_of(efla.chunk_gated_delta_rule, x).items()})
    return [
        {"call": f"{name}, 1 × 1, K = V = 8", "eager_us": micros_per_call(repeated(call), CALLS, lambda: None, rounds)}
        for name, call in calls.items()
    ]


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
