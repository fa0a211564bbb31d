#!/usr/bin/env python3
"""Measures what a growing conversation of an agent costs `efla serve` per turn, with and without the prefix cache.

    bench/serve_agent.py PROGRAM MODEL TEMPLATE [--turns 40] > agent-traffic.jsonl

A turn sends the whole conversation to /v1/messages: three tools, a system prompt, and per earlier turn a call of a tool with its
result. The conversation does not depend on the model, which writes one token per turn. Two servers, one of them with
`--cache-memory 0`, take each turn one after the other. Prints a line of JSON per turn and server: the tokens of the prompt, how
many of them were prefilled, and the time to the first token.
"""

import argparse
import http.client
import json
import random
import subprocess
import time

TOOLS = [{"name": name, "description": description, "input_schema": {"type": "object", "properties": properties,
                                                                     "required": list(properties)}}
         for name, description, properties in (
             ("read_file", "Returns the text of a file.", {"path": {"type": "string"}, "line": {"type": "integer"}}),
             ("run", "Runs a command and returns what it prints.", {"command": {"type": "string"}}),
             ("edit", "Replaces a text in a file.", {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}}))]
SYSTEM = "You are an agent that changes programs. " + "Read the file before you change it, and run the tests afterwards. " * 20
WORDS = "the state of a text has one size for any length and a copy of it is shared until one of them changes".split()


def turn_of(draw, number):
    """Returns the messages of a turn: a call and its result."""
    text = " ".join(draw.choices(WORDS, k=80))
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": "run", "input": {"command": f"sed -n {number}p notes"}}
    return [{"role": "assistant", "content": [{"type": "text", "text": "I look at the next line."}, call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": text}]}]


def first_token(port, messages):
    """Returns the usage of one turn, and the milliseconds to its first token."""
    body = {"max_tokens": 1, "temperature": 0, "system": SYSTEM, "tools": TOOLS, "messages": messages}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    begin = time.monotonic()
    connection.request("POST", "/v1/messages", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    content = json.loads(reply.read())
    assert reply.status == 200, content
    return content["usage"], 1000 * (time.monotonic() - begin)


def serve(arguments, *more):
    server = subprocess.Popen([arguments.program, "serve", arguments.model, "--port", "0", "--chat-template", arguments.template, *more],
                              stdout=subprocess.PIPE, text=True)
    return server, int(server.stdout.readline().rsplit(":", 1)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("program", "model", "template"):
        parser.add_argument(name)
    parser.add_argument("--turns", type=int, default=40)
    arguments = parser.parse_args()
    draw, messages = random.Random(0), [{"role": "user", "content": "Find out what the notes say."}]
    servers = {True: serve(arguments), False: serve(arguments, "--cache-memory", "0")}
    try:
        for number in range(1, arguments.turns + 1):
            for cache, (_, port) in servers.items():
                usage, milliseconds = first_token(port, messages)
                prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
                print(json.dumps({"turn": number, "cache": cache, "prompt_tokens": prompt, "prefilled_tokens": usage["input_tokens"],
                                  "first_token_ms": round(milliseconds, 1)}), flush=True)
            messages += turn_of(draw, number)
    finally:
        for server, _ in servers.values():
            server.kill()


if __name__ == "__main__":
    main()
