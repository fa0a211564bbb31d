"""Finds and loads efla_torch.so, which registers the operators as torch.ops.efla."""

from __future__ import annotations

import ctypes
import os
import pathlib
import re

import torch


def _runtimes() -> set[str]:
    """Returns the files of PyTorch's core library libc10 that this process has loaded; empty where the system does not tell."""
    maps = pathlib.Path("/proc/self/maps")
    text = maps.read_text(encoding="utf-8", errors="replace") if maps.is_file() else ""
    return set(re.findall(r"/\S*/libc10\.so[.\d]*", text))


def load() -> None:
    """Loads the library that lies in the package's folder, or the one that EFLA_TORCH_LIBRARY names.

    Raises ImportError where there is none, or where it was built or linked against another PyTorch.
    """
    beside = pathlib.Path(__file__).with_name("efla_torch.so")
    path = pathlib.Path(os.environ.get("EFLA_TORCH_LIBRARY") or beside)
    if not path.is_file():
        raise ImportError(f"efla: {path} is not there: build the CMake target efla_python, or name it in EFLA_TORCH_LIBRARY")
    built_with = path.with_suffix(".version")
    expected = built_with.read_text().strip() if built_with.is_file() else torch.__version__
    if expected.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(
            f"efla: {path} was built with PyTorch {expected}, got {torch.__version__}, expected that one: install efla again for this "
            "PyTorch (pip install --force-reinstall --no-deps, from the checkout or a wheel for it)"
        )
    try:
        ctypes.CDLL(str(path))  # the system's message, which newer versions of load_library leave out
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(f"efla: {path} needs the PyTorch that it was built with, not {torch.__version__}: {error}") from None
    runtimes = sorted(_runtimes())
    if len(runtimes) > 1:
        raise ImportError(
            f"efla: {path} was linked with another PyTorch, got {' and '.join(runtimes)} in one process, expected one: "
            "install efla again in this environment"
        )
