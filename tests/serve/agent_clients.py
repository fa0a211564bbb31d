#!/usr/bin/env python3
"""Checks `efla serve` with agents of PyPI's packages langchain and smolagents, 50 rounds of three tools each, and with lm_eval.

    tests/serve/agent_clients.py PROGRAM MODEL TEMPLATE

The arguments and the model's replies are those of chat_clients.py, which this script imports with openai. Needs langchain,
langchain-openai, langchain-anthropic, smolagents and lm_eval[api]; what is not installed is named and skipped. Prints one line
per check and exits with 1 if one fails. Not a part of the tests that run by themselves, which download nothing.
"""

import contextlib
import importlib.metadata
import io
import json
import pathlib
import sys
import tempfile
from typing import Literal

from chat_clients import forced, run_checks, serving

ROUNDS = 50
CALLS = (0, 1, 2, 3, 4, 6)  # a reply that calls three tools
ASK = "How is the weather?"
REASONING = 20  # most tokens, because a model without preferences would write at length


class Tools:
    """Three tools that note their calls. The model's replies are forced by `body`, which changes after the last round."""

    def __init__(self):
        self.ran = []
        options = forced(*CALLS)
        self.body = {**options.pop("extra_body"), **options}

    def note(self, *call):
        self.ran.append(call)
        if len(self.ran) == 3 * ROUNDS:
            options = forced(0, 5)
            self.body.update({**options.pop("extra_body"), **options})

    def functions(self):
        def weather(city: str, days: int = 1) -> str:
            """Returns the weather.

            Args:
                city: the name of a city
                days: the number of days
            """
            self.note("weather", city, days)
            return "rain"

        def now() -> str:
            """Returns the time."""
            self.note("now")
            return "noon"

        def add(a: int, b: int) -> int:
            """Returns a sum.

            Args:
                a: the first number
                b: the second number
            """
            self.note("add", a, b)
            return a + b

        return [weather, now, add]

    def check(self):
        expected = sorted([("add", 2, 3), ("now",), ("weather", "Zürich \"a\"", 3)] * ROUNDS)
        assert sorted(self.ran) == expected, (len(self.ran), self.ran[:6])


def run_langchain(model, tools):
    from langchain.agents import create_agent

    agent = create_agent(model, tools.functions())
    messages = agent.invoke({"messages": [{"role": "user", "content": ASK}]}, {"recursion_limit": 3 * ROUNDS})["messages"]
    tools.check()
    assert messages[-1].text == "It rains.", messages[-1]
    return messages


def langchain_openai(url):
    from langchain_openai import ChatOpenAI

    tools = Tools()
    model = ChatOpenAI(model="model", base_url=url + "/v1", api_key="none", extra_body=tools.body)
    tools.body = model.extra_body  # a copy
    run_langchain(model, tools)


def langchain_anthropic(url):
    from langchain_anthropic import ChatAnthropic

    tools = Tools()
    model = ChatAnthropic(model="model", base_url=url, api_key="none", max_tokens=100, model_kwargs={"extra_body": tools.body})
    messages = run_langchain(model, tools)
    assert messages[-1].usage_metadata["input_token_details"]["cache_read"] > 0, messages[-1].usage_metadata


def run_forced(model):
    """Runs an agent whose replies must call tools: a grammar forces each reply, and the weights and the bias force nothing."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import ModelCallLimitMiddleware, wrap_model_call

    ran = []

    def turn(direction: Literal["left", "right"], degrees: int) -> str:
        """Turns."""
        assert direction in ("left", "right") and type(degrees) is int
        ran.append("turn")
        return "turned"

    def light(on: bool) -> str:
        """Turns the light on or off."""
        assert type(on) is bool
        ran.append("light")
        return "on" if on else "off"

    def stop() -> str:
        """Stops."""
        ran.append("stop")
        return "stopped"

    @wrap_model_call
    def must_call(request, handler):
        return handler(request.override(tool_choice="any"))

    agent = create_agent(model, [turn, light, stop], middleware=[must_call, ModelCallLimitMiddleware(run_limit=ROUNDS)])
    messages = agent.invoke({"messages": [{"role": "user", "content": ASK}]}, {"recursion_limit": 10 * ROUNDS})["messages"]
    replies = [message for message in messages if message.type == "ai" and message.tool_calls]
    failures = [message for message in messages if message.type == "tool" and message.status == "error"]
    assert len(replies) == ROUNDS and len(ran) >= ROUNDS and set(ran) == {"turn", "light", "stop"}, (len(replies), ran)
    assert not failures and not any(message.invalid_tool_calls for message in replies), failures


def forced_openai(url):
    from langchain_openai import ChatOpenAI

    run_forced(ChatOpenAI(model="model", base_url=url + "/v1", api_key="none", extra_body={"max_reasoning_tokens": REASONING}))


def forced_anthropic(url):
    from langchain_anthropic import ChatAnthropic

    body = {"thinking": {"type": "enabled", "budget_tokens": REASONING}}
    run_forced(ChatAnthropic(model="model", base_url=url, api_key="none", max_tokens=4000, model_kwargs={"extra_body": body}))


def smolagents_openai(url):
    import smolagents

    tools = Tools()
    model = smolagents.OpenAIServerModel("model", api_base=url + "/v1", api_key="none", tool_choice="auto", extra_body=tools.body)
    functions = [smolagents.tool(function) for function in tools.functions()]
    agent = smolagents.ToolCallingAgent(functions, model, max_steps=ROUNDS, verbosity_level=0)
    with contextlib.redirect_stdout(io.StringIO()):
        answer = agent.run(ASK)
    tools.check()
    assert answer == "It rains.", answer


def lm_eval_chats(url):
    """Runs a task of eight texts whose replies are forced, of which four are what the task expects."""
    import lm_eval
    import lm_eval.tasks

    options = forced(5)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        lines = [{"question": f"{i}?", "answer": "It rains." if i % 2 == 0 else "It snows."} for i in range(8)]
        (folder / "rain.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "rain.yaml").write_text(json.dumps({  # JSON is YAML too
            "task": "rain", "dataset_path": "json", "dataset_kwargs": {"data_files": str(folder / "rain.jsonl")},
            "test_split": "train", "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": 20, **options.pop("extra_body"), **options,
                                  "chat_template_kwargs": {"enable_thinking": False}},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}))
        arguments = f"model=model,base_url={url}/v1/chat/completions,num_concurrent=4,max_retries=1"
        found = lm_eval.simple_evaluate("local-chat-completions", arguments, ["rain"], apply_chat_template=True,
                                        task_manager=lm_eval.tasks.TaskManager(include_path=name))
    assert found["results"]["rain"]["exact_match,none"] == 0.5, found["results"]


def forced_smolagents(url):
    """The agent's own tool_choice, required. A run ends where the model happens to call the tool final_answer."""
    import smolagents

    tools, steps = Tools(), []
    model = smolagents.OpenAIServerModel("model", api_base=url + "/v1", api_key="none", parallel_tool_calls=False,
                                         extra_body={"max_reasoning_tokens": REASONING})
    functions = [smolagents.tool(function) for function in tools.functions()]
    while len(steps) < ROUNDS:
        agent = smolagents.ToolCallingAgent(functions, model, max_steps=ROUNDS, verbosity_level=0)
        with contextlib.redirect_stdout(io.StringIO()):
            agent.run(ASK)
        steps += [step for step in agent.memory.steps if isinstance(step, smolagents.ActionStep)]
    errors = [step.error for step in steps if step.error is not None and not isinstance(step.error, smolagents.AgentMaxStepsError)]
    assert not errors and {name for name, *_ in tools.ran} == {"weather", "now", "add"}, (errors, tools.ran)


CHECKS = ((langchain_openai, ("langchain", "langchain-openai")), (langchain_anthropic, ("langchain", "langchain-anthropic")),
          (forced_openai, ("langchain", "langchain-openai")), (forced_anthropic, ("langchain", "langchain-anthropic")),
          (smolagents_openai, ("smolagents", "openai")), (forced_smolagents, ("smolagents", "openai")),
          (lm_eval_chats, ("lm_eval", "tenacity")))


def versions(packages):
    """Returns the versions of packages; nothing where one is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return None


def main(arguments):
    if len(arguments) != 3:
        sys.exit(__doc__)
    failed = False
    with serving(*(pathlib.Path(argument).resolve() for argument in arguments)) as (_, url):
        for check, packages in CHECKS:
            found = versions(packages)
            if found is None:
                print(f"{check.__name__}: skipped, not all of {', '.join(packages)} are installed")
                continue
            failed = run_checks((check,), url) or failed
            print(f"  with {found}")
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
