"""What pip install does before it downloads or compiles anything."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).parents[2]
BACKEND = ROOT / "tools" / "python_build.py"


@unittest.skipUnless(BACKEND.is_file() and (ROOT / "CMakeLists.txt").is_file(), "not in a checkout")
class Backend(unittest.TestCase):
    def hook(self, python, name, *arguments):
        """Calls a hook of the backend with this interpreter as pip does. A stand-in has scikit-build-core's place."""
        stand_in = """
            def get_requires_for_build_wheel(settings=None): return ["ninja"]
            def prepare_metadata_for_build_wheel(folder, settings=None): return folder
            def build_wheel(folder, settings=None, metadata=None): return folder
            __all__ = [*globals()]
        """
        with tempfile.TemporaryDirectory() as folder:
            package = pathlib.Path(folder, "scikit_build_core")
            package.mkdir()
            (package / "__init__.py").touch()
            (package / "build.py").write_text("\n".join(line.strip() for line in stand_in.splitlines()))
            program = f"import python_build, sys; print(python_build.{name}(*sys.argv[1:]))"
            path = f"{folder}:{BACKEND.parent}"
            return subprocess.run([python, "-c", program, *arguments], env={"PYTHONPATH": path}, capture_output=True, text=True)

    def test_an_environment_with_pytorch(self):
        for name, arguments in (("get_requires_for_build_wheel", ()), ("prepare_metadata_for_build_wheel", ("x",)), ("build_wheel", ("x",))):
            got = self.hook(sys.executable, name, *arguments)
            self.assertEqual((got.returncode, got.stdout.strip()), (0, arguments[0] if arguments else "['ninja']"), got.stderr)

    def test_an_environment_without_pytorch(self):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
            python = f"{folder}/bin/python"
            for name, arguments in (("get_requires_for_build_wheel", ()), ("prepare_metadata_for_build_wheel", ("x",))):
                got = self.hook(python, name, *arguments)
                self.assertEqual((got.returncode, got.stdout), (1, ""))
                self.assertTrue(got.stderr.startswith(f"efla: {python} has no PyTorch: install it into this environment first"), got.stderr)


if __name__ == "__main__":
    unittest.main()
