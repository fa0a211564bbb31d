"""Language models of this package, and of flash-linear-attention's model types, as transformers' models.

`import efla.hf` registers the model types efla, delta_net, gated_deltanet and kda with AutoConfig, AutoModel and
AutoModelForCausalLM, also where flash-linear-attention has registered its own. Needs transformers 5.
"""

from __future__ import annotations

import os
import pathlib

from efla._transformers import transformers_for

transformers_for("efla.hf")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402: a clear error first

from efla.hf.configuration import DeltaNetConfig, EflaConfig, GatedDeltaNetConfig, KDAConfig  # noqa: E402
from efla.hf.modeling import (  # noqa: E402
    DeltaNetForCausalLM,
    DeltaNetModel,
    EflaForCausalLM,
    EflaModel,
    GatedDeltaNetForCausalLM,
    GatedDeltaNetModel,
    KDAForCausalLM,
    KDAModel,
)


def checkpoint(run: str | os.PathLike[str]) -> str:
    """Returns the folder that from_pretrained takes of a training run: its latest checkpoint; a folder with a model is returned as it is.

    Raises FileNotFoundError where there is neither.
    """
    folder = pathlib.Path(run)
    if (folder / "config.json").is_file():
        return str(folder)
    steps = [config.parent for config in folder.glob("checkpoints/step-*/config.json") if config.parent.name[5:].isdigit()]
    if not steps:
        raise FileNotFoundError(f"checkpoint: run: got {run}, expected a folder with config.json or checkpoints/step-N/config.json")
    return str(max(steps, key=lambda step: int(step.name[5:])))


for _config, _model, _causal in (
    (EflaConfig, EflaModel, EflaForCausalLM),
    (DeltaNetConfig, DeltaNetModel, DeltaNetForCausalLM),
    (GatedDeltaNetConfig, GatedDeltaNetModel, GatedDeltaNetForCausalLM),
    (KDAConfig, KDAModel, KDAForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal, exist_ok=True)

__all__ = [
    "DeltaNetConfig",
    "DeltaNetForCausalLM",
    "DeltaNetModel",
    "EflaConfig",
    "EflaForCausalLM",
    "EflaModel",
    "GatedDeltaNetConfig",
    "GatedDeltaNetForCausalLM",
    "GatedDeltaNetModel",
    "KDAConfig",
    "KDAForCausalLM",
    "KDAModel",
    "checkpoint",
]
