#!/usr/bin/env python3
"""Asks `efla serve` for replies and calls of tools with random schemas, and validates each with Python's jsonschema.

    tests/serve/structured_output.py build/bin/efla [SCHEMAS [SEED]]

Trains a model of a few thousand weights, whose replies are nearly random. Prints how many replies were finished, cut off by
max_tokens, and refused, and exits with 1 if one is wrong, with 77 where jsonschema is missing. ctest runs a sample.
"""

import collections
import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile

try:
    import jsonschema
except ImportError:
    print("structured_output: Python's jsonschema is not installed")
    sys.exit(77)

CONFIGURATION = """
[model]
mixer = "gdn"
hidden_size = 16
num_hidden_layers = 1
num_heads = 1
intermediate_size = 32

[data]
train = "tokens"
tokenizer = "bytes"

[training]
sequence_length = 64
tokens_per_step = 256
micro_batch = 4
steps = 2
warmup_steps = 1
lr = 1e-3
min_lr = 1e-4
checkpoint_every = 2
"""
TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}{{ message.content }}
{% endfor %}"""
TOOL_FORMATS = ["xml", "hermes", "json"]
EOS = 257
# What ends texts, lists and objects, so that most replies are finished.
ENDS = {str(ord(c)): 4 for c in "\"}]"} | {str(EOS): 8} | {str(ord(c)): -6 for c in " \t\n\r{["}
NAMES = ["a", "b", "ab", "name", "é", "x y", "q\"", "a\\", ""]
VALUES = [1, "a", None, True, 2.5, "é\"\\\n", [1], {"a": 1}, "", -0.0, 1e30]
INTEGERS = [{}, {"minimum": -7}, {"maximum": 12}, {"minimum": -300, "maximum": 120}, {"exclusiveMinimum": 3}, {"exclusiveMaximum": 4},
            {"multipleOf": 7}, {"minimum": 0, "maximum": 100, "multipleOf": 5}]
NUMBERS = [{}, {"minimum": -1.5}, {"minimum": 1e-7}, {"maximum": 2.25}, {"minimum": 0.1, "maximum": 0.2},
           {"exclusiveMinimum": 0, "exclusiveMaximum": 1}]
PATTERNS = ["^[a-z]+$", "a", "[0-9]{2,4}", "^(x|yy)*$", "\\d+\\.\\d", "^[^a]*$", "^.{2}$", "[^\"]"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "uri", "uri-reference", "duration", "hostname"]
TREE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}, "value": {"type": "integer"}}}


def random_schema(rng, depth=0):
    """Returns a schema that a client may send; some of them are refused."""
    leaves = [lambda: {"type": "integer", **rng.choice(INTEGERS)},
              lambda: {"type": "number", **rng.choice(NUMBERS)},
              lambda: {"type": "string", **rng.choice([{}, {"minLength": 2}, {"maxLength": 5}, {"minLength": 2, "maxLength": 3}])},
              lambda: {"type": "string", "pattern": rng.choice(PATTERNS)},
              lambda: {"type": "string", "format": rng.choice(FORMATS)},
              lambda: {"type": rng.choice(["boolean", "null"])},
              lambda: {"enum": rng.sample(VALUES, rng.randint(1, 4))},
              lambda: {"const": rng.choice(VALUES)},
              lambda: {"type": rng.sample(["string", "integer", "null", "boolean", "number"], 2)},
              lambda: rng.choice([{}, True, {"$ref": "#/$defs/tree"}])]
    inner = [lambda: {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]},
             lambda: {"oneOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 2))]},
             lambda: random_list(rng, depth),
             lambda: random_object(rng, depth),
             lambda: random_object(rng, depth)]
    return rng.choice(leaves + (inner * 2 if depth < 3 else []))()


def random_list(rng, depth):
    schema = {"type": "array"}
    if rng.random() < 0.8:
        schema["items"] = random_schema(rng, depth + 1)
    if rng.random() < 0.2:
        schema["prefixItems"] = [random_schema(rng, depth + 1)]
    if rng.random() < 0.4:
        schema["minItems"] = rng.randint(0, 2)
    if rng.random() < 0.6:
        schema["maxItems"] = rng.randint(2, 4)
    return schema


def random_object(rng, depth):
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema = {"type": "object", "properties": {name: random_schema(rng, depth + 1) for name in names},
              "required": rng.sample(names, rng.randint(0, len(names)))}
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.choice([False, False, True, random_schema(rng, depth + 1)])
    if rng.random() < 0.2:
        schema[rng.choice(["minProperties", "maxProperties"])] = rng.randint(1, 3)
    return schema


def post(address, path, body):
    connection = http.client.HTTPConnection(address, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.load(answer)


def outcomes(address, path, body, schema, read, name):
    """Sends a request. Validates what `read` returns of each choice that is not cut off. Returns what became of each, `name` or another."""
    status, answer = post(address, path, body)
    if status == 400:
        return ["refused"]
    assert status == 200, (schema, answer)
    results = []
    for choice in answer["choices"]:
        if choice["finish_reason"] == "length":
            results.append("cut off")
            continue
        jsonschema.Draft202012Validator(schema).validate(json.loads(read(choice)))
        results.append(name)
    return results


def check_calls(address, seed):
    """Asks for replies that call a tool with one schema. Returns what became of each."""
    rng = random.Random(seed)
    schema = random_object(rng, 1)
    schema["$defs"] = {"tree": TREE}
    tool = {"type": "function", "function": {"name": "use", "parameters": schema, "strict": True}}
    body = {"max_tokens": 500, "seed": seed, "n": 2, "logit_bias": ENDS | {str(ord("<")): 4}, "tools": [tool], "tool_choice": "required",
            "parallel_tool_calls": False, "messages": [{"role": "user", "content": "a"}]}
    def read(choice):
        assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"], (schema, choice)
        call, = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "use", choice
        return call["function"]["arguments"]

    return outcomes(address, "/v1/chat/completions", body, schema, read, "called")


def check(address, seed):
    """Asks for replies to one schema, or that call a tool. Returns what became of each."""
    rng = random.Random(seed)
    if rng.random() < 0.4:
        return check_calls(address, seed)
    schema = random_schema(rng)
    if isinstance(schema, dict):
        schema["$defs"] = {"tree": TREE}
    body = {"max_tokens": 500, "seed": seed, "n": 2, "logit_bias": ENDS}
    if rng.random() < 0.5:
        path, texts = "/v1/completions", lambda choice: choice["text"]
        body |= {"prompt": "a", "structured_outputs": {"json": schema}}
    else:
        path, texts = "/v1/chat/completions", lambda choice: choice["message"]["content"]
        body |= {"messages": [{"role": "user", "content": "a"}],
                 "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    def read(choice):
        assert choice["finish_reason"] == "stop", (schema, choice)
        return texts(choice)

    return outcomes(address, path, body, schema, read, "finished")


def train(program, folder):
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "run.toml").write_text(CONFIGURATION)
    for arguments in (["data", "tokenize", __file__, "--tokenizer", "bytes", "--out", "tokens"],
                      ["train", "lm", "run.toml", "--device", "cpu", "--out", "run"]):
        subprocess.run([program, *arguments], cwd=folder, check=True, capture_output=True)


@contextlib.contextmanager
def server(program, folder, tool_format):
    process = subprocess.Popen([program, "serve", "run", "--device", "cpu", "--port", "0", "--chat-template", "template.jinja",
                                "--tool-format", tool_format], cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().rsplit("//", 1)[1].strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def main(program, schemas="1000", seed="1"):
    program, counts, wrong = str(pathlib.Path(program).resolve()), collections.Counter(), 0
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(8) as pool:
        train(program, pathlib.Path(folder))
        for n, tool_format in enumerate(TOOL_FORMATS):
            seeds = [int(seed) * 1_000_000 + i for i in range(n, int(schemas), len(TOOL_FORMATS))]
            with server(program, folder, tool_format) as address:
                for done in concurrent.futures.as_completed(pool.submit(check, address, one) for one in seeds):
                    try:
                        counts.update(done.result())
                    except Exception as error:  # a wrong reply
                        wrong += 1
                        print(f"wrong: {tool_format}: {error}"[:1000])
    print(f"{schemas} schemas: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) + f", {wrong} wrong")
    sys.exit(wrong > 0 or counts["finished"] < int(schemas) / 2 or counts["called"] < int(schemas) / 8)


if __name__ == "__main__":
    main(*sys.argv[1:])
