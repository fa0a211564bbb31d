"""Functions with the names, arguments and results of flash-linear-attention's Triton launchers, for tensors on a CPU.

efla.fla registers them. They are what fla's layers and models with a delta rule call beside the rule itself: a function that ends in _fwd
runs inside an autograd function of fla, which then calls the _bwd or _fwdbwd one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efla.layers.parts import short_convolution
from efla.ops._gate import channel_gate, scalar_gate

_MAX_TAPS = 8  # of torch.ops.efla.short_conv


def _gradients(function: Callable[..., Any], inputs: Sequence[Tensor | None], *dout: Tensor | None) -> tuple[Any, ...]:
    """Computes function(*inputs) again. Returns the gradients of the inputs, None for an input that is None."""
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        results = function(*leaves)
    pairs = [pair for pair in zip(results if isinstance(results, tuple) else (results,), dout) if pair[1] is not None]
    given = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad([y for y, _ in pairs], given, [dy for _, dy in pairs]))
    return tuple(None if leaf is None else next(found) for leaf in leaves)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, activation: str | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x [B, T, …] of D channels, weight [D, W] → y [B, T, D] and the next state [N, D, W], both in float32.

    Each text of cu_seqlens gets the same bits as alone, because it is computed alone.
    """
    x, weight, taps = x.flatten(2).float(), weight.float(), weight.shape[1]
    if cu_seqlens is not None:
        states = [None] * (len(cu_seqlens) - 1) if state is None else state.split(1)
        texts = zip(x.split(cu_seqlens.diff().tolist(), 1), states)
        parts = [_convolve(text, weight, bias, its_state, activation, None) for text, its_state in texts]
        return torch.cat([y for y, _ in parts], 1), torch.cat([after for _, after in parts])
    if activation is not None and bias is None and state is None and taps <= _MAX_TAPS and x.shape[1] > 0:
        y = torch.ops.efla.short_conv(x, weight)
        return y, F.pad(x[:, -taps:].transpose(1, 2), (taps, 0))[..., -taps:]
    bias = None if bias is None else bias.float()
    return short_convolution(x, weight.unsqueeze(1), bias, activation and "silu", state, None)


def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    y, state = _convolve(x, weight, bias, initial_state, activation, cu_seqlens)
    if residual is not None:
        y = y + residual.flatten(2)
    return y.to(x.dtype).view(x.shape), state.to(x.dtype) if output_final_state else None


def causal_conv1d_bwd(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    dht: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    convolve = functools.partial(_convolve, activation=activation, cu_seqlens=cu_seqlens)
    dout = dy.flatten(2).float(), None if dht is None else dht.float()
    dx, dw, db, dstate = _gradients(convolve, (x, weight, bias, initial_state), *dout)
    return dx, dw, db, None if residual is None else dy, dstate


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    y, state = _convolve(x.reshape(-1, 1, weight.shape[0]), weight, bias, cache, activation, None)
    cache.copy_(state)
    y = y.view(x.shape)
    return (y if residual is None else y + residual).to(x.dtype), cache


def _sum(x: Tensor, residual: Tensor | None, residual_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """x + residual in float32, and in the dtype in which it goes on."""
    if residual is None:
        return x.float(), x.to(residual_dtype or x.dtype)
    total = x.float() + residual
    return total, total.to(residual.dtype)


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, None, Tensor, Tensor]:
    total, carried = _sum(x, residual, residual_dtype)
    rstd = torch.rsqrt(total.square().mean(-1) + eps)
    y = total * rstd.unsqueeze(-1)
    return (y if weight is None else y * weight).to(out_dtype or x.dtype), None, rstd, carried


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dres: Tensor | None = None,
    has_residual: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> tuple[Tensor | None, ...]:
    unit, dunit = x.float() * rstd.unsqueeze(-1), dy.float()
    dw = None if weight is None else (dunit * unit).sum(0).to(weight.dtype)
    y = unit if weight is None else unit * weight
    dunit = dunit if weight is None else dunit * weight
    dx = (dunit - unit * (dunit * unit).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    dx = dx if dres is None else dx + dres
    given = dx.to(x_dtype or x.dtype), dw, None, dx.to(x.dtype) if has_residual else None
    return (*given, y.to(dy.dtype)) if recompute_output else given


def _gated_norm(x: Tensor, g: Tensor, weight: Tensor | None, activation: str, eps: float) -> Tensor:
    name = "sigmoid" if activation == "sigmoid" else "silu"
    eps = max(eps, torch.finfo(torch.float32).tiny)  # because the operator refuses 0
    y: Tensor = torch.ops.efla.gated_rms_norm(x.float(), g.float(), weight, name, eps)
    return y


def layer_norm_gated_fwd(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None = None,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, None, None, Tensor]:
    total, carried = _sum(x, residual, residual_dtype)
    return _gated_norm(total, g, weight, activation, eps).to(out_dtype or x.dtype), None, None, carried


def layer_norm_gated_bwd(
    dy: Tensor,
    x: Tensor,
    g: Tensor,
    weight: Tensor | None = None,
    activation: str = "swish",
    eps: float = 1e-5,
    dresidual: Tensor | None = None,
    has_residual: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> tuple[Tensor | None, ...]:
    norm = functools.partial(_gated_norm, activation=activation, eps=eps)
    dx, dg, dw = _gradients(norm, (x.float(), g, weight), dy.float())
    dx = dx if dresidual is None else dx + dresidual
    given = dx.to(x_dtype or x.dtype), dg, dw, None, dx.to(x.dtype) if has_residual else None
    return (*given, norm(x, g, weight).to(dy.dtype)) if recompute_output else given


def l2norm_fwd(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.float().square().sum(-1) + eps)
    return (x.float() * rstd.unsqueeze(-1)).to(output_dtype or x.dtype), rstd


def l2norm_bwd(y: Tensor, rstd: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    unit, dunit = y.float(), dy.float()
    return ((dunit - (dunit * unit).sum(-1, keepdim=True) * unit) * rstd.unsqueeze(-1)).to(y.dtype)


def swiglu_fwd(x: Tensor, y: Tensor) -> Tensor:
    return (F.silu(x.float()) * y).to(x.dtype)


def swiglu_fwdbwd(x: Tensor, y: Tensor, g: Tensor, use_weight: bool = False) -> tuple[Tensor, ...]:
    dx, dy = _gradients(swiglu_fwd, (x, y), g)
    return (dx, dy, swiglu_fwd(x, y)) if use_weight else (dx, dy)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(swiglu_fwd(x, y), weight, bias)


def _cross_entropy(
    logits: Tensor, target: Tensor, smoothing: float, scale: float, square: float, cap: float | None, ignored: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss [N], the part of it from the squares of logsumexp, and logsumexp; float32."""
    logits = logits.float() * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    lse = logits.logsumexp(-1)
    z_loss = (square * lse.square()).masked_fill(target == ignored, 0)
    loss = F.cross_entropy(logits, target, ignore_index=ignored, reduction="none", label_smoothing=smoothing)
    return loss + z_loss, z_loss, lse


def cross_entropy_fwd(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor, int, int]:
    options = label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index
    return (*_cross_entropy(logits, target, *options), logits.shape[1], 0)


def cross_entropy_bwd(
    logits: Tensor,
    target: Tensor,
    dloss: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
) -> Tensor:
    options = label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index
    (dlogits,) = _gradients(lambda logits: _cross_entropy(logits, target, *options), (logits,), dloss)
    given: Tensor = logits.copy_(dlogits) if inplace_backward else dlogits
    return given


def fused_linear_cross_entropy_bwd(
    do: Tensor, dx: Tensor, dw: Tensor | None = None, db: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient * do for gradient in (dx, dw, db))


def gdn_gate_fwd(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    return scalar_gate(g, A_log.flatten(), dt_bias).to(output_dtype)


def gdn_gate_bwd(g: Tensor, A_log: Tensor, dyg: Tensor, dt_bias: Tensor | None = None) -> tuple[Tensor | None, ...]:
    return _gradients(gdn_gate_fwd, (g, A_log, dt_bias), dyg.float())


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    return channel_gate(g, None if A_log is None else A_log.flatten(), dt_bias, lower_bound).to(output_dtype)
