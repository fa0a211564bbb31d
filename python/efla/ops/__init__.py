"""The delta rule as functions. One module for each of flash-linear-attention's, with its names, and efla.ops.efla."""

from efla.ops.comba import chunk_comba, fused_recurrent_comba
from efla.ops.decode import delta_rule_step, delta_rule_steps
from efla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from efla.ops.efla import chunk_efla, fused_recurrent_efla
from efla.ops.gated_delta_product import chunk_gated_delta_product
from efla.ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
)
from efla.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2
from efla.ops.kda import chunk_kda, fused_recurrent_kda
from efla.ops.rwkv7 import chunk_rwkv7, fused_recurrent_rwkv7

__all__ = [
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_efla",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gdn2",
    "chunk_kda",
    "chunk_rwkv7",
    "delta_rule_step",
    "delta_rule_steps",
    "fused_recurrent_comba",
    "fused_recurrent_delta_rule",
    "fused_recurrent_efla",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gdn2",
    "fused_recurrent_kda",
    "fused_recurrent_rwkv7",
]
