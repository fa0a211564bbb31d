"""The delta rule for linear attention: EFLA, DeltaNet, Gated DeltaNet and Kimi Delta Attention.

Functions and layers have the names, arguments and parameters of flash-linear-attention: `from fla.ops.kda import
chunk_kda` becomes `from efla.ops.kda import chunk_kda`, `from fla.layers import GatedDeltaNet` becomes `from efla.layers
import GatedDeltaNet`.
"""

from efla import _library

_library.load()

from efla import layers, ops  # noqa: E402: the operators first
from efla._transformers import TransformersPatch, patch_transformers  # noqa: E402
from efla.ops import *  # noqa: E402, F403

__version__ = "0.1.0"
__all__ = ["TransformersPatch", "layers", "ops", "patch_transformers", *ops.__all__]
