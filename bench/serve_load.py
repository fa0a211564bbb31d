#!/usr/bin/env python3
"""Measures a running `efla serve` under load: memory of many sessions, the wait of a short prompt beside a long one,
and the rate of streams.

    bench/serve_load.py sessions PORT [--sessions 1000] [--seconds 230] [--clients 32]
    bench/serve_load.py wait PORT [--prompt 1000000]
    bench/serve_load.py streams PORT [--clients 32] [--tokens 300] [--rounds 9]

`sessions` stores texts, then continues one after another by a token each with `wrk` (Debian's package), and prints the
requests and the resident memory of the server every 30 seconds. `wait` measures the time from sending a prompt of 16
tokens to the first token of the reply, with an idle server and while one long prompt is read. `streams` measures the
tokens per second of several replies at once, interleaved, as streams and as whole replies. A whole reply costs the
server no message per token. The model has a tokenizer of bytes. Needs Linux, because memory comes from /proc.
"""

import argparse
import http.client
import json
import random
import selectors
import socket
import statistics
import subprocess
import tempfile
import threading
import time

JSON = {"Content-Type": "application/json"}
CONTINUE = """
local n = 0
request = function()
  n = n + 1
  local body = '{"session": "s' .. n * 7 %% %d .. '", "prompt": "x", "max_tokens": 1, "temperature": 0}'
  return wrk.format("POST", "/v1/completions", {["Content-Type"] = "application/json"}, body)
end
"""


def post(connection, path, body):
    connection.request("POST", path, json.dumps(body), JSON)
    return connection.getresponse()


def resident_kib(port):
    """Returns the resident KiB of the process that listens on the port."""
    listening = subprocess.run(["ss", "-ltnpH", f"sport = :{port}"], capture_output=True, text=True, check=True).stdout
    process = listening.split("pid=")[1].split(",")[0]
    with open(f"/proc/{process}/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1])


def measure_sessions(arguments):
    connection = http.client.HTTPConnection("127.0.0.1", arguments.port)
    for i in range(arguments.sessions):
        reply = post(connection, "/v1/sessions", {"name": f"s{i}", "prompt": f"Once upon a time {i}"})
        assert reply.status == 201, reply.read()
        reply.read()
    print(f"{arguments.sessions} sessions: {resident_kib(arguments.port)} KiB")
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(CONTINUE % arguments.sessions)
        script.flush()
        load = subprocess.Popen(
            ["wrk", "-t1", f"-c{arguments.clients}", f"-d{arguments.seconds}s", "-s", script.name,
             f"http://127.0.0.1:{arguments.port}/"], stdout=subprocess.PIPE, text=True)
        while load.poll() is None:
            try:
                load.wait(30)
            except subprocess.TimeoutExpired:
                print(f"{resident_kib(arguments.port)} KiB", flush=True)
        print(load.stdout.read())


def first_token_ms(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    prompt = [random.randrange(256) for _ in range(16)]
    begin = time.monotonic()
    # With log-probabilities every token is an event of its own, also one that is part of a character.
    reply = post(connection, "/v1/completions",
                 {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True, "logprobs": 0})
    for line in reply:
        if b'"token_logprobs":[' in line:
            milliseconds = (time.monotonic() - begin) * 1e3
            reply.read()
            return milliseconds
    raise SystemExit("the reply has no token")


def describe(name, times):
    times.sort()
    print(f"{name}: median {statistics.median(times):.1f} ms, 90 % {times[len(times) * 9 // 10]:.1f} ms, "
          f"most {times[-1]:.1f} ms")


def measure_wait(arguments):
    describe("idle", [first_token_ms(arguments.port) for _ in range(20)])
    prompt = [random.randrange(256) for _ in range(arguments.prompt)]

    def read_long_prompt():
        connection = http.client.HTTPConnection("127.0.0.1", arguments.port, timeout=3600)
        post(connection, "/v1/completions", {"prompt": prompt, "max_tokens": 1}).read()

    reader = threading.Thread(target=read_long_prompt, daemon=True)
    reader.start()
    time.sleep(4)
    times = []
    while reader.is_alive() and len(times) < 60:
        times.append(first_token_ms(arguments.port))
        time.sleep(0.3)
    describe(f"beside a prompt of {arguments.prompt} tokens", times)


def tokens_per_second(port, clients, tokens, stream):
    """Every reply repeats one letter, so that each of its tokens is an event of its own."""
    body = json.dumps({"prompt": "a", "max_tokens": tokens, "temperature": 0, "logit_bias": {"97": 100},
                       "stream": stream})
    request = ("POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
               f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}").encode()
    waiting = selectors.DefaultSelector()
    received = {}
    for _ in range(clients):
        connection = socket.create_connection(("127.0.0.1", port))
        received[connection] = []
        waiting.register(connection, selectors.EVENT_READ)
    begin = time.monotonic()
    for connection in received:
        connection.sendall(request)
    open_connections = clients
    while open_connections:
        for key, _ in waiting.select():
            data = key.fileobj.recv(1 << 16)
            received[key.fileobj].append(data)
            if not data:
                waiting.unregister(key.fileobj)
                key.fileobj.close()
                open_connections -= 1
    seconds = time.monotonic() - begin
    for parts in received.values():
        reply = b"".join(parts)
        assert reply.count(b'"text":"a"') == tokens if stream else b'"text":"' + b"a" * tokens + b'"' in reply, reply
    return clients * tokens / seconds


def measure_streams(arguments):
    rates = {True: [], False: []}
    for i in range(arguments.rounds):
        for stream in (i % 2 == 0, i % 2 != 0):
            rates[stream].append(tokens_per_second(arguments.port, arguments.clients, arguments.tokens, stream))
    ratios = [streamed / whole for streamed, whole in zip(rates[True], rates[False])]
    for name, values in (("streams", rates[True]), ("whole replies", rates[False])):
        print(f"{name}: median {statistics.median(values):.0f} tokens/s, {min(values):.0f} to {max(values):.0f}")
    print(f"streams / whole replies: median of rounds {statistics.median(ratios):.3f}, "
          f"{min(ratios):.3f} to {max(ratios):.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sessions", "wait", "streams"])
    parser.add_argument("port", type=int)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=230)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    {"sessions": measure_sessions, "wait": measure_wait, "streams": measure_streams}[arguments.what](arguments)


if __name__ == "__main__":
    main()
