"""Models that flash-linear-attention made and ran on a GPU, run here: the same logits, the same greedy tokens.

The files lie beside the checkout; where they do not, the tests are skipped.
"""

import json
import os
import pathlib
import struct
import unittest

import torch
import torch.nn.functional as F

from efla.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention

SHARED = pathlib.Path(os.environ.get("EFLA_SHARED_DATA") or pathlib.Path(__file__).parents[3] / "shared" / "data")
LAYERS = {
    "delta_net": (DeltaNet, "expand_k expand_v num_heads use_beta use_gate qk_activation qk_norm"),
    "gated_deltanet": (GatedDeltaNet, "expand_v head_dim num_heads num_v_heads use_gate"),
    "kda": (KimiDeltaAttention, "expand_v head_dim num_heads num_v_heads safe_gate lower_bound"),
}
COMMON = "hidden_size use_short_conv allow_neg_eigval conv_size norm_eps"


def read_safetensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            dtype = {"F32": torch.float32, "I64": torch.int64}[entry["dtype"]]
            raw = bytearray(data[8 + length + begin : 8 + length + end])
            tensors[name] = torch.frombuffer(raw, dtype=dtype).view(entry["shape"])
    return tensors


class Model:
    """A language model of flash-linear-attention's, with this package's layers."""

    def __init__(self, folder):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.weights = read_safetensors(folder / "model.safetensors")
        self.eps = config["norm_eps"]
        layer, names = LAYERS[config["model_type"]]
        self.mixers = []
        for i in range(config["num_hidden_layers"]):
            mixer = layer(layer_idx=i, **{name: config[name] for name in f"{COMMON} {names}".split()})
            prefix = f"model.layers.{i}.attn."
            mixer.load_state_dict(
                {name[len(prefix) :]: tensor for name, tensor in self.weights.items() if name.startswith(prefix)}
            )
            self.mixers.append(mixer)

    def norm(self, x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weights[f"{name}.weight"]

    def __call__(self, ids, cache=None):
        x = F.embedding(ids, self.weights["model.embeddings.weight"])
        for i, mixer in enumerate(self.mixers):
            block = f"model.layers.{i}"
            x = x + mixer(self.norm(x, f"{block}.attn_norm"), past_key_values=cache, use_cache=cache is not None)[0]
            h = self.norm(x, f"{block}.mlp_norm")
            gate, up, down = (self.weights[f"{block}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
        return F.linear(self.norm(x, "model.norm"), self.weights["lm_head.weight"])


@unittest.skipUnless((SHARED / "fla-goldens").is_dir(), f"no models in {SHARED}/fla-goldens")
class Goldens(unittest.TestCase):
    def test_logits_and_greedy_tokens(self):
        for name in ("delta_net-a", "gdn-a", "kda-a"):
            folder = SHARED / "fla-goldens" / name
            model, golden = Model(folder), read_safetensors(folder / "golden.safetensors")
            with torch.no_grad():
                difference = (model(golden["input_ids"]) - golden["logits"]).abs().max()
                self.assertLess(float(difference), 2e-5, name)
                cache, ids, tokens = {}, golden["prompt_ids"], []
                for _ in golden["greedy_ids"]:
                    ids = model(ids, cache)[:, -1:].argmax(-1)
                    tokens.append(int(ids))
            self.assertEqual(tokens, golden["greedy_ids"].tolist(), name)


if __name__ == "__main__":
    unittest.main()
