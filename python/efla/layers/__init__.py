"""The layers of flash-linear-attention with the delta rule, with its arguments and parameter names, and EFLA."""

from efla.layers.mixer import RULES, Mixer, Rule, Sizes
from efla.layers.named import EFLA, DeltaNet, GatedDeltaNet, GatedDeltaProduct, KimiDeltaAttention

__all__ = ["EFLA", "DeltaNet", "GatedDeltaNet", "GatedDeltaProduct", "KimiDeltaAttention", "Mixer", "RULES", "Rule", "Sizes"]
