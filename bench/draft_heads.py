#!/usr/bin/env python3
"""Times `efla generate` with and without --draft-head, by turns, with heads that are right in a chosen part of their tokens.

    bench/draft_heads.py build/bin/efla FOLDER > bench/results/draft-heads.jsonl

FOLDER has a Qwen3.5 with tied embeddings; its values do not matter. A copy gets a head (mtp), and its layers add zeros, with all of
their products computed: the likeliest token after a token is this token itself, and the other tokens are drawn with a probability that
the temperature sets. The head copies the embedding of the last token, so it drafts the likeliest token; with the sign of the embedding
turned it drafts a token that is never drawn. Prompt lookup, which would draft repetitions, is off. Every pair of replies is compared.
Rates are in processor time of one thread, because it depends less on other programs: of a reply without the time of its first token.
"""

import argparse
import array
import json
import math
import pathlib
import resource
import statistics
import struct
import subprocess
import sys
import tempfile

HEAD = "mtp."
ZEROED = ("out_proj.weight", "o_proj.weight", "down_proj.weight")
BYTES = 256  # tokens that the tokenizer `bytes` draws from, but for two


def narrow(value):
    """Returns the bytes of a number in bfloat16, rounded towards zero."""
    return struct.pack("<f", value)[2:]


def numbers(data):
    """Returns the numbers of bytes in bfloat16."""
    wide = bytearray(2 * len(data))
    wide[2::4], wide[3::4] = data[::2], data[1::2]
    return array.array("f", bytes(wide))


class Tensors:
    """The tensors of a safetensors file in bfloat16."""

    def __init__(self, path):
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            self.header = json.loads(file.read(size))
            self.data = file.read()
        self.header.pop("__metadata__", None)

    def find(self, end):
        """Returns the one name of the text model with this end."""
        return min((name for name in self.header if name.endswith(end) and not name.startswith(HEAD)), key=len)

    def shape(self, name):
        return self.header[name]["shape"]

    def bytes(self, name):
        begin, end = self.header[name]["data_offsets"]
        return self.data[begin:end]


def write(path, tensors):
    """Writes tensors (name, shape, type, bytes)."""
    header, at = {}, 0
    for name, shape, dtype, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for *_, data in tensors:
            file.write(data)


def model_tensors(source):
    for name, entry in source.header.items():
        if name.startswith(HEAD):
            continue
        data = source.bytes(name)
        yield name, entry["shape"], entry["dtype"], bytes(len(data)) if name.endswith(ZEROED) else data


def head_tensors(source, sign):
    """Returns a head that drafts the token whose embedding is nearest to ±e."""
    key_norm = next(name for name in source.header if name.endswith("self_attn.k_norm.weight"))
    layer = key_norm.removesuffix("self_attn.k_norm.weight")
    width = source.shape(source.find("embed_tokens.weight"))[1]
    rows = b"".join(bytes(2 * i) + narrow(sign) + bytes(2 * (2 * width - i - 1)) for i in range(width))
    tensors = [(HEAD + "fc.weight", [width, 2 * width], "BF16", rows)]
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors.append((f"{HEAD}{name}.weight", [width], "BF16", bytes(2 * width)))
    norm = next(name for name in source.header if name.endswith("norm.weight") and "layers." not in name)
    tensors.append((HEAD + "norm.weight", source.shape(norm), source.header[norm]["dtype"], source.bytes(norm)))
    for name, entry in source.header.items():
        if not name.startswith(layer):
            continue
        data = source.bytes(name)
        own = HEAD + "layers.0." + name.removeprefix(layer)
        tensors.append((own, entry["shape"], entry["dtype"], bytes(len(data)) if own.endswith(ZEROED) else data))
    return tensors


def temperatures(source, wanted):
    """Returns per probability the temperature at which the likeliest token of 16 tokens has it, on average."""
    name = source.find("embed_tokens.weight")
    width = source.shape(name)[1]
    rows = numbers(source.bytes(name)[: 2 * width * BYTES])
    norm = numbers(source.bytes(next(n for n in source.header if n.endswith("norm.weight") and "layers." not in n)))
    embeddings = [rows[i * width : (i + 1) * width] for i in range(BYTES)]
    logits = []
    for e in embeddings[97:113]:
        rms = math.sqrt(sum(x * x for x in e) / width + 1e-6)
        hidden = [x / rms * (1 + w) for x, w in zip(e, norm)]
        logits.append([sum(h * x for h, x in zip(hidden, other)) for other in embeddings])

    def probability(temperature):
        parts = []
        for own in logits:
            most = max(own)
            parts.append(1 / sum(math.exp((x - most) / temperature) for x in own))
        return statistics.mean(parts)

    found = {}
    for p in wanted:
        low, high = 1e-3, 1e3
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if probability(middle) > p else (low, middle)
        found[p] = round(low, 4)
    return found


def reply(arguments, folder, more):
    command = [arguments.efla, "generate", folder, "--tokenizer", "bytes", "--prompt", "abcd", "--json"]
    command += ["--draft-tokens", "0", "--threads", "1", "--weights", arguments.weights, *more]
    seconds = {}
    for tokens in (1, arguments.tokens):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run([*command, "--max-tokens", str(tokens)], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds[tokens] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(result.stdout), (arguments.tokens - 1) / (seconds[arguments.tokens] - seconds[1])


def measure(arguments, folder, right, sampling):
    """Prints the rates of one head."""
    rates, lines = {}, {}
    for turn in range(arguments.turns):
        for most in [0, *arguments.head]:
            line, rate = reply(arguments, folder, ["--draft-head", str(most), *sampling, "--seed", str(turn)])
            if most == 0:
                text = line["text"]
            if line["text"] != text:
                sys.exit(f"--draft-head {most} changes the reply")
            rates.setdefault(most, []).append(rate)
            lines[most] = line
    for most in arguments.head:
        ratios = [b / a for a, b in zip(rates[0], rates[most])]
        print(json.dumps({
            "right": right, "draft head": most, "weights": arguments.weights,
            "without, tokens/s": round(statistics.median(rates[0]), 2), "with, tokens/s": round(statistics.median(rates[most]), 2),
            "with / without": round(statistics.median(ratios), 3), "lowest, highest": [round(min(ratios), 3), round(max(ratios), 3)],
            "drafted": lines[most]["drafted_tokens"], "accepted": lines[most]["accepted_tokens"],
        }), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("efla")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--head", type=int, nargs="+", default=[7])
    parser.add_argument("--right", type=float, nargs="+", default=[0.0, 0.5, 0.8, 1.0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--weights", default="float32")
    arguments = parser.parse_args()
    source = Tensors(arguments.folder / "model.safetensors")
    heat = temperatures(source, [p for p in arguments.right if 0 < p < 1])
    with tempfile.TemporaryDirectory(dir=arguments.folder.parent) as folder:
        root = pathlib.Path(folder)
        write(root / "model.safetensors", list(model_tensors(source)))
        for sign in (1.0, -1.0):
            own = root / ("right" if sign > 0 else "wrong")
            own.mkdir()
            (own / "config.json").write_bytes((arguments.folder / "config.json").read_bytes())
            (own / "model-00001-of-00002.safetensors").symlink_to(root / "model.safetensors")
            head = head_tensors(source, sign)
            write(own / "model-00002-of-00002.safetensors", head)
            places = {name: "model-00001-of-00002.safetensors" for name in source.header if not name.startswith(HEAD)}
            places |= {name: "model-00002-of-00002.safetensors" for name, *_ in head}
            (own / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        for right in arguments.right:
            sampling = ["--temperature", str(heat[right])] if right in heat else []
            measure(arguments, root / ("right" if right > 0 else "wrong"), right, sampling)


if __name__ == "__main__":
    main()
