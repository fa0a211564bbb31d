#!/usr/bin/env python3
"""Trains a small language model over the bytes of a text and lets it continue the text: `train_bytes.py TEXT.txt [--help]`."""

import argparse
import pathlib

import torch
from efla.layers import EFLA, DeltaNet, GatedDeltaNet, KimiDeltaAttention
from torch.nn import functional

WIDTH, HEADS = 128, 4
LAYERS = {
    "deltanet": lambda i: DeltaNet(hidden_size=WIDTH, num_heads=HEADS, layer_idx=i),
    "efla": lambda i: EFLA(hidden_size=WIDTH, num_heads=HEADS, layer_idx=i),
    "gdn": lambda i: GatedDeltaNet(hidden_size=WIDTH, head_dim=WIDTH // HEADS, num_heads=HEADS, layer_idx=i),
    "kda": lambda i: KimiDeltaAttention(hidden_size=WIDTH, head_dim=WIDTH // HEADS, num_heads=HEADS, layer_idx=i),
}


class Model(torch.nn.Module):
    def __init__(self, layer: str, layers: int = 2) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, WIDTH)
        self.mixers = torch.nn.ModuleList(LAYERS[layer](i) for i in range(layers))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(layers + 1))
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, ids, cache=None):  # bytes [B, T] to logits [B, T, 256]; the layers keep their states in cache
        x = self.embed(ids)
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x), past_key_values=cache, use_cache=cache is not None)[0]
        return self.head(self.norms[-1](x))


@torch.no_grad()
def continue_text(model, prompt, length):
    cache, new = {}, []
    logits = model(prompt[None], cache)  # the prompt at once, by chunks
    for _ in range(length):  # then byte by byte; the states do not grow
        new.append(torch.multinomial(torch.softmax(logits[0, -1] / 0.5, -1), 1))
        logits = model(new[-1][None], cache)
    return bytes(torch.cat([prompt, *new]).tolist()).decode(errors="replace")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text", type=pathlib.Path)
parser.add_argument("--layer", choices=LAYERS, default="efla")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--device", default="cpu")
options = parser.parse_args()
torch.manual_seed(1)
try:
    text = torch.tensor(list(options.text.read_bytes()), device=options.device)
except OSError as error:
    parser.error(f"text: {error}, expected a file")
if len(text) < 257:
    parser.error(f"text: got {len(text)} bytes, expected at least 257, the stretch that a step trains on")
model = Model(options.layer).to(options.device)
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, options.steps + 1):
    rows = torch.stack([text[start : start + 257] for start in torch.randint(len(text) - 256, (8,))])
    loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    if step % 50 == 0 or step == options.steps:
        print(f"step {step}: {loss.item():.3f} nats per byte", flush=True)
print(continue_text(model, text[:64], 200))
