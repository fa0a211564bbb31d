#!/usr/bin/env python3
"""Compares the logits of exported GGUF files with llama.cpp's.

    tests/nn/llama_logits.py EFLA LLAMA_LOGITS [RESULTS]

EFLA is the program, LLAMA_LOGITS is compiled from llama_logits.cc. Writes small folders of Qwen3.5 with random weights, exports
each as F32, BF16, F16, Q8_0 and Q4_0, and prints, in parts of the largest logit of the folder, how far the logits of efla and of
llama.cpp for the file are from efla's for the folder, and from each other; one line of JSON each goes to RESULTS. Exits with 1
where programs differ by more than 1e-3 with F32. Not a part of the tests that run by themselves, because it needs llama.cpp
and NumPy; without LLAMA_LOGITS it says so and exits with 0.
"""

import json
import os
import struct
import subprocess
import sys
import tempfile

import numpy as np

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5] * 3
TYPES = ("F32", "BF16", "F16", "Q8_0", "Q4_0")
METHOD = ("tests/nn/llama_logits.py: Qwen3.5 models with random weights; largest difference of the logits of 96 tokens, in parts of "
          "the largest logit of efla for the folder, which is in float32")
MOST = 1e-3  # of F32 files; both programs add in float32


def config(value_heads, tied):
    return {"model_type": "qwen3_5_text", "vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6,
            "linear_num_key_heads": 2, "linear_num_value_heads": value_heads, "linear_key_head_dim": 32,
            "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "tie_word_embeddings": tied,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}


def tensors(c, rng, drafts):
    width, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], c["linear_num_value_heads"] * c["linear_value_head_dim"]
    heads, pairs = c["num_attention_heads"] * head, c["num_key_value_heads"] * head

    def matrix(rows, columns):
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm(size):
        return (0.1 * rng.standard_normal(size)).astype(np.float32)

    all = {"model.embed_tokens.weight": rng.standard_normal((c["vocab_size"], width)).astype(np.float32),
           "model.norm.weight": norm(width)}
    if not c["tie_word_embeddings"]:
        all["lm_head.weight"] = matrix(c["vocab_size"], width)
    for i, kind in enumerate(c["layer_types"]):
        p = f"model.layers.{i}."
        all |= {p + "input_layernorm.weight": norm(width), p + "post_attention_layernorm.weight": norm(width),
                p + "mlp.gate_proj.weight": matrix(inner, width), p + "mlp.up_proj.weight": matrix(inner, width),
                p + "mlp.down_proj.weight": matrix(width, inner)}
        if kind == "full_attention":
            p += "self_attn."
            all |= {p + "q_proj.weight": matrix(2 * heads, width), p + "k_proj.weight": matrix(pairs, width),
                    p + "v_proj.weight": matrix(pairs, width), p + "o_proj.weight": matrix(width, heads),
                    p + "q_norm.weight": norm(head), p + "k_norm.weight": norm(head)}
        else:
            p += "linear_attn."
            count = c["linear_num_value_heads"]
            all |= {p + "in_proj_qkv.weight": matrix(2 * keys + values, width), p + "in_proj_z.weight": matrix(values, width),
                    p + "in_proj_b.weight": matrix(count, width), p + "in_proj_a.weight": matrix(count, width),
                    p + "conv1d.weight": (0.5 * rng.standard_normal((2 * keys + values, 1, 4))).astype(np.float32),
                    p + "A_log": rng.uniform(-1, 2, count).astype(np.float32), p + "dt_bias": norm(count),
                    p + "norm.weight": 1 + norm(c["linear_value_head_dim"]), p + "out_proj.weight": matrix(width, values)}
    if drafts:  # a head for drafts, which neither program uses here
        last = "model.layers.3."
        all |= {name.replace(last, "mtp.layers.0."): array for name, array in all.items() if name.startswith(last)}
        all |= {"mtp.fc.weight": matrix(width, 2 * width), "mtp.pre_fc_norm_embedding.weight": norm(width),
                "mtp.pre_fc_norm_hidden.weight": norm(width), "mtp.norm.weight": norm(width)}
    return all


def write_safetensors(path, arrays):
    header, at = {}, 0
    for name, array in arrays.items():
        kind = "F32" if array.dtype == np.float32 else "I64"
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in arrays.values()))


def efla_logits(efla, model, folder):
    subprocess.run([efla, "logits", model, "--ids", folder + "/ids.safetensors", "--out", folder + "/logits", "--device", "cpu"],
                   check=True)
    with open(folder + "/logits", "rb") as file:
        size, = struct.unpack("<Q", file.read(8))
        begin, end = json.loads(file.read(size))["logits"]["data_offsets"]
        file.seek(8 + size + begin)
        return np.frombuffer(file.read(end - begin), np.float32)


def main():
    efla, llama = sys.argv[1:3]
    if not os.path.exists(llama):
        print("skipped: no", llama)
        return 0
    failed = False
    commit = json.loads(subprocess.run([efla, "info", "--json"], check=True, capture_output=True).stdout)["commit"]
    lines = [{"environment": {"commit": commit, "method": METHOD}}]
    for seed, (value_heads, tied) in enumerate([(2, True), (2, False), (4, True), (6, False)]):
        with tempfile.TemporaryDirectory() as folder:
            c = config(value_heads, tied)
            with open(folder + "/config.json", "w") as file:
                json.dump(c, file)
            write_safetensors(folder + "/model.safetensors", tensors(c, np.random.default_rng(seed), drafts=seed == 2))
            write_safetensors(folder + "/ids.safetensors", {"input_ids": np.array([IDS], np.int64)})
            with open(folder + "/ids", "w") as file:
                file.write(" ".join(map(str, IDS)))
            exact = efla_logits(efla, folder, folder)
            for kind in TYPES:
                path = f"{folder}/{kind}.gguf"
                subprocess.run([efla, "export", folder, "--gguf", path, "--gguf-type", kind], check=True, stdout=subprocess.DEVNULL)
                subprocess.run([llama, path, folder + "/ids", folder + "/other"], check=True)
                own, other = efla_logits(efla, path, folder), np.fromfile(folder + "/other", np.float32)
                apart = [float(np.abs(a - b).max() / np.abs(exact).max()) for a, b in ((own, exact), (other, exact), (own, other))]
                lines.append({"value_heads": value_heads, "key_heads": 2, "tied": tied, "type": kind, "efla_to_folder": apart[0],
                              "llama_to_folder": apart[1], "efla_to_llama": apart[2]})
                print("{} value heads, {}: efla {:.1e}, llama.cpp {:.1e}, apart {:.1e}".format(value_heads, kind, *apart))
                failed |= kind == "F32" and not max(apart) <= MOST
    if len(sys.argv) > 3:
        with open(sys.argv[3], "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
