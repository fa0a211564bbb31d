"""The build backend of the Python package: scikit-build-core's, which first checks that PyTorch is installed.

pip asks for the metadata before it downloads the dependencies. Without this check pip would download PyTorch, and the build would still
fail, because pip installs the dependencies only after it.
"""

import subprocess
import sys

from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403

_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"


def _require_torch():
    """Ends the build with a message unless the environment has PyTorch. Under build isolation, python -E sees what pip hides."""
    if not any(subprocess.run([sys.executable, option, "-c", _FIND]).returncode == 0 for option in ("-u", "-E")):
        sys.exit(
            f"efla: {sys.executable} has no PyTorch: install it into this environment first (pip install torch); tools that build in an "
            "environment of their own (uv, build) need --no-build-isolation."
        )


def get_requires_for_build_wheel(config_settings=None):
    _require_torch()
    return build.get_requires_for_build_wheel(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    _require_torch()
    return build.prepare_metadata_for_build_wheel(metadata_directory, config_settings)
