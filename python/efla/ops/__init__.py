"""The delta rule as functions. One module for each of flash-linear-attention's, with its names, and efla.ops.efla."""

from efla.ops.decode import delta_rule_step, delta_rule_steps
from efla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from efla.ops.efla import chunk_efla, fused_recurrent_efla
from efla.ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
)
from efla.ops.kda import chunk_kda, fused_recurrent_kda

__all__ = [
    "chunk_delta_rule",
    "chunk_efla",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "delta_rule_step",
    "delta_rule_steps",
    "fused_recurrent_delta_rule",
    "fused_recurrent_efla",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
]
