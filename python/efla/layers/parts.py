"""What a mixer is made of: the short convolution, the norm of its output, and padding taken out and put back."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efla.ops._check import check_axes, mistake
from efla.ops._gate import widen


class ShortConvolution(nn.Conv1d):
    """y_t = act(Σ_j weight[d, 0, j] · x_{t − (W−1) + j} + bias): depthwise and causal; weight [D, 1, W], bias [D] or None."""

    def __init__(self, hidden_size: int, kernel_size: int, bias: bool = False, activation: str | None = "silu") -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias)
        self.activation = activation

    def forward(  # type: ignore[override]
        self, x: Tensor, cache: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns short_convolution of x with these parameters."""
        return short_convolution(x, self.weight, self.bias, self.activation, cache, cu_seqlens)


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, cache: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x [B, T, D], cache [N, D, W] of the last inputs or None for zeros → [B, T, D] and the next cache.

    weight, bias and activation are as in ShortConvolution. With cu_seqlens [N + 1], B is 1 and every sequence sees its own tokens only.
    """
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        parts = [
            short_convolution(x[:, begin:end], weight, bias, activation, None if cache is None else cache[n : n + 1], None)
            for n, (begin, end) in enumerate(zip(ends, ends[1:]))
        ]
        return torch.cat([y for y, _ in parts], 1), torch.cat([next_cache for _, next_cache in parts])
    width = weight.shape[-1]
    if cache is None:
        cache = x.new_zeros(x.shape[0], x.shape[2], width)
    if x.shape[1] == 0:
        return x, cache
    seen = torch.cat([cache.to(x.dtype), x.transpose(1, 2)], -1)  # [B, D, W + T]
    y = F.conv1d(seen[..., 1:], weight, bias, groups=x.shape[2]).transpose(1, 2)
    return F.silu(y) if activation == "silu" else y, seen[..., -width:]


class HeadNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last dimension, times act(gate) where there is one; in float32.

    With `norm` false, x itself times act(gate), without a parameter.
    """

    def __init__(self, size: int, eps: float, activation: str | None = None, norm: bool = True) -> None:
        super().__init__()
        self.eps = eps
        activations: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}
        self.activation = activations[activation or "silu"]
        self.weight = nn.Parameter(torch.empty(size)) if norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to ones."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x and gate [..., D] → [..., D] in the dtype of x."""
        wide = widen(x)
        y = wide
        if self.weight is not None:
            y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return (y if gate is None else y * self.activation(widen(gate))).to(x.dtype)


def last_columns(function: str, attention_mask: Tensor, batch: int, tokens: int) -> Tensor:
    """Returns the mask [B, T] of the tokens. Raises ValueError for a mask of fewer tokens or of another batch."""
    sizes = check_axes(function, "attention_mask", attention_mask, "B T")
    if sizes["B"] != batch or sizes["T"] < tokens:
        got, expected = f"shape {list(attention_mask.shape)}", f"[B, at least T] = [{batch}, at least {tokens}]"
        raise mistake(function, "attention_mask", got, expected)
    return attention_mask[:, sizes["T"] - tokens :]


def unpad(x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of x [B, T, D] whose mask [B, T] is not 0, packed: [1, tokens, D], cu_seqlens [B + 1], their indices."""
    lengths = attention_mask.ne(0).sum(1)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    indices = attention_mask.flatten().nonzero().flatten()
    return x.flatten(0, 1)[indices].unsqueeze(0), cu_seqlens, indices


def repad(x: Tensor, indices: Tensor, batch: int, tokens: int) -> Tensor:
    """The inverse of unpad, with zeros for padding: [1, tokens, D] → [B, T, D]."""
    return x.new_zeros(batch * tokens, x.shape[-1]).index_copy(0, indices, x[0]).view(batch, tokens, x.shape[-1])
