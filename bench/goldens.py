#!/usr/bin/env python3
"""Compares the logits and the greedy tokens of the program efla with the results of flash-linear-attention for the same models.

    bench/goldens.py build/bin/efla FOLDER >> bench/results/accuracy.jsonl

FOLDER holds folders with config.json, model.safetensors and golden.safetensors: input_ids and logits, prompt_ids and
greedy_ids, as flash-linear-attention computed them. Prints one JSON line per model.
"""

import array
import json
import pathlib
import struct
import subprocess
import sys
import tempfile


def read(path):
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            values = array.array({"F32": "f", "I64": "q"}[entry["dtype"]], data[8 + length + begin : 8 + length + end])
            tensors[name] = (entry["shape"], values)
    return tensors


def logits_of(program, model, shape, ids):
    """Returns shape and values of the model's logits for ids of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        header = json.dumps({"input_ids": {"dtype": "I64", "shape": shape, "data_offsets": [0, 8 * len(ids)]}}).encode()
        header += b" " * (-len(header) % 8)
        (folder / "ids").write_bytes(struct.pack("<Q", len(header)) + header + array.array("q", ids).tobytes())
        subprocess.run([program, "logits", model, "--ids", folder / "ids", "--out", folder / "out"], check=True,
                       stdout=subprocess.DEVNULL)
        return read(folder / "out")["logits"]


def main():
    program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    commit = json.loads(subprocess.run([program, "info", "--json"], capture_output=True, check=True).stdout)["commit"]
    print(json.dumps({"environment": {"log": "goldens", "commit": commit, "command": "bench/goldens.py build/bin/efla FOLDER"}}))
    for golden_path in sorted(folder.glob("*/golden.safetensors")):
        golden, source = read(golden_path), golden_path.parent
        with tempfile.TemporaryDirectory() as work:
            model = pathlib.Path(work) / "model"
            subprocess.run([program, "import", source, "--out", model], check=True, stdout=subprocess.DEVNULL)
            _, logits = logits_of(program, model, *golden["input_ids"])
            expected = golden["logits"][1]
            difference = max(abs(a - b) for a, b in zip(logits, expected, strict=True))
            # Greedy decoding gives these tokens where each is the likeliest after those before it.
            prompt, greedy = golden["prompt_ids"][1], golden["greedy_ids"][1]
            ids = [*prompt, *greedy]
            (_, _, vocabulary), values = logits_of(program, model, [1, len(ids)], ids)
            rows = [values[t * vocabulary : (t + 1) * vocabulary] for t in range(len(prompt) - 1, len(ids) - 1)]
            same = sum(row.index(max(row)) == token for row, token in zip(rows, greedy, strict=True))
        largest = max(abs(x) for x in expected)
        print(json.dumps({"model": source.name, "largest_difference": float(f"{difference:.2e}"), "largest_logit": round(largest, 2),
                          "greedy_tokens_same": same, "greedy_tokens": len(greedy)}))


main()
