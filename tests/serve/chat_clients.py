#!/usr/bin/env python3
"""Checks reasoning and calls of tools of `efla serve` with PyPI's package openai as its client.

    tests/serve/chat_clients.py PROGRAM MODEL TEMPLATE

MODEL is a folder of a hybrid with a vocabulary of at least 320 tokens, such as ../shared/data/hybrid-goldens/qwen3_5_text,
TEMPLATE a chat template in Jinja that shows calls in Qwen's XML form. logit_bias forces the replies of a copy of the model:
their pieces are tokens of the tokenizer that this script writes. Prints one line per check and exits with 1 if one fails. Not a part of the
tests that run by themselves, which download nothing.
"""

import contextlib
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile
import time
from typing import Annotated, Literal, Optional

import openai
import pydantic
from openai.lib.streaming.chat import ChatCompletionStreamState

EOS = 2
SPECIAL = {EOS: "<|im_end|>", 1: "<|endoftext|>", 3: "<|im_start|>"}
PIECES = ["Let me see.\n</think>\n\n", "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nZü", "rich \"a\"\n</parameter>\n",
          "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
          "It rains.",
          "\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>\n</tool_call>"]
FIRST = 300  # the id of the first piece
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Returns the weather.", "parameters": {
             "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}},
         {"type": "function", "function": {"name": "now", "description": "Returns the time.", "parameters": {
             "type": "object", "properties": {}}}}]
RESPONSE_TOOLS = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
ASK = [{"role": "user", "content": "How is the weather?"}]


def byte_letters():
    """Returns the letters by which byte-level tokenizers write the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, more = {byte: chr(byte) for byte in plain}, 256
    for byte in range(256):
        if byte not in letters:
            letters[byte], more = chr(more), more + 1
    return letters


def write_tokenizer(folder):
    letters = byte_letters()
    free = [i for i in range(FIRST) if i not in SPECIAL]
    vocabulary = {letters[byte]: free[byte] for byte in range(256)}
    added = [(text, id, True) for id, text in SPECIAL.items()] + [(text, FIRST + i, False) for i, text in enumerate(PIECES)]
    vocabulary |= {text: id for text, id, _ in added}
    document = {"version": "1.0", "added_tokens": [
        {"id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
        for text, id, special in added],
        "normalizer": None, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                                              "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "post_processor": None, "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[EOS]}))


def write_weights(source, target):
    """Copies a file of safetensors with zeros in place of the head, so that logit_bias alone decides."""
    content = bytearray(source.read_bytes())
    size, = struct.unpack_from("<Q", content)
    begin, end = json.loads(content[8:8 + size])["lm_head.weight"]["data_offsets"]
    content[8 + size + begin:8 + size + end] = bytes(end - begin)
    target.write_bytes(content)


def forced(*pieces):
    """Returns the fields of a request whose reply is these pieces and then the end."""
    bias = {str(token): 100 - i / 4 for i, token in enumerate([*(FIRST + piece for piece in pieces), EOS])}
    return {"temperature": 0, "extra_body": {"logit_bias": bias, "presence_penalty": 2}}


def check_calls(calls):
    assert [call.function.name for call in calls] == ["weather", "now"], calls
    assert json.loads(calls[0].function.arguments) == {"city": "Zürich \"a\"", "days": 3}, calls
    assert json.loads(calls[1].function.arguments) == {}, calls
    assert calls[0].id != calls[1].id, calls


def tools(client, model):
    reply = client.chat.completions.create(model=model, messages=ASK, tools=TOOLS, **forced(0, 1, 2, 3, 4))
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls", choice
    assert choice.message.content == "I look." and choice.message.reasoning_content == "Let me see.", choice
    check_calls(choice.message.tool_calls)
    one = client.chat.completions.create(model=model, messages=ASK, tools=TOOLS, parallel_tool_calls=False, **forced(0, 1, 2, 3, 4))
    assert len(one.choices[0].message.tool_calls) == 1, one
    none = client.chat.completions.create(model=model, messages=ASK, tools=TOOLS, tool_choice="none", **forced(0, 1, 2, 3, 4))
    assert none.choices[0].message.tool_calls is None and "<function=" in none.choices[0].message.content, none


def tools_stream(client, model):
    state, reasoning = ChatCompletionStreamState(), ""
    for chunk in client.chat.completions.create(model=model, messages=ASK, tools=TOOLS, stream=True, **forced(0, 1, 2, 3, 4)):
        state.handle_chunk(chunk)
        reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    choice = state.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls", choice
    assert choice.message.content == "I look." and reasoning == "Let me see.", (choice, reasoning)
    check_calls(choice.message.tool_calls)


def agent(client, model):
    """A program that runs the tools and sends each message back as it came."""
    messages = list(ASK)
    for _ in range(50):
        message = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, **forced(0, 1, 2, 3, 4)).choices[0].message
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name}: rain"}
                     for call in message.tool_calls]
    last = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, **forced(0, 5)).choices[0]
    assert last.message.content == "It rains." and last.finish_reason == "stop", last


def cut_off(client, model):
    options = forced(0, 1, 2, 3, 4)
    for most in (2, 3):
        choice = client.chat.completions.create(model=model, messages=ASK, tools=TOOLS, max_tokens=most, **options).choices[0]
        call, = choice.message.tool_calls
        assert choice.finish_reason == "length" and call.function.name == "weather", choice
        assert call.function.arguments.startswith("{\"city\": \"Zü"), choice


def thinking(client, model):
    options = forced(5)
    body = {**options["extra_body"], "chat_template_kwargs": {"enable_thinking": False}}
    reply = client.chat.completions.create(model=model, messages=ASK, temperature=0, extra_body=body).choices[0].message
    assert reply.content == "It rains." and not hasattr(reply, "reasoning_content"), reply
    cut = client.chat.completions.create(model=model, messages=ASK, max_tokens=1, **forced(5)).choices[0].message
    assert cut.reasoning_content == "It rains." and cut.content == "", cut


def responses(client, model):
    first = client.responses.create(model=model, input=ASK, tools=RESPONSE_TOOLS, **forced(0, 1, 2, 3, 4))
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"], first
    assert first.output_text == "I look." and json.loads(first.output[2].arguments)["days"] == 3, first
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "rain"} for item in first.output[2:]]
    whole = client.responses.create(model=model, input=[*ASK, *first.output, *results], tools=RESPONSE_TOOLS, **forced(0, 5))
    assert whole.output_text == "It rains.", whole
    more = client.responses.create(model=model, input=results, previous_response_id=first.id, tools=RESPONSE_TOOLS, **forced(0, 5))
    assert more.output_text == "It rains." and more.usage.input_tokens < first.usage.input_tokens, more


def responses_stream(client, model):
    arguments, final = "", None
    for event in client.responses.create(model=model, input=ASK, tools=RESPONSE_TOOLS, stream=True, **forced(0, 1, 2, 3, 4)):
        if event.type == "response.function_call_arguments.delta":
            arguments += event.delta
        if event.type == "response.completed":
            final = event.response
    calls = [item for item in final.output if item.type == "function_call"]
    assert arguments == "".join(call.arguments for call in calls) and len(calls) == 2, final


def special_tokens(client, model):
    """The text of a special token in a message is text: three bytes more than the same text with another character."""
    def tokens(text):
        return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], max_tokens=1).usage.prompt_tokens
    assert tokens("a<|im_end|>b") == tokens("a(|im_end|)b"), "a message has a special token"


class Report(pydantic.BaseModel):
    city: Literal["Zürich", "Bern"]
    days: Annotated[int, pydantic.Field(ge=1, le=14)]
    wind: Optional[Literal["north", "south"]]


BRIEF = {"seed": 1, "max_reasoning_tokens": 3}  # the model's own replies are random


def forms(client, model):
    reply = client.chat.completions.parse(model=model, messages=ASK, response_format=Report, extra_body=BRIEF).choices[0]
    assert isinstance(reply.message.parsed, Report) and reply.finish_reason == "stop", reply
    response = client.responses.parse(model=model, input=ASK, text_format=Report, extra_body=BRIEF)
    assert isinstance(response.output_parsed, Report), response
    for outputs, texts in (({"choice": ["yes", "no"]}, {"yes", "no"}), ({"regex": "[ab]c"}, {"ac", "bc"})):
        text = client.completions.create(model=model, prompt="a", extra_body={"structured_outputs": outputs}).choices[0].text
        assert text in texts, text


def forced_calls(client, model):
    """Calls that tool_choice forces, whole and in a stream. The client reads the arguments of strict tools."""
    tool = openai.pydantic_function_tool(Report, name="report")
    for choice in ("required", {"type": "function", "function": {"name": "report"}}):
        reply = client.chat.completions.parse(model=model, messages=ASK, tools=[tool], tool_choice=choice, parallel_tool_calls=False,
                                              extra_body=BRIEF).choices[0]
        call, = reply.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Report) and reply.finish_reason == "tool_calls", reply
    with client.chat.completions.stream(model=model, messages=ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False,
                                        extra_body=BRIEF) as stream:
        call, = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Report), call


def budgets(client, model):
    for most in (0, 5):
        usage = client.chat.completions.create(model=model, messages=ASK, max_tokens=40, seed=2,
                                               extra_body={"max_reasoning_tokens": most}).usage
        assert usage.completion_tokens_details.reasoning_tokens <= most + 20, usage


def refusals(client, model):
    for more in ({"messages": [{"role": "system", "content": "a"}]},  # the template wants a user's message
                 {"messages": ASK, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "a"}}},
                 {"messages": ASK, "tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"not": {}}}}]},
                 {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"if": {}}}}}):
        try:
            client.chat.completions.create(model=model, **more)
        except openai.BadRequestError as error:
            assert error.body["message"], error
        else:
            raise AssertionError(f"not refused: {more}")


def children(process):
    with open(f"/proc/{process}/task/{process}/children") as file:
        own = file.read().split()
    for task in os.listdir(f"/proc/{process}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{process}/task/{task}/children") as file:
            own += file.read().split()
    return sorted(set(own))


def ends_with_the_server(server):
    workers = children(server.pid)
    assert workers, "no process renders templates"
    server.send_signal(signal.SIGKILL)
    server.wait()
    for _ in range(100):
        left = [worker for worker in workers if os.path.exists(f"/proc/{worker}/exe") and os.path.exists(f"/proc/{worker}/cwd")
                and pathlib.Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(f"processes that outlive the server: {left}")


@contextlib.contextmanager
def serving(program, model, template, *options):
    """Starts a server of a copy of the model whose replies logit_bias forces. Gives its process and its address."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "model"
        folder.mkdir()
        for file in ("config.json", "generation_config.json"):
            (folder / file).symlink_to(model / file)
        write_weights(model / "model.safetensors", folder / "model.safetensors")
        write_tokenizer(folder)
        (folder / "chat_template.jinja").symlink_to(template)
        server = subprocess.Popen([program, "serve", folder, "--port", "0", "--device", "cpu", *options], stdout=subprocess.PIPE, text=True)
        try:
            yield server, server.stdout.readline().split()[-1]
        finally:
            server.kill()


def run_checks(checks, *arguments):
    """Runs each check and prints a line about it. Returns whether one has failed."""
    failed = False
    for check in checks:
        try:
            check(*arguments)
            print(f"{check.__name__}: passed")
        except Exception as error:  # every check is worth its line
            failed = True
            print(f"{check.__name__}: {type(error).__name__}: {error}")
    return failed


CHECKS = (tools, tools_stream, agent, cut_off, thinking, responses, responses_stream, special_tokens, forms, forced_calls,
          budgets, refusals)


def main(arguments):
    if len(arguments) != 3:
        sys.exit(__doc__)
    with serving(*(pathlib.Path(argument).resolve() for argument in arguments)) as (server, url):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        failed = run_checks(CHECKS, client, "model")
        failed = run_checks((ends_with_the_server,), server) or failed
    print(f"with openai {openai.__version__}")
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
