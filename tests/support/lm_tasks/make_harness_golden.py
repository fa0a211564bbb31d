#!/usr/bin/env python3
"""What lm-evaluation-harness itself makes of local files of tasks, with a toy model over bytes.

    make_harness_golden.py FOLDER OUT.json [LIMIT]

Needs lm_eval (0.4.13 made harness.json from the files beside this script) and no network. lm_eval's own task definitions
and evaluator run; only their data sets are read from FOLDER, with the fields of the originals. OUT.json gets every
request's strings and every score. tests/eval/lm_benchmark_test.cc computes the same.
"""

import gzip
import json
import lzma
import pathlib
import sys

import datasets
import lm_eval
import lm_eval.utils
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

TASKS = ["wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "boolq",
         "openbookqa", "sciq"]
MAX_LENGTH = 64  # tokens of a window: shorter than most contexts, so that cutting them is tested
VOCABULARY, BOS = 258, 256
FOLDER = pathlib.Path(sys.argv[1])


def text(name):
    for suffix, opener in (("", open), (".gz", gzip.open), (".xz", lzma.open)):
        path = FOLDER / (name + suffix)
        if path.exists():
            with opener(path, "rt", encoding="utf-8", newline="\n") as file:
                return file.read()
    raise FileNotFoundError(FOLDER / name)


def records(name):
    return [json.loads(line) for line in text(name).split("\n") if line]


def pages():
    """WikiText cut into articles, as the harness's data set has them."""
    found, lines = [], []
    for line in text("wikitext-2.test.tokens").split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            if "".join(lines).strip():
                found.append("\n".join(lines))
            lines = []
        lines.append(line)
    return [{"page": page} for page in found + ["\n".join(lines)]]


def hellaswag():
    for row in records("hellaswag-val.jsonl"):
        if "ctx" in row:  # ctx_a and ctx_b joined: a begun sentence ends without a full stop
            start, stop, begun = row["ctx"].rpartition(". ")
            whole = row["ctx"].endswith(".") or not stop
            row["ctx_a"], row["ctx_b"] = (row["ctx"], "") if whole else (start + ".", begun)
        fields = {name: row[name] for name in ("activity_label", "ctx_a", "ctx_b", "endings")}
        yield fields | {"label": str(row["label"])}


def openbookqa():
    for row in records("openbookqa-test.jsonl"):
        choices = {name: [choice[name] for choice in row["question"]["choices"]] for name in ("text", "label")}
        yield {"question_stem": row["question"]["stem"], "choices": choices, "answerKey": row["answerKey"]}


def rows(path, name):
    match path.split("/")[-1]:
        case "wikitext_document_level":
            return pages()
        case "lambada_openai":
            return records("lambada-openai-test.jsonl")
        case "piqa":
            labels = text("piqa-valid-labels.lst").split()
            return [row | {"label": int(label)} for row, label in zip(records("piqa-valid.jsonl"), labels, strict=True)]
        case "hellaswag":
            return list(hellaswag())
        case "winogrande":
            return records("winogrande-dev.jsonl")
        case "ai2_arc":
            return records(name.lower() + "-test.jsonl")
        case "super_glue":  # whose passages begin with the title
            return [{"question": row["question"], "passage": f"{row['title']} -- {row['passage']}",
                     "label": int(row["answer"])} for row in records("boolq-dev.jsonl")]
        case "openbookqa":
            return list(openbookqa())
        case "sciq":
            return records("sciq-test.jsonl")
    raise KeyError(path)


def load_dataset(path, name=None, **_):
    data = datasets.Dataset.from_list(rows(path, name))
    return datasets.DatasetDict({split: data for split in ("train", "validation", "test")})


class Toy(TemplateLM):
    """Bytes as tokens. The distribution of the next depends on all tokens that are read, and favours the one of 8 before."""

    eot_token_id = VOCABULARY - 1
    prefix_token_id = BOS

    def tok_encode(self, string, add_special_tokens=None, **_):
        return list(string.encode("utf-8"))

    def log_probabilities(self, inputs):
        state, v = 0, np.arange(VOCABULARY, dtype=np.int64)
        for i, token in enumerate(inputs):
            state = (state * 37 + token + 1) % 1009
            logits = 6.0 * (((state * 131 + v * v * 17 + state * v * 7 + v) % 1009) / 1009.0)
            if i >= 7:
                logits[inputs[i - 7]] += 7.0
            yield logits - np.log(np.exp(logits).sum())

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        results = []
        for _, context, continuation in requests:
            assert context and continuation and len(continuation) <= MAX_LENGTH
            inputs = (context + continuation)[-(MAX_LENGTH + 1):][:-1]
            scored = list(self.log_probabilities(inputs))[-len(continuation):]
            pairs = list(zip(scored, continuation, strict=True))
            results.append((float(sum(p[t] for p, t in pairs)), all(int(p.argmax()) == t for p, t in pairs)))
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        results = []
        for (string,) in (request.args for request in requests):
            windows = lm_eval.utils.get_rolling_token_windows(self.tok_encode(string), self.prefix_token_id, MAX_LENGTH, 1)
            pairs = [(None, *lm_eval.utils.make_disjoint_window(window)) for window in windows]
            results.append(sum(score for score, _ in self._loglikelihood_tokens(pairs)))
        return results

    def generate_until(self, requests, disable_tqdm=False):
        raise NotImplementedError


def main():
    datasets.load_dataset = load_dataset
    limit = int(sys.argv[3]) if len(sys.argv) > 3 else None
    golden = {"lm_eval": lm_eval.__version__, "max_length": MAX_LENGTH, "limit": limit, "requests": {}, "results": {}}
    for name, task in TaskManager().load_task_or_group(TASKS).items():
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        golden["requests"][name.removesuffix("_openai")] = [list(request.args) for request in task.instances]
    scores = lm_eval.simple_evaluate(model=Toy(), tasks=TASKS, limit=limit, log_samples=False)["results"]
    for name, metrics in scores.items():
        values = {key.removesuffix(",none"): value for key, value in metrics.items() if key.endswith(",none")}
        golden["results"][name.removesuffix("_openai")] = {
            key: None if value == "N/A" else float(value) for key, value in values.items()}
    pathlib.Path(sys.argv[2]).write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
