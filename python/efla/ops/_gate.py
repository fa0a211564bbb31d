"""β and the decay from the outputs of projections, in differentiable torch operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from efla.ops._check import check_floating, mistake


def widen(x: Tensor) -> Tensor:
    """x in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def beta_of(function: str, beta: Tensor, use_sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    """β as it is, or σ(b), or 2σ(b) where negative eigenvalues are allowed, which needs the sigmoid."""
    if not use_sigmoid:
        if allow_neg_eigval:
            raise mistake(function, "allow_neg_eigval", True, "False without use_beta_sigmoid_in_kernel")
        return beta
    check_floating(function, beta=beta)
    beta = torch.sigmoid(widen(beta))
    return 2 * beta if allow_neg_eigval else beta


_LARGEST_LOG_RATE = 60.0


def _divided(A_log: Tensor) -> tuple[Tensor, Tensor]:
    """Returns exp(A_log) as a factor that cannot overflow, and the rest of A_log, to add to the argument of softplus.

    docs/ops/decay_gate.md describes the division. For A_log up to 60 the factor is exp(A_log) and the rest 0.
    """
    A_log = widen(A_log)
    return A_log.clamp_max(_LARGEST_LOG_RATE).exp(), F.relu(A_log - _LARGEST_LOG_RATE)


def scalar_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """g = −exp(A_log) · softplus(a + dt_bias) of Gated DeltaNet. a [..., HV], A_log and dt_bias [HV]; float32."""
    rate, rest = _divided(A_log)
    return -rate * F.softplus(widen(a) + (rest if dt_bias is None else widen(dt_bias) + rest))


def channel_gate(f: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None) -> Tensor:
    """g = −exp(A_log) · softplus(f + dt_bias) of Kimi Delta Attention, for every key channel.

    With lower_bound, lower_bound · σ(exp(A_log) · (f + dt_bias)), whose A_log may be None for zeros. f [..., HV, K], A_log
    [HV], dt_bias [HV · K] or [HV, K]; float32.
    """
    f = widen(f)
    bias = None if dt_bias is None else widen(dt_bias).reshape(f.shape[-2:])
    rate, rest = (f.new_ones([]), None) if A_log is None else (x.unsqueeze(-1) for x in _divided(A_log))
    if lower_bound is None and rest is not None:
        bias = rest if bias is None else bias + rest
    if bias is not None:
        f = f + bias
    return -rate * F.softplus(f) if lower_bound is None else lower_bound * torch.sigmoid(rate * f)
