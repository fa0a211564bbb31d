#!/usr/bin/env python3
"""How products of the transitions D (I − α k κᵀ) of rules with two keys grow: the table of docs/numerics.md. Needs PyTorch alone.

    bench/two_key_growth.py > bench/results/two-key-growth.jsonl

In float64, with κ = b ∘ k, b between 0 and 1 per channel, and β = 1. One JSON line per setting: the decimal logarithms of the largest
spectral norm of the product of the first t transitions, t up to `tokens`, and of the norm of the last product.
"""

import json
import math

import torch

TOKENS, SIZE = 100_000, 16
LENGTHS = {"L2 norm": 0.0, "log-normal, sigma 1": 1.0, "log-normal, sigma 2": 2.0}  # of log ‖k‖; the median is 1
GATES = ("constant", "sigmoid of N(0, 1)", "sigmoid of N(0, 16)", "0 or 1")
STEPS = ("euler", "exact")


def lengths_of(name, generator):
    sigma = LENGTHS[name]
    return math.exp(sigma * float(torch.randn((), generator=generator, dtype=torch.float64)))


def gate_of(name, constant, generator):
    """Returns b [K] of one token."""
    normal = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    if name == "constant":
        return constant
    if name == "0 or 1":
        return (normal > 0).double()
    return torch.sigmoid(normal * (1 if name == "sigmoid of N(0, 1)" else 4))


def gain_of(step, mu):
    """Returns α for β = 1: of euler 1, of exact (1 − e^−μ)/μ."""
    return 1.0 if step == "euler" or abs(mu) < 1e-30 else -math.expm1(-mu) / mu


class Product:
    """The product of transitions, kept near 1 by a factor whose logarithm is `exponent`."""

    def __init__(self, size):
        self.matrix = torch.eye(size, dtype=torch.float64)
        self.exponent = 0.0
        self.largest = 0.0

    def multiply(self, alpha, k, kappa, decay=1.0):
        self.matrix *= decay
        self.matrix -= torch.outer(alpha * k, kappa @ self.matrix)
        scale = float(self.matrix.abs().max())
        if not 1e-100 < scale < 1e100 and scale > 0:
            self.matrix /= scale
            self.exponent += math.log10(scale)

    def norm(self):
        """Returns the decimal logarithm of the spectral norm and remembers the largest."""
        value = float(torch.linalg.matrix_norm(self.matrix, 2))
        log = self.exponent + math.log10(value) if value > 0 else -math.inf
        self.largest = max(self.largest, log)
        return log


def write(fields, product):
    last = product.norm()
    print(json.dumps({**fields, "log10_largest": round(product.largest, 2), "log10_last": round(last, 1)}), flush=True)


def random_keys(length, gate):
    """Writes the growth with a new direction at every token and gates that know nothing of the keys, for every step."""
    generator = torch.Generator().manual_seed(0)
    constant = torch.sigmoid(torch.randn(SIZE, generator=generator, dtype=torch.float64))
    products = {step: Product(SIZE) for step in STEPS}
    for token in range(TOKENS):
        direction = torch.randn(SIZE, generator=generator, dtype=torch.float64)
        k = lengths_of(length, generator) * direction / direction.norm()
        kappa = gate_of(gate, constant, generator) * k
        mu = float(kappa @ k)
        for step, product in products.items():
            product.multiply(gain_of(step, mu), k, kappa)
            if token % 16 == 15:
                product.norm()
    for step, product in products.items():
        write({"keys": "random", "length": length, "gate": gate, "step": step, "tokens": TOKENS, "key_dim": SIZE}, product)


def alternating_keys(step, length, least, decay):
    """Writes the growth with two keys (ε, 1) and (1, ε) in turn, whose gates are 1 where the key is small and `least` elsewhere.

    ε is the one of the fastest growth.
    """

    def tokens(epsilon):
        for k, b in (((epsilon, 1.0), (1.0, least)), ((1.0, epsilon), (least, 1.0))):
            key = torch.tensor(k, dtype=torch.float64)
            key *= length / key.norm()
            kappa = torch.tensor(b, dtype=torch.float64) * key
            yield gain_of(step, float(kappa @ key)), key, kappa

    def growth(epsilon):
        pair = torch.eye(2, dtype=torch.float64)
        for alpha, k, kappa in tokens(epsilon):
            pair = (torch.eye(2, dtype=torch.float64) - alpha * torch.outer(k, kappa)) @ pair
        return float(torch.linalg.eigvals(pair).abs().max()) ** 0.5

    epsilon = max((10 ** (-3 + 3 * i / 300) for i in range(300)), key=growth)
    product, pair = Product(2), list(tokens(epsilon))
    for token in range(2000):
        product.multiply(*pair[token % 2], decay)
        product.norm()
    fields = {"keys": "alternating", "length": length, "gate": f"{least} or 1", "step": step, "decay": decay, "tokens": 2000}
    write({**fields, "key_dim": 2, "epsilon": float(f"{epsilon:.3g}"), "growth_per_token": float(f"{growth(epsilon):.4g}")}, product)


def main():
    torch.set_num_threads(1)
    print(json.dumps({"environment": {"log": "two_key_growth", "torch": torch.__version__}}), flush=True)
    for length in LENGTHS:
        for gate in GATES:
            random_keys(length, gate)
    for step, length in (("euler", 1), ("exact", 1), ("exact", 100)):
        for least in (0.9, 0.5, 0.1, 0.01):
            alternating_keys(step, length, least, 1.0)
    for decay in (0.9, 0.5):
        alternating_keys("exact", 100, 0.1, decay)


if __name__ == "__main__":
    main()
