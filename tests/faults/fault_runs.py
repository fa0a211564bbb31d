#!/usr/bin/env python3
"""Lets one system call or allocation of efla fail per run, and checks what the run leaves behind.

    tests/faults/fault_runs.py build/bin/efla build/tests/faults/libefla_fault_shim.so --out bench/results/faults.md
    tests/faults/fault_runs.py build/bin/efla build/tests/faults/libefla_fault_shim.so --each 1 --seed 3    # as ctest does
    tests/faults/fault_runs.py build/bin/efla build/tests/faults/libefla_fault_shim.so --only "train lm" --call fsync

The full run takes about ten minutes. Needs Python 3 alone. A trial is one run in which the k-th write, fsync,
rename, mapping or read of a file below the trials' folder fails, or the k-th allocation of at least 64 KiB after the first of
these calls. A command that fails must end with exit code 1 or 2 and one sentence, and leave no temporary file; the same
command (of a run that has begun, its --resume) must then end with the files of a run without a fault. A server that does
not start must fail in the same way. A server that has started must answer every request with success or status 503, and
with success when the request is repeated. It may instead say that a session is stored, but not in a file, and it may end a
connection for which it has no memory. It must end with exit code 0, or 1 with one sentence, and after its next start have all sessions
that it confirmed and none that was erased. The exit code of this script is 1 where a trial went wrong; the folders of such
trials stay.
"""

import argparse
import http.client
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "kills"))
from kill_runs import CONFIGURATION, differences, text_of  # noqa: E402

CALLS = ("write", "fsync", "rename", "mmap", "read", "allocation")
COUNT = ("", 0)  # a fault that does not come, with which the shim reports every call
LEAST_ALLOCATION = 64 << 10
SECONDS = 120  # of a run, after which it counts as hanging
TEMPORARY = re.compile(r"\..+\.tmp-\d+(-\d+)?")  # names of AtomicFile and AtomicFolder


class Wrong(Exception):
    """What a trial found."""


def check(condition, what):
    if not condition:
        raise Wrong(what)


class Folder:
    """What a trial has: the files that it writes, which the shim watches, and elsewhere its output and the shim's report."""

    def __init__(self, work, name):
        self.files, self.watched, self.output = work / "files" / name, work / "files", work / "output" / name
        for path in (self.files, self.output):
            path.mkdir(parents=True)

    def errors(self):
        return (self.output / "stderr").read_text(errors="replace")

    def calls(self):
        """The names of the calls that the shim reported: the one that failed, or with number 0 all."""
        report = self.output / "report"
        return report.read_text().splitlines() if report.exists() else []

    def remove(self):
        shutil.rmtree(self.files)
        shutil.rmtree(self.output)


class Program:
    """The program, with or without the shim."""

    def __init__(self, efla, shim):
        self.efla, self.shim = efla, shim

    def environment(self, folder, fault):
        if fault is None:
            return None
        return {**os.environ, "LD_PRELOAD": str(self.shim), "EFLA_FAULT_CALL": fault[0], "EFLA_FAULT_NUMBER": str(fault[1]),
                "EFLA_FAULT_FOLDER": str(folder.watched), "EFLA_FAULT_BYTES": str(LEAST_ALLOCATION),
                "EFLA_FAULT_REPORT": str(folder.output / "report")}

    def start(self, arguments, folder, fault=None):
        with open(folder.output / "stdout", "wb") as out, open(folder.output / "stderr", "wb") as err:
            return subprocess.Popen([self.efla, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                    env=self.environment(folder, fault))

    def run(self, arguments, folder, fault=None):
        """Returns the exit code of a command."""
        process = self.start(arguments, folder, fault)
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise Wrong(f"did not end within {SECONDS} seconds") from None


def check_failure(code, folder):
    """Checks a run that did not succeed: its exit code, its one sentence, and that nothing is half-written."""
    errors = folder.errors().strip().splitlines()
    check(code in (1, 2), f"exit code {code}: {' '.join(errors[-1:])}")
    sentences = [line for line in errors if line.startswith("efla: ")]
    check(len(sentences) == 1 and errors[-1] == sentences[0], f"not one sentence but: {errors}")
    left = [p for p in folder.files.rglob("*") if TEMPORARY.fullmatch(p.name)]
    check(not left, f"left {left}")


class Command:
    """A command that writes a folder. `again` is the command that continues a run; without it, the same one."""

    def __init__(self, name, begin, again=None):
        self.name, self.begin, self.again = name, begin, again or begin

    def run_whole(self, program, folder):
        """Runs without a fault, but with the shim, for the files and the calls."""
        self.whole = folder.files / "out"
        check(program.run(self.begin(self.whole), folder, COUNT) == 0, f"failed without a fault: {folder.errors()}")

    def try_fault(self, program, folder, fault):
        """Returns the exit code."""
        out = folder.files / "out"
        code = program.run(self.begin(out), folder, fault)
        if code != 0:
            check_failure(code, folder)
            repeated = program.run(self.again(out), folder)
            check(repeated == 0, f"repeated: exit code {repeated}: {folder.errors()}")
        wrong, left = differences(out, self.whole)
        check(not wrong + left, "; ".join(wrong + left))
        return code


class Server:
    """efla serve --sessions, with requests that store, advance, read and replace sessions."""

    name = "serve --sessions"

    def __init__(self, model):
        self.model = model

    def run_whole(self, program, folder):
        self.try_fault(program, folder, COUNT)

    def start(self, program, folder, fault=None):
        """Returns the process and its port, None where it ended before it served."""
        process = program.start(["serve", self.model, "--tokenizer", "bytes", "--device", "cpu", "--port", "0", "--threads", "2",
                                 "--sessions", folder.files / "sessions"], folder, fault)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if port := re.search(r"http://127\.0\.0\.1:(\d+)", (folder.output / "stdout").read_text(errors="replace")):
                return process, int(port[1])
            if process.poll() is not None:
                return process, None
            time.sleep(0.01)
        process.kill()
        raise Wrong(f"did not start within {SECONDS} seconds")

    def request(self, port, method, path, body=None):
        """Returns the body of the reply of the request, which is sent again after status 503.

        It is also sent again where an allocation fails and the server ends the connection without a reply; the server may have
        done what it asks. Status 500 may say that a session is stored, but not in a file; the server writes the file later.
        """
        for attempt in (1, 2):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
            try:
                connection.request(method, path, body, {"Content-Type": "application/json"} if isinstance(body, str) else {})
                reply = connection.getresponse()
                status, content = reply.status, reply.read()
            except (OSError, http.client.HTTPException) as error:
                check(self.allocation_fails and attempt == 1, f"{method} {path}: no reply, attempt {attempt}: {error!r}")
                continue
            finally:
                connection.close()
            is_stored = status == 500 and b"is stored, but not in a file" in content
            is_erased = status == 404 and method == "DELETE" and attempt == 2
            if status in (200, 201, 204) or is_stored or is_erased:
                return content
            check(status == 503 and attempt == 1, f"{method} {path}: status {status}, attempt {attempt}: {content[:300]}")

    def use(self, port):
        """Sends the requests. All sessions are confirmed where it returns."""
        def post(path, **body):
            return self.request(port, "POST", path, json.dumps(body))
        post("/v1/completions", prompt="The state " * 20000, max_tokens=2)
        for name in ("book", "copy"):
            # A second attempt finds the name where the first one stored it and failed later.
            self.request(port, "PUT", f"/v1/sessions/{name}/state", self.state(port, "The state forgets " * 40))
        post("/v1/completions", session="book", prompt=" and", max_tokens=8, save_as="longer")
        post("/v1/chat/completions", messages=[{"role": "user", "content": "x" * 100000}], max_tokens=2, save_as="chat")
        post("/tokenize", prompt="delta " * 40000)
        self.request(port, "GET", "/health")

    def state(self, port, prompt):
        """Returns the state of a text as bytes, by way of a session that is erased again."""
        self.request(port, "POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 1, "save_as": "passing"}))
        state = self.request(port, "GET", "/v1/sessions/passing/state")
        self.request(port, "DELETE", "/v1/sessions/passing")
        return state

    def end(self, process):
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise Wrong("did not end after SIGTERM") from None

    def try_fault(self, program, folder, fault):
        """Returns the exit code."""
        self.allocation_fails = fault[0] == "allocation"
        process, port = self.start(program, folder, fault)
        code, used = process.returncode, port is not None
        try:
            if used:
                self.use(port)
                check(process.poll() is None, f"ended with exit code {process.returncode}")
                code = self.end(process)
            if code != 0:
                check_failure(code, folder)
            process, port = self.start(program, folder)
            check(port is not None, f"did not start again: {folder.errors()}")
            if used:
                names = {s["name"] for s in json.loads(self.request(port, "GET", "/v1/sessions"))["data"]}
                check(names == {"book", "copy", "longer", "chat"}, f"has the sessions {names} after its next start")
                self.request(port, "POST", "/v1/completions", json.dumps({"session": "longer", "max_tokens": 2}))
            else:
                self.use(port)
            check(self.end(process) == 0, "did not end with exit code 0 without a fault")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return code


def make_cases(program, work):
    folder = Folder(work, "inputs")
    inputs = folder.files
    rng = random.Random(1)
    (inputs / "short.txt").write_text(text_of(rng, 60_000))
    (inputs / "long.txt").write_text(text_of(rng, 1_000_000))
    tokens, configuration, run, exported = inputs / "tokens", inputs / "lm.toml", inputs / "run", inputs / "exported"
    shorter = CONFIGURATION.replace("steps = 120", "steps = 24").replace("warmup_steps = 4", "warmup_steps = 2")
    configuration.write_text(shorter.format(tokens=tokens))

    def tokenize(folder, source=inputs / "long.txt"):
        return ["data", "tokenize", source, "--tokenizer", "bytes", "--shard-tokens", "200000", "--threads", "2", "--out", folder]

    def train(folder):
        return ["train", "lm", configuration, "--threads", "2", "--device", "cpu", "--out", folder]

    def resume(folder):
        # Without run.json the run has not begun.
        return ["train", "lm", "--resume", folder, "--threads", "2"] if (folder / "run.json").exists() else train(folder)

    for arguments in (tokenize(tokens, inputs / "short.txt"), train(run), ["export", run, "--out", exported]):
        check(program.run(arguments, folder) == 0, f"{arguments}: {folder.errors()}")
    return [Command("data tokenize", tokenize), Command("train lm", train, resume),
            Command("export", lambda folder: ["export", run, "--out", folder]),
            Command("import", lambda folder: ["import", exported, "--out", folder]), Server(run)]


class Row:
    """The results of the trials of a case and a call."""

    def __init__(self, case, call, count):
        self.case, self.call, self.count = case, call, count
        self.trials, self.codes, self.not_reached, self.wrong = 0, {0: 0, 1: 0, 2: 0}, 0, 0


def chosen(count, most, rng):
    """Returns the numbers of the calls that fail: all, or one at random from each of `most` equal ranges."""
    if count <= most:
        return list(range(1, count + 1))
    return [rng.randrange(count * i // most, count * (i + 1) // most) + 1 for i in range(most)]


def run_case(program, work, case, calls, most, rng):
    rows, base = [], re.sub(r"\W+", "-", case.name)
    whole = Folder(work, f"{base}/whole")
    case.run_whole(program, whole)
    for call in calls:
        row = Row(case, call, whole.calls().count(call))
        rows.append(row)
        for number in chosen(row.count, most, rng):
            folder = Folder(work, f"{base}/{call}-{number}")
            row.trials += 1
            try:
                code = case.try_fault(program, folder, (call, number))
                row.codes[code] += 1
                row.not_reached += not folder.calls()
                folder.remove()
            except Wrong as what:
                row.wrong += 1
                print(f"{case.name}, {call} {number}, {folder.files}: {what}", flush=True)
    return rows


EXPLANATION = """\
A trial is a run in which one call fails: a write, fsync, rename, mapping or read of a file below the trials' folder, or an
allocation of at least 64 KiB. "Calls" counts these calls in a run without a fault.

- Exit code 1 or 2: the command failed with one sentence. Repeated without a fault, it wrote the files of a run without a fault.
- Survived: exit code 0 with the files of a run without a fault. A server kept every session and answered every request; it may
  have answered with status 503, or ended the connection, before the request was sent again.
- Not reached: the run ended before the call, because the numbers of calls differ between runs.
- Wrong: any other result. [fault_runs.py](../../tests/faults/fault_runs.py) says what is right.
"""


def table_of(rows, program, options):
    version = subprocess.run([program.efla, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    lines = ["# Runs in which one call fails", "", EXPLANATION,
             f"`tests/faults/fault_runs.py build/bin/efla build/tests/faults/libefla_fault_shim.so {options}`,",
             f"{version}, {os.cpu_count()} processors, {time.strftime('%Y-%m-%d', time.gmtime())}.", "",
             "| command | call | calls | trials | exit code 1 or 2 | survived | of them not reached | wrong |",
             "|---|---|---|---|---|---|---|---|"]
    cells = [(r.case.name, r.call, r.count, r.trials, r.codes[1] + r.codes[2], r.codes[0], r.not_reached, r.wrong) for r in rows]
    cells.append(("all", "", *(sum(column) for column in list(zip(*cells))[2:])))
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in cells]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("efla", type=pathlib.Path, help="the program, of a release build")
    parser.add_argument("shim", type=pathlib.Path, help="the library of fault_shim.cc")
    parser.add_argument("--each", type=int, default=40, help="most trials per command and call (default: 40)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the choice among more calls than --each (default: 1)")
    parser.add_argument("--only", action="append", help="a command of the table; may be given repeatedly")
    parser.add_argument("--call", action="append", choices=CALLS, help="a call; may be given repeatedly")
    parser.add_argument("--out", type=pathlib.Path, help="file for the table, which is printed in any case")
    arguments = parser.parse_args()
    work = pathlib.Path(tempfile.mkdtemp(prefix="efla-faults-")).resolve()
    program = Program(arguments.efla.resolve(), arguments.shim.resolve())
    cases = make_cases(program, work)
    names = arguments.only or [case.name for case in cases]
    if unknown := set(names) - {case.name for case in cases}:
        parser.error(f"--only: got {', '.join(unknown)}, expected one of {', '.join(case.name for case in cases)}")
    rng = random.Random(arguments.seed)
    rows = []
    for case in cases:
        if case.name in names:
            rows += run_case(program, work, case, arguments.call or CALLS, arguments.each, rng)
    table = table_of(rows, program, f"--each {arguments.each} --seed {arguments.seed}")
    print(table, end="")
    if arguments.out:
        arguments.out.write_text(table)
    if any(row.wrong for row in rows):
        sys.exit(f"the folders of the trials that went wrong are in {work}")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
