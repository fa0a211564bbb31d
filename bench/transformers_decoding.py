#!/usr/bin/env python3
"""Times decoding of one text by transformers' generate() and by `efla generate`, interleaved, with the same weights on a CPU.

    PYTHONPATH=python EFLA_TORCH_LIBRARY=… bench/transformers_decoding.py build/bin/efla --threads 2 --out bench/results/decoding-transformers.jsonl

The model is a Gated DeltaNet of efla.hf with random weights: 12 layers, width 768, 32,000 words. A text has a prompt of 64 tokens; a
step is the time between two tokens of its greedy reply, the median over rounds of the mean in a reply.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import transformers

import efla
from efla.hf import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

PROMPT, TOKENS = 64, 64


def step_of_transformers(model, ids):
    """Returns milliseconds per token after the first."""
    seconds = []
    for tokens in (1, 1 + TOKENS):
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        seconds.append(time.perf_counter() - began)
    return 1e3 * (seconds[1] - seconds[0]) / TOKENS


def step_of_efla(program, folder, threads, weights):
    """Returns milliseconds per token after the first, without drafts."""
    command = [program, "generate", folder, "--tokenizer", "bytes", "--prompt", "p" * PROMPT, "--max-tokens", str(1 + TOKENS)]
    options = ["--json", "--device", "cpu", "--draft-tokens", "0", "--threads", str(threads), "--weights", weights]
    reply = json.loads(subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout)
    return 1e3 / reply["decode_tokens_per_s"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    transformers.logging.set_verbosity_error()
    config = GatedDeltaNetConfig(hidden_size=768, num_hidden_layers=12, num_heads=6, head_dim=128, expand_v=1.0, eos_token_id=None)
    model = GatedDeltaNetForCausalLM(config).eval()
    parameters = sum(p.numel() for p in model.parameters())
    ids = torch.randint(32000, (1, PROMPT))
    steps = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for _ in range(arguments.rounds):
            steps.setdefault("transformers", []).append(step_of_transformers(model, ids))
            for weights in ("float32", "bfloat16", "int8"):
                name = f"efla generate, {weights}"
                steps.setdefault(name, []).append(step_of_efla(arguments.program, folder, arguments.threads, weights))
    for name, times in steps.items():
        result = {
            "study": "transformers-decoding",
            "contender": name,
            "parameters": parameters,
            "ms_per_token": {"median": statistics.median(times), "min": min(times), "max": max(times)},
            "threads": arguments.threads,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "efla": efla.__version__,
        }
        print(f"{name:<26}{result['ms_per_token']['median']:>8.1f} ms ({min(times):.1f} to {max(times):.1f})")
        if arguments.out:
            with open(arguments.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    print(f"{parameters:,} parameters, {arguments.threads} threads")


if __name__ == "__main__":
    sys.exit(main())
