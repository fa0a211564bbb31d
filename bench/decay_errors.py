#!/usr/bin/env python3
"""What rounding does to decays: the figures of docs/numerics.md and docs/ops/delta_rule_step.md.

    PYTHONPATH=python EFLA_TORCH_LIBRARY=build/python/efla_torch.so bench/decay_errors.py >> bench/results/accuracy.jsonl

Relative errors against float64 on the same inputs. First float32 with equal weak decays over long sequences, then a state in
bfloat16 after 1,000 decode steps. One JSON line per result.
"""

import json

import torch

import efla

DECAYS = (0.0, -1e-3, -3e-3, -1e-2, -1e-1)


def error(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


def widened(tensors):
    return {name: tensor.double() for name, tensor in tensors.items()}


def write(line):
    print(json.dumps(line))


def write_weak_decays(tokens, g):
    """Writes errors of a state that is only decayed (k = 0) and of one that keys write to, for both algorithms."""
    torch.manual_seed(0)
    size = 16
    x = {
        "q": torch.randn(1, tokens, 1, size),
        "k": 0.1 * torch.randn(1, tokens, 1, size),
        "v": torch.randn(1, tokens, 1, size),
        "beta": torch.rand(1, tokens, 1),
        "g": torch.full((1, tokens, 1), g),
        "initial_state": torch.randn(1, 1, size, size),
    }
    silent = {**x, "k": torch.zeros_like(x["k"])}
    for function in (efla.chunk_efla, efla.fused_recurrent_efla):
        o, state = function(**x, output_final_state=True)
        o64, state64 = efla.chunk_efla(**widened(x), output_final_state=True)
        decayed = function(**silent, output_final_state=True)[1]
        decayed64 = efla.chunk_efla(**widened(silent), output_final_state=True)[1]
        errors = {"error_o": error(o, o64), "error_state": error(state, state64), "error_only_decayed": error(decayed, decayed64)}
        write({"tokens": tokens, "g": g, "function": function.__name__, **{name: float(f"{e:.1e}") for name, e in errors.items()}})


def unit(*shape):
    x = torch.randn(*shape)
    return x / x.norm(dim=-1, keepdim=True)


def bfloat16_state_error(size, g, largest_beta, first=0.0, tokens=1000, heads=8, axes=False):
    """Returns the state's error after `tokens` tokens; `first` is the deviation of the first state, `axes` gives keys along one axis each."""
    torch.manual_seed(0)
    q, k = unit(1, tokens, heads, size), unit(1, tokens, heads, size)
    if axes:
        k = torch.nn.functional.one_hot(torch.randint(size, (1, tokens, heads)), size).float()
    v, beta = torch.randn(1, tokens, heads, size), largest_beta * torch.rand(1, tokens, heads)
    decay = torch.full((1, tokens, heads), g)
    begin = (first * torch.randn(1, heads, size, size)).bfloat16()
    state = begin.clone()
    for t in range(tokens):
        efla.delta_rule_step(q[:, t], k[:, t], v[:, t], beta[:, t], state, decay[:, t], step="exact")
    x = widened({"q": q, "k": k, "v": v, "beta": beta, "g": decay, "initial_state": begin})
    return error(state, efla.chunk_efla(**x, output_final_state=True)[1])


def write_bfloat16_states(title, **options):
    for largest_beta in (1.0, 0.01):
        errors = {f"{g:g}": round(1e2 * bfloat16_state_error(g=g, largest_beta=largest_beta, **options), 1) for g in DECAYS}
        write({"case": title, "beta_below": largest_beta, "error_percent": errors})


def main():
    torch.set_num_threads(1)
    write({"environment": {"log": "decay_errors", "torch": torch.__version__}})
    write({"environment": {"part": 1, "about": "float32: relative errors"}})
    for tokens in (2048, 16384):
        for g in (-1e-4, -1e-3):
            write_weak_decays(tokens, g)
    write({"environment": {"part": 2, "about": "bfloat16 state after 1,000 tokens: relative errors, by g"}})
    for size in (16, 64, 128):
        write_bfloat16_states(f"K = {size}", size=size)
    write_bfloat16_states("K = 64, first state of variance 1", size=64, first=1.0)
    write_bfloat16_states("K = 64, keys along one axis each", size=64, axes=True)


main()
