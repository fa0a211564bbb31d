"""Renders chat templates for `efla serve`, which starts this file as a process of its own (template_worker.h).

Reads messages from standard input and writes one reply per message to standard output. A message is the number of its
bytes (4 bytes, little-endian) and a JSON object. The first one has the templates; the others are requests.
"""

import datetime
import json
import re
import resource
import signal
import struct
import sys


BYTES_PER_TIME = 1 << 20  # a request has the limit of time once, and once more for each of these parts of its bytes


def read_message():
    """Returns the bytes of the next message."""
    head = sys.stdin.buffer.read(4)
    if len(head) < 4:
        sys.exit(0)  # the server has ended
    size, = struct.unpack("<I", head)
    return sys.stdin.buffer.read(size)


def encoded(message):
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")


def write_message(text):
    sys.stdout.buffer.write(struct.pack("<I", len(text)) + text)
    sys.stdout.buffer.flush()


class Refused(Exception):
    """What the client is told about its request."""


def make_environment(jinja2):
    """Returns the environment in which transformers renders chat templates."""
    from jinja2 import ext, nodes, sandbox, utils

    class Generation(ext.Extension):
        """{% generation %} … {% endgeneration %}, which transformers uses to find what the model has written."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller):
            return caller()

    class Namespace(utils.Namespace):
        """A namespace without attributes that begin with an underscore."""

        def __init__(*args, **kwargs):
            self, *values = args
            attributes = dict(*values, **kwargs)
            for name in attributes:
                Namespace.check(name)
            utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name, value):
            Namespace.check(name)
            utils.Namespace.__setitem__(self, name, value)

        @staticmethod
        def check(name):
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")

    class Dictionary:
        """The functions dict and dict.fromkeys, without the attributes of Python's class."""

        def __call__(self, *args, **kwargs):
            return dict(*args, **kwargs)

        def fromkeys(self, *args, **kwargs):
            return dict.fromkeys(*args, **kwargs)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                        extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, dict=Dictionary(), namespace=Namespace,
                               strftime_now=lambda form: datetime.datetime.now().strftime(form))
    return environment


def strings_of(value):
    """Returns the texts and names in a value of JSON."""
    strings, todo = [], [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            strings.append(item)
        elif isinstance(item, dict):
            strings += item
            todo += item.values()
        elif isinstance(item, list):
            todo += item
    return strings


class Marks:
    """Characters for private use that stand for special tokens' texts in a request while a template renders the request.

    A template that ends with the text of a special token means the token, but a client that writes this text does not.
    """

    def __init__(self, request, texts):
        whole = "\0".join(strings_of(request))
        present = [text for text in texts if text in whole]
        count, self.first = len(present) + 1, 0xF0000
        while Marks.collide(whole, range(self.first, self.first + count)):
            self.first += count
        self.by_text = {text: chr(self.first + i) for i, text in enumerate(present)}
        self.pattern = re.compile("|".join(map(re.escape, sorted(present, key=len, reverse=True))))
        self.probe = chr(self.first + len(present))

    @staticmethod
    def collide(whole, codes):
        """Returns whether a text has one of the marks, or the text that a mark may become."""
        return not whole.isascii() and any(chr(code) in whole for code in codes) or \
            "\\" in whole and any(form in whole for code in codes for form in Marks.escapes(chr(code)))

    @staticmethod
    def escapes(mark):
        """Returns the texts that a mark becomes in JSON of ASCII, and where a template writes a list or a dictionary."""
        return json.dumps(mark)[1:-1], repr(mark)[1:-1]

    def put(self, value):
        """Returns a value of JSON with marks, which replace the leftmost of the longest texts."""
        if not self.by_text:
            return value
        if isinstance(value, str):
            return self.pattern.sub(lambda found: self.by_text[found[0]], value)
        if isinstance(value, dict):
            return {self.put(key): self.put(item) for key, item in value.items()}
        return [self.put(item) for item in value] if isinstance(value, list) else value

    def split(self, text):
        """Returns the pieces of a rendered text: what the template means, a special token's text, and so on in turns."""
        if not self.by_text:
            return [text]
        by_mark = {mark: special for special, mark in self.by_text.items()}
        for mark in by_mark:
            for form in Marks.escapes(mark):
                text = text.replace(form, mark)
        pieces = re.split(f"([{''.join(by_mark)}])", text)
        return [by_mark[piece] if i % 2 else piece for i, piece in enumerate(pieces)]


class Worker:
    def __init__(self, setup):
        import jinja2
        self.jinja2 = jinja2
        environment = make_environment(jinja2)
        self.templates = {}
        for name, source in setup["templates"].items():
            try:
                self.templates[name] = environment.from_string(source)
            except jinja2.exceptions.TemplateSyntaxError as error:
                raise Refused(f"line {error.lineno}: {error.message}") from error
            except Exception as error:  # where jinja2 computes a constant
                raise Refused(f"{type(error).__name__}: {error}") from error
        self.variables, self.special = setup["variables"], setup["special"]
        self.seconds = setup["seconds"]

    def render(self, context, longest):
        """Returns the text of a request. Stops where the text becomes longer than the limit."""
        tools = context.get("tools")
        template = self.templates.get("tool_use" if tools is not None else "default") or self.templates["default"]
        pieces, size = [], 0
        try:
            for piece in template.generate(context):
                size += len(piece)
                if size > longest:
                    raise Refused(f"the chat template writes more than {longest} characters")
                pieces.append(piece)
            return "".join(pieces)
        except (MemoryError, Refused):
            raise
        except RecursionError as error:
            raise Refused("the chat template calls itself too often") from error
        except self.jinja2.exceptions.TemplateError as error:
            raise Refused(error.message or type(error).__name__) from error
        except Exception as error:  # of Python, such as TypeError where the template adds a text to a number
            raise Refused(f"{type(error).__name__}: {error}") from error

    def chat(self, request):
        """Returns the pieces of the whole text, and the pieces of each beginning that the request wants, or None."""
        marks = Marks(request["context"], self.special)
        context = self.context(request, marks)
        text = self.text(request, context, marks)
        texts = [marks.split(text)]
        for count in request["beginnings"]:
            part = self.beginning(context, count, request["longest"], marks)
            texts.append(marks.split(part) if part is not None and text.startswith(part) else None)
        return {"texts": texts}

    def beginning(self, context, count, longest, marks):
        """Returns the text of the first messages, or None. A template that wants a user's message gets one behind them."""
        beginning = {**context, "messages": context["messages"][:count], "add_generation_prompt": False}
        try:
            return self.render(beginning, longest)
        except Refused:
            beginning["messages"].append({"role": "user", "content": marks.probe})
        try:
            return self.render(beginning, longest).split(marks.probe)[0]
        except Refused:
            return None

    def context(self, request, marks):
        return {"tools": None, "documents": None, **self.variables, **marks.put(request["context"])}

    def text(self, request, context, marks):
        """Returns the text, which ends with the last message's content where the reply continues that."""
        if not request["continue_final"]:
            return self.render(context, request["longest"])
        content = context["messages"][-1]["content"]
        context["messages"][-1]["content"] = content + marks.probe
        before, probe, _ = self.render(context, request["longest"]).rpartition(marks.probe)
        if not probe:
            raise Refused("the chat template does not show the last message, so that it cannot be continued")
        return before

    def after_reply(self, request):
        """Returns the pieces of what follows a reply: the end of its turn, and then the messages of the request."""
        marks = Marks(request["context"], self.special)
        context = self.context(request, marks)
        context["messages"] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marks.probe},
                               *context["messages"]]
        parts = self.text(request, context, marks).split(marks.probe)
        if len(parts) != 2:
            raise Refused("the chat template does not show a reply as it is, so that no text behind one can be continued")
        return {"texts": [marks.split(parts[1])]}

    def answer(self, message):
        """Returns the bytes of the reply to a request."""
        # A template that takes too long ends this process, also where the server is gone.
        signal.setitimer(signal.ITIMER_PROF, self.seconds * (1 + len(message) / BYTES_PER_TIME))
        try:
            request = json.loads(message)
            return encoded(self.after_reply(request) if request["after_reply"] else self.chat(request))
        except Refused as error:
            return encoded({"refused": str(error)})
        except MemoryError:
            return encoded({"refused": "the chat and its template need more memory than they may have"})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def main():
    try:
        setup = json.loads(read_message())
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory"], setup["memory"]))
        worker = Worker(setup)
    except ImportError:
        return write_message(encoded({"missing": "jinja2"}))
    except Refused as error:
        return write_message(encoded({"refused": str(error)}))
    write_message(encoded({}))
    while True:
        write_message(worker.answer(read_message()))


main()
