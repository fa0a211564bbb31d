#!/usr/bin/env python3
"""Runs nvcc and fails where ptxas reports that a kernel is slower than its source says.

    tools/nvcc_gate.py COMMAND...   runs the command, which compiles with -Xptxas=-v
    tools/nvcc_gate.py --self-test  checks that each fault is told from a clean report

A fault is a spill of registers to memory, or the serialisation of wgmma instructions (C7510, C7512, C7514, C7517).
"""

import re
import subprocess
import sys

SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
SERIALISED = re.compile(r"\bC75(10|12|14|17)\b")
FUNCTION = re.compile(r"(?:Function properties for|Compiling entry function) '?([\w$]+)")
REPORT = re.compile(r"ptxas info\s*:|^\s*\d+ bytes stack frame")


def faults(text):
    """What is wrong in the report of ptxas, one line per fault."""
    found, function = [], "?"
    for line in text.splitlines():
        match = FUNCTION.search(line)
        function = match.group(1) if match else function
        spill = SPILL.search(line)
        if spill and any(int(n) for n in spill.groups()):
            found.append(f"{function}: {line.strip()}")
        elif SERIALISED.search(line):
            found.append(line.strip())
    return found


def self_test():
    clean = ("ptxas info    : Compiling entry function '_Z1fv' for 'sm_80'\nptxas info    : Function properties for _Z1fv\n"
             "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 168 registers\n")
    assert faults(clean) == []
    assert len(faults(clean.replace("0 bytes spill stores", "8 bytes spill stores"))) == 1
    for code in ("C7510", "C7512", "C7514", "C7517"):
        serialised = f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized"
        assert faults(clean + serialised) == [serialised]
    assert faults("ptxas info    : (C7519) wgmma.fence inserted") == []
    print("5 faults told from clean reports")


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    done = subprocess.run(arguments, stderr=subprocess.PIPE, text=True, check=False)
    kept = [line for line in done.stderr.splitlines() if not REPORT.search(line)]
    print(*kept, sep="\n", end="\n" if kept else "", file=sys.stderr)
    found = faults(done.stderr)
    for fault in found:
        print(f"nvcc_gate: {fault}", file=sys.stderr)
    sys.exit(done.returncode or (1 if found else 0))


if __name__ == "__main__":
    main(sys.argv[1:])
