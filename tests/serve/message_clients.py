#!/usr/bin/env python3
"""Checks `efla serve` with PyPI's package anthropic as its client.

    tests/serve/message_clients.py PROGRAM MODEL TEMPLATE

The arguments and the model's replies are those of chat_clients.py, which this script imports. Prints one line per check and
exits with 1 if one fails. Not a part of the tests that run by themselves, which download nothing.
"""

import json
import pathlib
import sys
import tempfile

import anthropic

from chat_clients import ASK, TOOLS, forced, run_checks, serving

CUSTOM = [{"name": tool["function"]["name"], "description": tool["function"]["description"],
           "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
CALLS = [("weather", {"city": "Zürich \"a\"", "days": 3}), ("now", {})]


def asked(*pieces, **more):
    """Returns the fields of a request whose reply is these pieces and then the end."""
    body = forced(*pieces)
    body = {**body.pop("extra_body"), **body}  # the package has no argument for the temperature
    return {"model": "model", "max_tokens": 100, "messages": ASK, "tools": CUSTOM, "extra_body": body, **more}


def check_calls(message):
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"], message
    assert message.content[0].thinking == "Let me see." and message.content[1].text == "I look.", message
    assert [(block.name, block.input) for block in message.content[2:]] == CALLS, message
    assert message.content[2].id != message.content[3].id and message.stop_reason == "tool_use", message


def tools(client):
    message = client.messages.create(**asked(0, 1, 2, 3, 4))
    check_calls(message)
    assert message.usage.output_tokens == 6 and message.usage.output_tokens_details.thinking_tokens == 1, message
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(client.messages.create(**asked(0, 1, 2, 3, 4, tool_choice=choice)).content) == 3
    none = client.messages.create(**asked(0, 1, 2, 3, 4, tool_choice={"type": "none"}))
    assert [block.type for block in none.content] == ["thinking", "text"] and "<function=" in none.content[1].text, none
    assert none.stop_reason == "end_turn", none


def tools_stream(client):
    options, texts, arguments, thinking = asked(0, 1, 2, 3, 4), "", "", ""
    with client.messages.stream(**options) as stream:
        for event in stream:
            if event.type == "text":
                texts += event.text
            elif event.type == "thinking":
                thinking += event.thinking
            elif event.type == "input_json":
                arguments += event.partial_json
        message = stream.get_final_message()
    check_calls(message)
    assert texts == "I look." and thinking == "Let me see.", (texts, thinking)
    assert arguments == json.dumps(CALLS[0][1], ensure_ascii=False) + "{}", arguments
    types = [event.type for event in client.messages.create(**options, stream=True)]
    assert types[0] == "message_start" and types[-2:] == ["message_delta", "message_stop"], types


def results(message, text):
    return [{"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": text}]}
            for block in message.content if block.type == "tool_use"]


def agent(client):
    """A program that runs the tools and sends each message back as it came. The prefix cache finds the earlier turns."""
    messages, cached = list(ASK), 0
    for turn in range(50):
        options = asked(0, 1, 2, 3, 4, messages=messages, cache_control={"type": "ephemeral"})
        message = client.messages.create(**options)
        check_calls(message)
        prompt = message.usage.input_tokens + message.usage.cache_read_input_tokens
        counted = client.messages.count_tokens(**{name: options[name] for name in ("model", "messages", "tools")})
        assert counted.input_tokens == prompt, (counted, message.usage)
        assert message.usage.cache_read_input_tokens >= cached, (turn, message.usage, cached)
        cached = prompt // 64 * 64 - 64
        messages += [{"role": "assistant", "content": message.content},
                     {"role": "user", "content": results(message, f"rain {turn}")}]
    last = client.messages.create(**asked(0, 5, messages=messages))
    assert last.content[-1].text == "It rains." and last.stop_reason == "end_turn", last


def runner(client):
    """The package's own loop of calls and results."""
    ran = []

    @anthropic.beta_tool
    def weather(city: str, days: int = 1) -> str:
        """Returns the weather."""
        ran.append((city, days))
        return "rain"

    @anthropic.beta_tool
    def now() -> str:
        """Returns the time."""
        ran.append("now")
        return "noon"

    options = asked(0, 1, 2, 3, 4, tools=[weather, now])
    rounds = list(client.beta.messages.tool_runner(**options, max_iterations=5))
    assert len(rounds) == 5 and ran == [("Zürich \"a\"", 3), "now"] * 5, ran


def cut_off(client):
    cut = client.messages.create(**asked(0, 1, 2, 3, 4, max_tokens=3))
    assert cut.stop_reason == "max_tokens" and cut.content[2].input == {"city": "Zürich \"a\""}, cut
    with client.messages.stream(**asked(0, 1, 2, 3, 4, max_tokens=2)) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "max_tokens" and message.content[2].name == "weather", message


def stops(client):
    message = client.messages.create(**asked(5, stop_sequences=["rain"], thinking={"type": "disabled"}))
    assert message.content[0].text == "It " and message.stop_reason == "stop_sequence", message
    assert message.stop_sequence == "rain", message


def continues(client):
    """A message of the assistant at the end is continued."""
    message = client.messages.create(**asked(5, messages=[*ASK, {"role": "assistant", "content": "Look:"}],
                                             thinking={"type": "disabled"}))
    assert message.content[0].text == "It rains.", message


def formats(client):
    """Replies of a model without preferences follow a schema. The bias keeps it from reasoning, which may be long."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Zürich", "Bern"]}, "rain": {"type": "boolean"}},
              "required": ["city", "rain"], "additionalProperties": False}
    for seed in range(20):
        message = client.messages.create(model="model", max_tokens=100, messages=ASK, thinking={"type": "disabled"},
                                         output_config={"format": {"type": "json_schema", "schema": schema}}, extra_body={"seed": seed, "logit_bias": {str(ord("<") + 3): -100}})
        value = json.loads(message.content[0].text)
        assert value["city"] in ("Zürich", "Bern") and value["rain"] in (True, False) and message.stop_reason == "end_turn", message


def choices(client):
    """A model without preferences calls a tool where it must, and reasons no longer than it may."""
    tools = [{"name": "turn", "input_schema": {"type": "object", "properties": {"to": {"enum": ["left", "right"]}}, "required": ["to"]}},
             {"name": "light", "strict": True, "input_schema": {
                 "type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}}]
    called = set()
    for choice in [{"type": "any"}, {"type": "tool", "name": "light"}] * 10:
        choice = {**choice, "disable_parallel_tool_use": True}
        message = client.messages.create(model="model", max_tokens=400, messages=ASK, tools=tools, tool_choice=choice,
                                         thinking={"type": "enabled", "budget_tokens": 10})
        assert message.stop_reason == "tool_use", message
        assert message.usage.output_tokens_details.thinking_tokens <= 10 + len("</think>\n\n"), message.usage  # a token per byte of its end
        one, = [block for block in message.content if block.type == "tool_use"]
        assert one.input in ({"to": "left"}, {"to": "right"}) if one.name == "turn" else type(one.input["on"]) is bool, message
        if choice["type"] == "tool":
            assert one.name == "light", message
        else:
            called.add(one.name)
    assert called == {"turn", "light"}, called


def refusals(client):
    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a"}}]}]
    for more, kind, says in (({"messages": image}, anthropic.BadRequestError, "\"image\""),
                             ({"messages": []}, anthropic.BadRequestError, "messages"),
                             ({"model": "other"}, anthropic.NotFoundError, "model")):
        try:
            client.messages.create(**asked(5, **more))
        except kind as error:
            assert error.body["type"] == "error" and says in error.body["error"]["message"], error.body
        else:
            raise AssertionError(f"not refused: {more}")


def keys(client):
    for wrong in (client.with_options(api_key="wrong"), anthropic.Anthropic(base_url=client.base_url, auth_token="wrong")):
        try:
            wrong.messages.create(**asked(5))
        except anthropic.AuthenticationError as error:
            assert error.body["error"]["type"] == "authentication_error", error.body
        else:
            raise AssertionError("a wrong key is admitted")
    assert client.models.list().data[0].id == "model"


CHECKS = (tools, tools_stream, agent, runner, cut_off, stops, continues, formats, choices, refusals, keys)


def main(arguments):
    if len(arguments) != 3:
        sys.exit(__doc__)
    program, model, template = (pathlib.Path(argument).resolve() for argument in arguments)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("secret\n")
        file.flush()
        with serving(program, model, template, "--api-keys", file.name) as (_, url):
            client = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)
            failed = run_checks(CHECKS, client)
    print(f"with anthropic {anthropic.__version__}")
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
