"""The layers of flash-linear-attention with the delta rule, with its arguments and parameter names, and EFLA."""

from efla.layers.mixer import RULES, Mixer, Rule, Sizes
from efla.layers.named import EFLA, DeltaNet, GatedDeltaNet, GatedDeltaProduct, KimiDeltaAttention
from efla.layers.two_keys import Comba, GatedDeltaNet2

__all__ = [
    "Comba",
    "DeltaNet",
    "EFLA",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "KimiDeltaAttention",
    "Mixer",
    "RULES",
    "Rule",
    "Sizes",
]
