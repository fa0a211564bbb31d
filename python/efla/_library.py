"""Finds and loads efla_torch.so, which registers the operators as torch.ops.efla."""

from __future__ import annotations

import os
import pathlib

import torch


def load() -> None:
    """Loads the library that lies in the package's folder, or the one that EFLA_TORCH_LIBRARY names.

    Raises ImportError where there is none, or where it was built against another PyTorch.
    """
    beside = pathlib.Path(__file__).with_name("efla_torch.so")
    path = pathlib.Path(os.environ.get("EFLA_TORCH_LIBRARY") or beside)
    if not path.is_file():
        raise ImportError(f"efla: {path} is not there: build the CMake target efla_torch, or name it in EFLA_TORCH_LIBRARY")
    built_with = path.with_suffix(".version")
    expected = built_with.read_text().strip() if built_with.is_file() else torch.__version__
    if expected.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(f"efla: {path} was built with PyTorch {expected}, got {torch.__version__}, expected that one")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(f"efla: {path} needs the PyTorch that it was built with, not {torch.__version__}: {error}") from None
