#!/usr/bin/env python3
"""Kills efla at random moments, resumes, and compares the files with those of a run that nobody killed.

    tests/kills/kill_runs.py build/bin/efla --out bench/results/kills.md     # 1,000 kills, the full run
    tests/kills/kill_runs.py build/bin/efla --kills 60                       # a short one
    tests/kills/kill_runs.py build/bin/efla --only "data tokenize" --seed 7

Run by hand: the full run takes the better part of an hour. Needs Python 3 alone. Every command gets an equal part of the
kills. One trial is a run that is killed up to ten times and then ends by itself. Nine kills in ten are SIGKILL, the others
SIGTERM or SIGINT, half of which come twice. Half of the kills come at a random time, half shortly after a change in the
run's folder, where files are written and renamed. A difference is a file that is missing, not expected, or has other
bytes; in JSON the times, the speeds and the command line do not count. A leftover is a temporary file that a kill left and
no later process removed. A failure is an exit code that neither success nor the signal explains. The exit code is 1 where
there is a difference or a failure. The folders of such trials stay, and those of trials with leftovers. Ctrl-C ends with
the trials under way.
"""

import argparse
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

KILLS_PER_TRIAL = 10
# Fields that differ between two runs of the same command.
UNEQUAL = {"seconds", "tokens_per_second", "images_per_second", "sequences_per_second", "train_seconds", "command", "date"}
TEMPORARY = re.compile(r"\..+\.tmp-\d+-\d+")  # AtomicFile's names
CONFIGURATION = """
[model]
hidden_size = 32
num_hidden_layers = 1
num_heads = 1
intermediate_size = 48
[data]
train = "{tokens}"
validation = "{tokens}"
tokenizer = "bytes"
[training]
sequence_length = 64
micro_batch = 4
tokens_per_step = 512
steps = 120
warmup_steps = 4
lr = 1e-2
min_lr = 1e-3
evaluate_every = 20
evaluate_tokens = 4096
sample_every = 30
sample_tokens = 8
checkpoint_every = 7
"""


class Case:
    """A command: how it starts in a folder, and how it resumes there after a kill."""

    def __init__(self, name, begin, resume=None):
        self.name, self.begin, self.resume = name, begin, resume or (lambda folder, rng: begin(folder))
        self.kills = {signal.SIGKILL: 0, signal.SIGTERM: 0, signal.SIGINT: 0}
        self.wanted = self.planned = 0  # kills in all, and of the trials under way
        self.seconds = math.inf  # of a run that nobody kills
        self.trials = self.differences = self.failures = self.leftovers = 0

    def killed(self):
        return sum(self.kills.values())


def text_of(rng, size):
    """Documents of random words, at least `size` bytes in all."""
    words = ["state", "delta", "rule", "key", "value", "forgets", "learns", "the", "a", "."]
    parts, length = [], 0
    while length < size:
        document = " ".join(rng.choices(words, k=rng.randrange(1, 4000))) + "\n<|endoftext|>\n"
        parts.append(document)
        length += len(document)
    return "".join(parts)


def make_cases(efla, work):
    rng = random.Random(1)
    (work / "short.txt").write_text(text_of(rng, 200_000))
    (work / "long.txt").write_text(text_of(rng, 7_000_000))
    tokens = work / "tokens"
    subprocess.run([efla, "data", "tokenize", work / "short.txt", "--tokenizer", "bytes", "--out", tokens], check=True)
    (work / "lm.toml").write_text(CONFIGURATION.format(tokens=tokens))
    cases = []
    for threads in ("1", "2", "3"):

        def train(folder, threads=threads):
            return ["train", "lm", work / "lm.toml", "--out", folder, "--threads", threads]

        def resume(folder, _, threads=threads):
            # Without run.json the run has not begun.
            if (folder / "run.json").exists():
                return ["train", "lm", "--resume", folder, "--threads", threads]
            return ["train", "lm", work / "lm.toml", "--out", folder, "--threads", threads]

        cases.append(Case(f"train lm --threads {threads}", train, resume))

    def smnist(folder):
        return ["train", "smnist", "--train-images", "400", "--test-images", "64", "--epochs", "3", "--hidden", "16",
                "--batch-size", "8", "--checkpoint-every", "20", "--threads", "2", "--out", folder]

    def resume_smnist(folder, rng):
        # Before the first checkpoint the same command begins anew, and --resume may do so too.
        if list(folder.glob("checkpoints/step-*")):
            return ["train", "smnist", "--resume", folder, "--checkpoint-every", "20", "--threads", "2"]
        if (folder / "training.json").exists() and rng.random() < 0.5:
            return ["train", "smnist", "--resume", folder, "--checkpoint-every", "20", "--threads", "2"]
        return smnist(folder)

    cases.append(Case("train smnist", smnist, resume_smnist))
    cases.append(Case("data tokenize", lambda folder: ["data", "tokenize", work / "long.txt", "--tokenizer", "bytes",
                                                       "--shard-tokens", "200000", "--threads", "2", "--out", folder]))
    cases.append(Case("reproduce mad", lambda folder: ["reproduce", "mad", "--scale", "tiny", "--mixers", "deltanet",
                                                       "--threads", "2", "--out", folder]))
    return cases


def tree(folder):
    """What changes when the folder is written: its files with their sizes and numbers."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except FileNotFoundError:
                continue
            found[os.path.join(root, name)] = (status.st_ino, status.st_size)
    return found


def without(value):
    if isinstance(value, dict):
        return {k: without(v) for k, v in value.items() if k not in UNEQUAL}
    return [without(v) for v in value] if isinstance(value, list) else value


def content(path):
    data = path.read_bytes()
    if path.suffix == ".json":
        return without(json.loads(data))
    if path.suffix == ".jsonl":
        return [without(json.loads(line)) for line in data.splitlines()]
    return data


def differences(got, expected):
    """The files of a folder that are not as in the other, and the temporary files that kills left in it.

    TensorBoard's files and the report hold times.
    """
    def files(folder):
        return {p.relative_to(folder): p for p in folder.rglob("*")
                if p.is_file() and "tensorboard" not in p.parts and p.name != "report.html"}
    a, b = files(got), files(expected)
    wrong = [f"{name} is not expected" for name in a.keys() - b.keys() if not TEMPORARY.fullmatch(name.name)]
    wrong += [f"{name} is missing" for name in b.keys() - a.keys()]
    wrong += [f"{name} differs" for name in a.keys() & b.keys() if content(a[name]) != content(b[name])]
    return sorted(wrong), sorted(f"{name} is left" for name in a if TEMPORARY.fullmatch(name.name))


class Trial:
    """A run that is killed at most so often and then ends by itself, in a folder of its own."""

    def __init__(self, efla, case, folder, most, rng):
        self.efla, self.case, self.folder, self.rng = efla, case, folder, rng
        self.most, self.signals = most, []  # of the kills so far

    def start(self, arguments):
        self.stderr = self.folder.with_name(self.folder.name + ".stderr")
        with open(self.stderr, "wb") as err:
            return subprocess.Popen([self.efla, *map(str, arguments)], stdin=subprocess.DEVNULL,
                                    stdout=subprocess.DEVNULL, stderr=err, start_new_session=True)

    def wait_for_moment(self, process):
        """Waits for a random time in the run, or a little longer than one of the next changes in the folder."""
        end = time.monotonic() + self.rng.uniform(0, self.case.seconds)
        if self.rng.random() < 0.5:
            end = time.monotonic() + 2 * self.case.seconds
            changes, before = self.rng.choice((1, 2, 3, 5, 10, 20, 50)), tree(self.folder)
            while changes > 0 and time.monotonic() < end and process.poll() is None:
                time.sleep(0.003)
                now = tree(self.folder)
                changes -= now != before
                before = now
            end = time.monotonic() + self.rng.choice((0, 0.001, 0.005, 0.02)) * self.rng.random()
        while process.poll() is None and time.monotonic() < end:
            time.sleep(min(0.002, max(0.0, end - time.monotonic())))

    def kill(self, process):
        """Returns the signal that it sent, None where the process had ended before."""
        which = signal.SIGKILL if self.rng.random() < 0.9 else self.rng.choice((signal.SIGTERM, signal.SIGINT))
        if process.poll() is not None:
            return None
        process.send_signal(which)
        if which != signal.SIGKILL and self.rng.random() < 0.5:
            time.sleep(0.05 * self.rng.random())
            process.send_signal(which)
        return which

    def run(self):
        """Returns what went wrong, None where nothing did."""
        command = self.case.begin(self.folder)
        while True:
            begin, process, sent = time.monotonic(), self.start(command), None
            if len(self.signals) < self.most:
                self.wait_for_moment(process)
                sent = self.kill(process)
            code = process.wait()
            if code == 0:
                if not self.signals:  # the machine is less busy than it was
                    self.case.seconds = min(self.case.seconds, time.monotonic() - begin)
                return None
            if sent is None or code not in (-sent, 130):
                message = self.stderr.read_text(errors="replace").strip().splitlines()[-1:]
                return f"exit code {code} of {' '.join(map(str, command))}: {''.join(message)}"
            self.signals.append(sent)
            command = self.case.resume(self.folder, self.rng)


def run_whole(efla, work, case):
    """Runs the case without a kill, for its files and its time."""
    case.whole = work / (case.name.replace(" ", "-") + "-whole")
    if failure := Trial(efla, case, case.whole, 0, random.Random()).run():
        sys.exit(f"{case.name}: {failure}")


class Trials:
    """Trials of all cases, several at a time and the cases in turn, until each has its kills or stop() is called."""

    def __init__(self, efla, work, cases, seed):
        self.efla, self.work, self.cases, self.seed = efla, work, cases, seed
        self.lock, self.stopped = threading.Lock(), False

    def next(self):
        with self.lock:
            left = [c for c in self.cases if c.killed() + c.planned < c.wanted]
            if self.stopped or not left:
                return None
            case = min(left, key=lambda c: (c.killed() + c.planned) / c.wanted)
            rng = random.Random(f"{self.seed} {case.name} {case.trials}")
            most = min(rng.randint(1, KILLS_PER_TRIAL), case.wanted - case.killed() - case.planned)
            folder = self.work / f"{case.name.replace(' ', '-')}-{case.trials}"
            case.trials += 1
            case.planned += most
            return Trial(self.efla, case, folder, most, rng)

    def work_on(self):
        while (trial := self.next()) is not None:
            case, failure = trial.case, trial.run()
            wrong, leftovers = ([], []) if failure else differences(trial.folder, case.whole)
            with self.lock:
                case.planned -= trial.most
                for which in trial.signals:
                    case.kills[which] += 1
                case.failures += failure is not None
                case.differences += len(wrong)
                case.leftovers += len(leftovers)
                print(f"{sum(c.killed() for c in self.cases)} kills", file=sys.stderr, flush=True)
            if failure or wrong or leftovers:
                what = failure or "; ".join(wrong + leftovers)
                print(f"{case.name}, {trial.folder}, {len(trial.signals)} kills: {what}", flush=True)
            else:
                shutil.rmtree(trial.folder)

    def run(self, jobs):
        workers = [threading.Thread(target=self.work_on) for _ in range(jobs)]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        except KeyboardInterrupt:
            self.stopped = True
            for worker in workers:
                worker.join()


def table_of(cases, efla, seed):
    version = subprocess.run([efla, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    lines = ["# Runs that were killed and resumed", "",
             f"`tests/kills/kill_runs.py build/bin/efla --kills {sum(c.killed() for c in cases)} --seed {seed}`, {version}, "
             f"{os.cpu_count()} processors, {time.strftime('%Y-%m-%d', time.gmtime())}. A trial is one run, killed several "
             "times and resumed to its end. A difference is a file that is not as in a run that nobody killed, a leftover "
             "a temporary file that no later process removed, a failure an exit code that neither success nor the signal explains.",
             "",
             "| command | kills | of them SIGTERM, SIGINT | trials | differences | leftovers | failures |",
             "|---|---|---|---|---|---|---|"]
    for c in cases:
        soft = c.killed() - c.kills[signal.SIGKILL]
        lines.append(f"| {c.name} | {c.killed()} | {soft} | {c.trials} | {c.differences} | {c.leftovers} | {c.failures} |")
    total = [sum(x) for x in zip(*((c.killed(), c.killed() - c.kills[signal.SIGKILL], c.trials, c.differences, c.leftovers,
                                    c.failures) for c in cases))]
    lines.append("| all | " + " | ".join(map(str, total)) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("efla", type=pathlib.Path, help="the program, of a release build")
    parser.add_argument("--kills", type=int, default=1000, help="in all (default: 1000)")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; they also depend on the machine")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--only", action="append", help="a command of the table; may be given repeatedly")
    parser.add_argument("--out", type=pathlib.Path, help="file for the table (default: printed alone)")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    efla, work = arguments.efla.resolve(), pathlib.Path(tempfile.mkdtemp(prefix="efla-kills-"))
    all_cases = make_cases(efla, work)
    names = arguments.only or [case.name for case in all_cases]
    if unknown := set(names) - {case.name for case in all_cases}:
        parser.error(f"--only: got {', '.join(unknown)}, expected one of {', '.join(c.name for c in all_cases)}")
    cases = [case for case in all_cases if case.name in names]
    for i, case in enumerate(cases):
        case.wanted = arguments.kills // len(cases) + (i < arguments.kills % len(cases))
        run_whole(efla, work, case)
    Trials(efla, work, cases, seed).run(arguments.jobs)
    table = table_of(cases, efla, seed)
    print(table, end="")
    if arguments.out:
        arguments.out.write_text(table)
    if any(case.differences or case.failures for case in cases):
        sys.exit(f"the folders of the trials that went wrong are in {work}")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
