#!/usr/bin/env python3
"""Measures what a growing conversation of an agent costs `efla serve` per turn, with and without the prefix cache.

    bench/serve_agent.py PROGRAM MODEL TEMPLATE [--turns 40] [--server OPTIONS …] > agent-traffic.jsonl

A turn sends the whole conversation to /v1/messages: three tools, a system prompt, and per earlier turn a call of a tool with its
result. The conversation does not depend on the model, which writes one token per turn. After every tenth turn the result that it
added is another one: a branch. The servers, by default one with the cache and one with `--cache-memory 0`, take each turn one after
the other. Prints a line of JSON per turn and server: the tokens of the prompt, how many of them were prefilled, and the time to the
first token. At the end it prints what the cache of each server holds, a line per server. With `--tokens N` replies have N tokens, each
time is that of a whole reply, and the script fails where the servers' replies differ.
"""

import argparse
import http.client
import json
import random
import re
import subprocess
import sys
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


def other_result(draw, messages):
    """Returns the messages with another result at their end."""
    result = {**messages[-1]["content"][0], "content": " ".join(draw.choices(WORDS, k=40))}
    return [*messages[:-1], {"role": "user", "content": [result]}]


def reply_of(port, messages, tokens):
    """Returns the reply to a turn, and its milliseconds."""
    body = {"max_tokens": tokens, "temperature": 0, "system": SYSTEM, "tools": TOOLS, "messages": messages}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    begin = time.monotonic()
    connection.request("POST", "/v1/messages", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    content = json.loads(reply.read())
    assert reply.status == 200, content
    return content, 1000 * (time.monotonic() - begin)


def serve(arguments, options):
    server = subprocess.Popen([arguments.program, "serve", arguments.model, "--port", "0", "--chat-template", arguments.template,
                               *options.split()], stdout=subprocess.PIPE, text=True)
    return server, int(server.stdout.readline().rsplit(":", 1)[1])


def take_turn(arguments, servers, name, messages):
    """Prints a line per server."""
    texts = []
    for options, (_, port) in servers.items():
        reply, milliseconds = reply_of(port, messages, arguments.tokens)
        usage = reply["usage"]
        prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        print(json.dumps({**name, "server": options, "prompt_tokens": prompt, "prefilled_tokens": usage["input_tokens"],
                          "first_token_ms" if arguments.tokens == 1 else "reply_ms": round(milliseconds, 1)}), flush=True)
        texts.append(reply["content"])
    if texts != texts[:1] * len(texts):
        sys.exit(f"the replies to {name} differ")


def cached(options, port):
    """Prints what the cache of a server holds."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    keys = ("prefix_cache_entries", "prefix_cache_bytes", "slot_bytes", "page_bytes", "prefix_cache_hits_total", "prompt_tokens_total",
            "spec_decode_num_draft_tokens_total")
    print(json.dumps({"server": options, **{key: float(re.search(rf"(?m)^\w*:?{key}(?:{{.*}})? (\S+)$", text)[1]) for key in keys}}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("program", "model", "template"):
        parser.add_argument(name)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--server", action="append", metavar="OPTIONS", help="of `efla serve`, one server each")
    arguments = parser.parse_args()
    draw, messages = random.Random(0), [{"role": "user", "content": "Find out what the notes say."}]
    servers = {options: serve(arguments, options) for options in arguments.server or ["", "--cache-memory 0"]}
    try:
        for number in range(1, arguments.turns + 1):
            take_turn(arguments, servers, {"turn": number}, messages)
            if number % 10 == 0:
                take_turn(arguments, servers, {"branch": number}, other_result(random.Random(number), messages))
            messages += turn_of(draw, number)
        for options, (_, port) in servers.items():
            cached(options, port)
    finally:
        for server, _ in servers.values():
            server.kill()


if __name__ == "__main__":
    main()
