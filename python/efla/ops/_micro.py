"""Rules with several steps per token: the steps of a token are tokens of the operator, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def interleaved(*steps: Tensor) -> Tensor:
    """Returns [B, T·n, …] from the n steps [B, T, …] of every token."""
    return torch.stack(steps, 2).flatten(1, 2)


def at_step(x: Tensor, step: int, steps: int) -> Tensor:
    """Returns [B, T·steps, …] with x [B, T, …] at one step of every token and zeros at the others."""
    return interleaved(*(x if i == step else torch.zeros_like(x) for i in range(steps)))


def last_of(o: Tensor, steps: int) -> Tensor:
    """Returns the outputs [B, T, …] after the last step of every token from those of all steps [B, T·steps, …]."""
    return o[:, steps - 1 :: steps]
