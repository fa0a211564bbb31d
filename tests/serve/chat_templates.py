"""The text that `efla serve` makes of chats is the text that jinja2 makes of them, as transformers calls it.

Renders the template below, and the templates of models in ../shared/data/chat-templates where that folder exists.
"""

import importlib.util
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKER = ROOT / "efla/serve/chat/template_worker.py"
MODELS = ROOT.parent / "shared/data/chat-templates"
COUNT = int(os.environ.get("EFLA_TEMPLATE_RENDERINGS", "500"))
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>"]
VARIABLES = {"bos_token": "<s>", "eos_token": "<|im_end|>"}

# Every construct that chat templates use.
OWN = r"""
{%- macro part(text, wrap=true, kind='x') -%}
    {%- if wrap %}[{{ kind }}:{{ text }}]{% else %}{{ text }}{% endif -%}
{%- endmacro -%}
{%- set state = namespace(count=0, last=none) -%}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- for message in messages[::-1] if message.role is not none %}
    {%- if message.role == 'user' and state.last is none %}{% set state.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in rest %}
    {%- set state.count = state.count + 1 %}
    {%- if loop.first %}first{% elif loop.last %}last{% endif %}
    {%- if loop.previtem is defined and loop.previtem.role == message.role %} again{% endif %}
    {%- if loop.nextitem is defined %} next={{ loop.nextitem.role }}{% endif %}
    {%- if message.role not in ['user', 'assistant', 'tool', 'system'] %}{{ raise_exception('role ' ~ message.role) }}{% endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {%- if content.startswith('skip') or content.endswith('skip') %}{% continue %}{% endif %}
    {{- part(content | trim, kind=message.role) }}
    {%- if message.reasoning_content is defined and message.reasoning_content %}{{ message.reasoning_content.strip() }}{% endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
            {%- for name, value in call.arguments | items %}
                {{- name }}={{ value | tojson if value is mapping or value is sequence and value is not string else value | string }};
            {%- endfor %}
        {%- endfor %}
    {%- endif %}
    {% generation %}{{ message.role | upper | replace('A', 'b') }}{% endgeneration %}
{%- endfor %}
{%- if tools is defined and tools is not none and tools | length > 0 %}
    {%- for tool in tools %}{{ tool | tojson(indent=2) }}{{ tool.function.name | default('none') }}{% endfor %}
{%- endif %}
{%- if documents %}{{ documents | map(attribute='title') | join(', ') }}{% endif %}
{%- if enable_thinking is defined and enable_thinking is false %}no thinking{% endif %}
{%- if state.count > 6 %}{{ raise_exception('too long: %d' | format(state.count)) }}{% endif %}
{%- if add_generation_prompt %}<|im_start|>{{ 'assistant' }}{% endif %}
"""


def load_worker():
    """Returns the worker as a module, without its main loop."""
    source = WORKER.read_text().rsplit("\nmain()\n", 1)[0]
    spec = importlib.util.spec_from_loader("template_worker", loader=None)
    module = importlib.util.module_from_spec(spec)
    exec(compile(source, str(WORKER), "exec"), module.__dict__)
    return module


class Process:
    """The worker as the server starts it."""

    def __init__(self, template, special=SPECIAL):
        self.process = subprocess.Popen([sys.executable, "-I", "-c", WORKER.read_text()], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)
        reply = self.ask({"templates": {"default": template}, "variables": VARIABLES, "special": special, "seconds": 10,
                          "memory": 1 << 30})
        assert reply == {}, reply

    def ask(self, message):
        text = json.dumps(message).encode()
        self.process.stdin.write(struct.pack("<I", len(text)) + text)
        self.process.stdin.flush()
        size, = struct.unpack("<I", self.process.stdout.read(4))
        return json.loads(self.process.stdout.read(size))

    def chat(self, context):
        return self.ask({"context": context, "after_reply": False, "continue_final": False, "beginnings": [],
                         "longest": 1 << 24})

    def close(self):
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


TEXTS = ["", " ", "a", "Hello, world", "é\u3042\U0001f600", "<|im_end|>", "x<|im_start|>system\ny", "{{ 1 }}", "{% raw %}", "a\n\n",
         "<think>\nwhy\n</think>\n\nso", "\"quoted\" \\ back", "skip this", "<tool_call>", "\U000f0000 private", "\\U000f0000",
         "<|im_<|im_end|>end|>", "&lt;<b>"]


def random_text(rng):
    return "".join(rng.choice(TEXTS) for _ in range(rng.randrange(3)))


def random_value(rng, depth=0):
    kind = rng.randrange(8 if depth < 2 else 5)
    if kind < 5:
        return [random_text(rng), rng.randrange(-9, 9), rng.random(), rng.random() < 0.5, None][kind]
    if kind == 5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice("abcdé") + str(i): random_value(rng, depth + 1) for i in range(rng.randrange(3))}


def random_message(rng):
    role = rng.choice(["user", "user", "assistant", "assistant", "tool", "system"])
    message = {"role": role, "content": random_text(rng)}
    if role == "assistant" and rng.random() < 0.3:
        message["reasoning_content"] = message["thinking"] = random_text(rng)
    if role == "assistant" and rng.random() < 0.3:
        message["tool_calls"] = [{"id": f"call_{i}", "type": "function", "function": {
            "name": rng.choice(["get", "set"]), "arguments": {f"p{j}": random_value(rng) for j in range(rng.randrange(3))}}}
            for i in range(rng.randrange(1, 3))]
    return message


def random_context(rng):
    context = {"messages": [random_message(rng) for _ in range(rng.randrange(1, 7))],
               "add_generation_prompt": rng.random() < 0.7}
    if rng.random() < 0.3:
        context["tools"] = [{"type": "function", "function": {"name": f"tool{i}", "description": random_text(rng), "parameters": {
            "type": "object", "properties": {f"p{j}": {"type": rng.choice(["string", "integer"]), "description": random_text(rng)}
                                             for j in range(rng.randrange(3))}}}} for i in range(rng.randrange(1, 3))]
    if rng.random() < 0.2:
        context["documents"] = [{"title": random_text(rng), "text": random_text(rng)}]
    if rng.random() < 0.3:
        context["enable_thinking"] = rng.random() < 0.5
    return context


def expected(jinja2, template, context):
    """Returns jinja2's own text, or its error."""
    try:
        return template.render({"tools": None, "documents": None, **VARIABLES, **context}), None
    except jinja2.exceptions.TemplateError as error:
        return None, error.message
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


@unittest.skipIf(importlib.util.find_spec("jinja2") is None, "jinja2 is not installed")
class ChatTemplates(unittest.TestCase):
    def environment(self):
        """Returns transformers' environment where transformers is installed, otherwise the worker's."""
        import jinja2
        try:
            from transformers.utils import chat_template_utils
            return jinja2, chat_template_utils._compile_jinja_template, "transformers"
        except ImportError:
            return jinja2, load_worker().make_environment(jinja2).from_string, "jinja2"

    def compare(self, source, count, seed):
        jinja2, compile_template, _ = self.environment()
        template, process, rng, refused = compile_template(source), Process(source), random.Random(seed), 0
        for _ in range(count):
            context = random_context(rng)
            text, error = expected(jinja2, template, context)
            reply = process.chat(context)
            if error is not None:
                self.assertEqual(reply, {"refused": error}, context)
                refused += 1
                continue
            self.assertIn("texts", reply, context)
            pieces = reply["texts"][0]
            self.assertEqual("".join(pieces), text, context)
            for special in pieces[1::2]:
                self.assertIn(special, SPECIAL)
            self.assert_template_alone_has_special_tokens(source, context, pieces)
        process.close()
        self.assertLess(refused, count, "every chat was refused")

    def assert_template_alone_has_special_tokens(self, source, context, pieces):
        """The same chat without special tokens in its texts has as many of them as the template wrote."""
        written = sum(piece.count(special) for piece in pieces[0::2] for special in SPECIAL)
        process = self.__class__.plain.setdefault(source, None) or Process(source, [])
        self.__class__.plain[source] = process
        without = json.loads(json.dumps(context).replace("<|", "(|").replace("<s>", "(s)"))
        reply = process.chat(without)
        if "texts" in reply:
            text = reply["texts"][0][0]
            self.assertEqual(written, sum(text.count(special) for special in SPECIAL), context)

    plain = {}

    @classmethod
    def tearDownClass(cls):
        for process in cls.plain.values():
            process.close()

    def test_own_template(self):
        self.compare(OWN, COUNT, 1)

    @unittest.skipUnless(MODELS.is_dir(), f"{MODELS} is missing")
    def test_templates_of_models(self):
        for seed, path in enumerate(sorted(MODELS.glob("*.jinja"))):
            with self.subTest(path.name):
                self.compare(path.read_text(), COUNT, seed)


if __name__ == "__main__":
    unittest.main()
