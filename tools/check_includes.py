#!/usr/bin/env python3
"""Checks every #include of the tree against what each folder may depend on.

    tools/check_includes.py [ROOT]      prints file:line and the rule broken; exit code 1 if any
    tools/check_includes.py --self-test checks that a tree with one violation of each kind is told from a clean one

A folder of efla/ may include itself, the folders below, and what those may include, without what they hide. The studies
in experiments/ may include all of efla/. Tests, benches, cli and python may include any of them.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

ALLOWED = {
    "base": [],
    "rule": ["base"],
    "ref": ["base", "rule"],
    "cpu": ["base", "rule"],
    "cuda": ["base", "rule"],
    "ops": ["base", "rule", "ref", "cpu", "cuda"],
    "io": ["base"],
    "torch": ["ops"],
    "autograd": ["torch"],
    "nn": ["autograd", "io"],
    "data": ["base", "io"],
    "eval": ["nn", "data"],
    "train": ["eval"],
    "engine": ["nn", "data"],
    "serve": ["engine"],
    "report": ["base", "io"],
}
# Folders inside a folder that all its other files share: they include nothing of that folder but themselves.
SHARED = ["cuda/common"]
# Folders below that are not for those above: efla/ops is the only way to a kernel.
HIDDEN = {"ops": ["ref", "cpu", "cuda"]}
OUTERMOST = ["cli", "tests", "bench", "python"]  # included by nobody in efla/ or experiments/
EXPERIMENTS = "experiments"  # included by the outermost alone

# Outside libraries that only some folders, with what is below them, may include, by how the header's name begins.
OUTSIDE = {
    "LibTorch": (("torch/", "ATen/", "c10/", "caffe2/"),
                 ["torch", "autograd", "nn", "eval", "train", "engine", "experiments", "cli", "python"]),
    "Highway": (("hwy/",), ["cpu"]),
    "CUDA": (("cuda", "cublas", "nccl"), ["cuda"]),
    "CLI11": (("CLI/",), ["cli"]),
    "Boost": (("boost/",), ["serve/http"]),
    "XGrammar": (("xgrammar/", "dlpack/"), ["serve/grammar"]),
}
EXTENSIONS = {".h", ".cc", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')


def reachable(folder):
    """The folders that `folder` may include: itself and everything below it that no folder between hides."""
    found, todo = {folder}, list(ALLOWED[folder])
    while todo:
        below = todo.pop()
        if below not in found:
            found.add(below)
            todo += [name for name in ALLOWED[below] if name not in HIDDEN.get(below, [])]
    return found


def folder_of(path):
    """efla/<folder>/… gives <folder>; anything else its first part."""
    parts = path.parts
    return parts[1] if parts[0] == "efla" and len(parts) > 2 else parts[0]


def is_in(place, folders):
    """Whether a place, such as serve/http, is one of the folders or below it."""
    return any(place == folder or place.startswith(folder + "/") for folder in folders)


def violation(place, bracket, header):
    """Why a file of a place, a folder such as serve/http without its first efla/, may not include `header`, or None."""
    folder = place.split("/")[0]
    free = folder in OUTERMOST
    if header.startswith("efla/"):
        target = folder_of(pathlib.PurePosixPath(header))
        for shared in SHARED:
            if is_in(place, [shared]) and target == folder and not is_in(header.removeprefix("efla/"), [shared]):
                return f"{shared} may not include its neighbours"
        if target not in ALLOWED:
            return f"there is no folder efla/{target} in the table of tools/check_includes.py"
        if bracket == "<" and folder != "tests":  # tests hold an outside project too
            return "the project's own headers are included in quotes"
        if free or folder == EXPERIMENTS or target in reachable(folder):
            return None
        return f"{folder} may include {', '.join(sorted(reachable(folder)))}; not {target}"
    if bracket == '"':
        outer = header.split("/")[0]
        if outer == EXPERIMENTS and folder == EXPERIMENTS:
            return None
        if outer in [*OUTERMOST, EXPERIMENTS]:
            return None if free else f"{folder} may not include {outer}/"
        if not header.startswith("hwy/"):
            return "a header in quotes is named from the root of the checkout"
    for library, (prefixes, folders) in OUTSIDE.items():
        if header.startswith(prefixes) and not is_in(place, [*folders, "tests", "bench"]):
            return f"{library} only in {', '.join(folders)}; not {place}"
    return None


def check(root):
    """Every broken rule below `root`, as "file:line: rule"."""
    problems = []
    for top in ["efla", EXPERIMENTS, *OUTERMOST]:
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in EXTENSIONS:
                continue
            relative = path.relative_to(root)
            folder = folder_of(relative)
            place = "/".join(relative.parts[1 if top == "efla" else 0 : -1])
            if top == "efla" and folder not in ALLOWED:
                problems.append(f"{relative}:1: there is no folder efla/{folder} in the table of this script")
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                match = INCLUDE.match(line)
                rule = match and violation(place, *match.groups())
                if rule:
                    problems.append(f"{relative}:{number}: {match.group(2)}: {rule}")
    return problems


GOOD = {
    "efla/cpu/delta/chunk_fwd.cc": '#include "hwy/highway.h"\n#include "efla/rule/problem.h"\n',
    "efla/autograd/delta.cc": '#include "efla/ops/delta.h"\n#include "efla/rule/problem.h"\n',
    "efla/ops/delta.cc": '#include "efla/cpu/delta/kernels.h"\n#include "efla/ref/delta.h"\n',
    "efla/train/loop.cc": '#include <torch/torch.h>\n#include "efla/base/error.h"\n',
    "efla/nn/mixer.h": '#include "efla/ops/delta.h"\n#include "efla/io/safetensors.h"\n#include <vector>\n',
    "efla/cuda/common/launch.cc": '#include "efla/cuda/common/launch.h"\n#include "efla/base/error.h"\n',
    "cli/main.cc": '#include <CLI/CLI.hpp>\n#include "cli/commands.h"\n#include "efla/train/loop.h"\n',
    "experiments/mad/mad.cc": '#include "efla/train/loop.h"\n#include "experiments/common/study.h"\n',
    "efla/serve/http/http.cc": "#include <boost/asio/post.hpp>\n",
    "efla/engine/local_engine.cc": "#include <torch/types.h>\n",
    "bench/stability.cc": '#include "experiments/stability/growth.h"\n',
    "tests/ops/chunk_test.cc": '#include "efla/ref/delta.h"\n#include "tests/support/compare.h"\n',
}
BAD = {
    "efla/base/a.cc": '#include "efla/rule/problem.h"\n',
    "efla/cpu/b.cc": '#include "efla/ref/delta.h"\n',
    "efla/ref/c.cc": '#include "efla/cpu/chunk_fwd.h"\n',
    "efla/io/d.cc": '#include "efla/ops/delta.h"\n',
    "efla/ops/e.cc": "#include <torch/torch.h>\n",
    "efla/ref/f.cc": '  #  include "hwy/highway.h"\n',
    "efla/data/g.cc": '#include "cli/commands.h"\n',
    "efla/report/h.cc": "#include <CLI/CLI.hpp>\n",
    "efla/rule/i.cc": "#include <efla/base/error.h>\n",
    "efla/rule/j.cc": '#include "step_size.h"\n',
    "efla/fast/k.cc": "#include <vector>\n",
    "efla/serve/api/p.cc": "#include <torch/types.h>\n",
    "efla/serve/q.cc": "#include <boost/asio/post.hpp>\n",
    "efla/serve/r.cc": "#include <xgrammar/xgrammar.h>\n",
    "efla/train/l.cc": '#include "efla/report/page.h"\n',
    "efla/autograd/n.cc": '#include "efla/cpu/linear.h"\n',
    "efla/nn/o.cc": '#include "efla/ref/delta.h"\n',
    "efla/cuda/common/launch.h": '#include "efla/cuda/delta.h"\n',
    "efla/data/p.cc": "#include <boost/asio/io_context.hpp>\n",
    "efla/train/l2.cc": '#include "experiments/common/study.h"\n',
    "experiments/mad/n.cc": '#include "cli/commands.h"\n',
    "efla/nn/m.cc": '#include "efla/kernels/chunk.h"\n',
}


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        write(root, GOOD)
        assert check(root) == [], check(root)
        assert subprocess.run([sys.executable, __file__, folder], check=False).returncode == 0
        write(root, BAD)
        problems = check(root)
        assert [p.split(":")[0] for p in problems] == sorted(BAD), problems
        assert subprocess.run([sys.executable, __file__, folder], check=False, capture_output=True).returncode == 1
    print(f"{len(BAD)} violations told from {len(GOOD)} clean files")


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).parent.parent)
    if not (root / "efla").is_dir():
        sys.exit(f"check_includes: {root} has no folder efla")
    problems = check(root)
    print("\n".join(problems), end="\n" if problems else "")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
