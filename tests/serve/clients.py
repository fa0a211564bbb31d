#!/usr/bin/env python3
"""Checks a running `efla serve` with PyPI's package openai as its client.

    tests/serve/clients.py http://127.0.0.1:8080 [API_KEY]

Prints one line per check and exits with 1 if one fails. The server needs --chat-template plain and --max-tokens 4096, the
defaults. Not a part of the tests that run by themselves, which download nothing.
"""

import sys
import time

import openai


def completions(client, model):
    reply = client.completions.create(model=model, prompt="Once upon", max_tokens=20, temperature=0)
    assert reply.usage.completion_tokens <= 20 and reply.usage.prompt_tokens > 0, reply
    again = client.completions.create(model=model, prompt="Once upon", max_tokens=20, temperature=0)
    assert again.choices[0].text == reply.choices[0].text, (again, reply)


def several(client, model):
    reply = client.completions.create(model=model, prompt=["a b", "c d"], n=2, max_tokens=5, seed=7)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3], reply
    first = client.completions.create(model=model, prompt="a b", max_tokens=5, seed=8)
    assert first.choices[0].text == reply.choices[1].text, "reply i draws with seed + i"


def token_ids(client, model):
    reply = client.completions.create(model=model, prompt=[[65, 66], [67]], max_tokens=3)
    assert len(reply.choices) == 2, reply


def logprobs(client, model):
    reply = client.completions.create(model=model, prompt="The cat", echo=True, logprobs=3, max_tokens=2, temperature=0)
    scored = reply.choices[0].logprobs
    assert scored.token_logprobs[0] is None and all(value <= 0 for value in scored.token_logprobs[1:]), scored
    assert len(scored.tokens) == len(scored.top_logprobs) == len(scored.text_offset), scored
    assert scored.token_logprobs[-1] == max(scored.top_logprobs[-1].values()), "greedy"


def stream(client, model):
    options = dict(model=model, prompt="Once upon", max_tokens=30, temperature=0)
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].text, (text, whole)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]


def chat(client, model):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    reply = client.chat.completions.create(model=model, messages=messages, max_tokens=20, temperature=0, logprobs=True,
                                           top_logprobs=2)
    assert reply.choices[0].message.role == "assistant", reply
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2, reply
    chunks = list(client.chat.completions.create(model=model, messages=messages, max_tokens=20, temperature=0, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == reply.choices[0].message.content, (text, reply)


def responses(client, model):
    first = client.responses.create(model=model, input="Hello", instructions="Be brief.", max_output_tokens=10)
    assert first.output_text == first.output[0].content[0].text, first
    second = client.responses.create(model=model, input="And then?", previous_response_id=first.id, max_output_tokens=10)
    assert second.previous_response_id == first.id and second.usage.input_tokens < 60, second
    client.responses.delete(first.id)
    try:
        client.responses.create(model=model, input="x", previous_response_id=first.id)
        raise AssertionError("a deleted response was continued")
    except openai.NotFoundError:
        pass


def responses_stream(client, model):
    text, types = "", []
    for event in client.responses.create(model=model, input="Hello", max_output_tokens=10, stream=True):
        types.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert types[0] == "response.created" and types[-1] in ("response.completed", "response.incomplete"), types
    assert event.response.output_text == text, (event, text)


def dialogue(client, model):
    """Replies go back to the server in each form in which programs send them."""
    forms = [lambda message: message, dict, lambda message: message.model_dump(), lambda message: message.to_dict()]
    for form in forms:
        messages = [{"role": "user", "content": "Hello"}]
        for _ in range(2):
            reply = client.chat.completions.create(model=model, messages=messages, max_tokens=5)
            messages += [form(reply.choices[0].message), {"role": "user", "content": "And then?"}]
        items = [{"role": "user", "content": "Hello"}]
        for _ in range(2):
            reply = client.responses.create(model=model, input=items, max_output_tokens=5, store=False)
            items += [form(item) for item in reply.output] + [{"role": "user", "content": "And then?"}]


def defaults(client, model):
    reply = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello", "name": "Ada"}],
                                           max_tokens=3, n=1, tools=[], tool_choice="none", parallel_tool_calls=False,
                                           response_format={"type": "text"}, store=False, metadata={}, seed=1, top_p=0,
                                           extra_body={"min_p": 0, "ignore_eos": False, "reasoning_effort": None})
    greedy = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=3,
                                            temperature=0)
    assert reply.choices[0].message.content == greedy.choices[0].message.content, (reply, greedy)
    client.completions.create(model=model, prompt="a", max_tokens=1, best_of=1, suffix=None)
    client.responses.create(model=model, input="Hello", max_output_tokens=3, tools=[], text={"format": {"type": "text"}},
                            truncation="disabled", include=[], metadata={}, parallel_tool_calls=True)


def echo(client, model):
    prompt = "cafe\u0301 <|im_end|> x"
    options = dict(model=model, prompt=prompt, echo=True, max_tokens=3, temperature=0, logprobs=0)
    whole = client.completions.create(**options).choices[0]
    assert whole.text.startswith(prompt), whole
    chunks = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True) if chunk.choices]
    assert "".join(chunk.text for chunk in chunks) == whole.text, (chunks, whole)
    offsets = [offset for chunk in chunks if chunk.logprobs for offset in chunk.logprobs.text_offset]
    assert offsets == whole.logprobs.text_offset and offsets[0] == 0, (offsets, whole)


def errors(client, model):
    for error, call in [
        (openai.BadRequestError, lambda: client.completions.create(model=model, prompt="a", temperature=-1)),
        (openai.BadRequestError, lambda: client.completions.create(model=model, prompt="a", extra_body={"toools": 1})),
        (openai.NotFoundError, lambda: client.completions.create(model="another", prompt="a")),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=[])),
    ]:
        try:
            call()
        except error as caught:
            assert caught.body["message"], caught
        else:
            raise AssertionError(f"no {error.__name__}")


def leaving(client, model):
    begin = time.time()
    endless = client.completions.create(model=model, prompt="a", max_tokens=4000, stream=True)
    for number, _ in enumerate(endless):
        if number == 5:
            endless.close()
            break
    client.completions.create(model=model, prompt="a", max_tokens=1)
    assert time.time() - begin < 10, "a client that left still occupies the server"
    try:
        client.with_options(timeout=0.05, max_retries=0).completions.create(model=model, prompt="a", max_tokens=4000)
        raise AssertionError("no timeout")
    except openai.APITimeoutError:
        pass


def main(arguments):
    if not 1 <= len(arguments) <= 2:
        sys.exit(__doc__)
    key = arguments[1] if len(arguments) == 2 else "none"
    client = openai.OpenAI(base_url=arguments[0] + "/v1", api_key=key, max_retries=0)
    model = client.models.list().data[0].id
    failed = False
    for check in (completions, several, token_ids, logprobs, stream, chat, responses, responses_stream, dialogue, defaults, echo, errors,
                  leaving):
        try:
            check(client, model)
            print(f"{check.__name__}: passed")
        except Exception as error:  # every check is worth its line
            failed = True
            print(f"{check.__name__}: {type(error).__name__}: {error}")
    print(f"with openai {openai.__version__}")
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
