#!/usr/bin/env python3
"""Checks the links between the documents: that the file exists, and the heading that a #fragment names.

    tools/check_links.py [ROOT]      prints file:line and the broken link; exit code 1 if any
    tools/check_links.py --self-test checks that a broken file and a broken heading are found, and nothing else
"""

import pathlib
import re
import subprocess
import sys
import tempfile

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^( {4}|```|~~~)")
INLINE_CODE = re.compile(r"`[^`]*`")


def anchor(heading):
    """Returns the fragment that GitHub makes of a heading."""
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", lambda m: m[1] or "", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(path):
    headings = [line.lstrip("#") for line in path.read_text("utf-8").splitlines() if re.match(r"#{1,6} ", line)]
    return {anchor(heading) for heading in headings}


def links(text):
    """Yields (line, target) of the links outside of code. A link may span two lines."""
    fenced = False
    kept = []
    for line in text.splitlines():
        if line.startswith(("```", "~~~")):
            fenced = not fenced
        kept.append("" if fenced or CODE.match(line) else INLINE_CODE.sub(lambda m: "x" * len(m[0]), line))
    whole = "\n".join(kept)
    for match in LINK.finditer(whole):
        yield whole.count("\n", 0, match.start()) + 1, match[1]


def check(root, documents):
    """Returns a line of text for every broken link in the documents, whose paths are relative to root."""
    broken = []
    for document in documents:
        for line, target in links((root / document).read_text("utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, fragment = target.partition("#")
            path = (root / document).parent / file if file else root / document
            if not path.exists():
                broken.append(f"{document}:{line}: {target}: no such file")
            elif fragment and path.suffix == ".md" and fragment not in anchors(path):
                broken.append(f"{document}:{line}: {target}: no such heading")
    return broken


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "a.md").write_text("# One `two`, three\n[x](b.md) [y](a.md#one-two-three) [z](https://e.org/x)\n"
                                   "[bad](c.md)\n[a long\nname](b.md#no)\n```\n[code](d.md)\n```\n`[code](e.md)`\n", "utf-8")
        (root / "b.md").write_text("text\n", "utf-8")
        found = check(root, ["a.md", "b.md"])
    expected = ["a.md:3: c.md: no such file", "a.md:4: b.md#no: no such heading"]
    return [] if found == expected else [f"got {found}, expected {expected}"]


def main(arguments):
    if arguments == ["--self-test"]:
        problems = self_test()
    else:
        root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).parents[1])
        documents = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", "*.md"], check=True,
                                   capture_output=True, text=True).stdout.split()
        problems = check(root, [d for d in documents if (root / d).exists()])
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
