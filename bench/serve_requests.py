#!/usr/bin/env python3
"""Measures what one large request costs `efla serve`, by kind of body: time, memory, and the wait of other clients.

    bench/serve_requests.py [--megabytes 60] PROGRAM MODEL [-- OPTION ...]

Starts the server anew for each kind, with the OPTIONs of efla serve, such as --tokenizer bytes. While the request runs, another client asks for a few ids and for
/health, again and again. Peak memory is VmHWM of /proc, so that this needs Linux. A client gives up after 60 seconds.
"""

import argparse
import re
import socket
import subprocess
import threading
import time


def bodies(size):
    def values(value):
        return b"[" + b",".join([value] * (size // (len(value) + 1))) + b"]"

    text = b'"' + b"a" * size + b'"'
    keys = b"{" + b",".join(b'"%d":1' % i for i in range(size // 11)) + b"}"
    message = b'{"role":"user","content":"a"}'
    completion, chat = "/v1/completions", "/v1/chat/completions"
    yield "text, /tokenize", "/tokenize", b'{"prompt":' + text + b"}"
    yield "prompt, text", completion, b'{"max_tokens":0,"prompt":' + text + b"}"
    yield "prompt, token ids", completion, b'{"max_tokens":0,"prompt":' + values(b"97") + b"}"
    yield "stop text", completion, b'{"max_tokens":1,"prompt":"a","stop":' + text + b"}"
    yield "list of texts", completion, b'{"prompt":' + values(b'""') + b"}"
    yield "list of lists", completion, b'{"prompt":' + values(b"[]") + b"}"
    yield "list of objects", completion, b'{"x":' + values(b"{}") + b"}"
    yield "fields of an object", completion, b'{"x":' + keys + b"}"
    yield "messages", chat, b'{"max_tokens":0,"messages":' + values(message) + b"}"


def ask(port, method, path, body, timeout=60):
    """Returns the status, or 0 for a client that gave up."""
    reply = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
            head = f"{method} {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            while part := connection.recv(1 << 20):
                reply = reply or part
    except OSError:
        pass
    return int(reply[9:12] or 0)


def peak_mib(process):
    with open(f"/proc/{process.pid}/status", encoding="ascii") as status:
        return int(re.search(r"VmHWM:\s+(\d+)", status.read()).group(1)) / 1024


def measure(command, name, path, body):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    port = int(re.search(r":(\d+)$", process.stdout.readline().strip()).group(1))
    rest, ended, waits = peak_mib(process), threading.Event(), {"/tokenize": 0.0, "/health": 0.0}

    def other():
        while not ended.wait(0.02):
            for path, method, body in (("/tokenize", "POST", b'{"prompt":"ab"}'), ("/health", "GET", b"")):
                start = time.time()
                ask(port, method, path, body)
                waits[path] = max(waits[path], time.time() - start)

    thread = threading.Thread(target=other)
    thread.start()
    start = time.time()
    status = ask(port, "POST", path, body)
    seconds = time.time() - start
    ended.set()
    thread.join()
    more = peak_mib(process) - rest
    start = time.time()
    process.terminate()
    process.wait()
    print(
        f"{name:20} {len(body) / 1e6:6.1f} {status:6} {seconds:8.2f} {rest:8.0f} {more:8.0f} {more * 2**20 / len(body):8.1f}"
        f" {waits['/tokenize']:8.2f} {waits['/health']:8.2f} {time.time() - start:8.2f}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="efla")
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--megabytes", type=float, default=60, help="size of a body (default: 60); stands before PROGRAM")
    parser.add_argument("options", nargs="*", help="options of efla serve, after --")
    arguments = parser.parse_args()
    command = [arguments.program, "serve", arguments.model, "--port", "0", "--device", "cpu", *arguments.options]
    print(f"{'body':20} {'MB':>6} {'status':>6} {'s':>8} {'rest MiB':>8} {'more MiB':>8} {'per byte':>8} {'ids s':>8} {'health s':>8} {'end s':>8}")
    for name, path, body in bodies(int(arguments.megabytes * 1e6)):
        measure(command, name, path, body)


if __name__ == "__main__":
    main()
