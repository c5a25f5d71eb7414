"""The program in which chat templates run, bounded by the operating system.

`template_sandbox.py` starts it, with its own module path as arguments, and writes requests to the
standard input: a line of JSON with the source, the variables of a rendering or None, and limits:
seconds of a processor, bytes of address space, and characters of output. Each answer is a line of
JSON: `["error", reason]`; without variables `["names", names of undeclared variables]`, and
otherwise `["text", text, ranges of characters in {% generation %} blocks]`.
"""

import json
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from typing import Any

if __name__ == "__main__":
    sys.path[:] = sys.argv[1:]

import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

if sys.platform != "win32":
    import resource
    import signal

LATE = (
    "encodings.unicode_escape", "html", "jinja2.constants", "jinja2.debug", "pprint", "textwrap",
    "unicodedata",
)  # fmt: skip
"""Modules that Jinja and Python import on first use, when no file can be opened any more."""
MAX_REASON = 1000
"""Maximum number of characters of a reason."""


class Generation(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks an answer, with the scope of Transformers'."""

    tags = {"generation"}  # noqa: RUF012
    length = 0
    """Number of characters written before."""
    ranges: list[tuple[int, int]]
    """Ranges of characters of the blocks so far."""

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block as a call of `mark`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        """Write a block."""
        text = caller()
        self.ranges.append((self.length, self.length + len(text)))
        return text


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write a value as JSON, without the escapes of HTML that Jinja's filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: object) -> None:
    raise jinja2.TemplateError(str(message))


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
)
ENVIRONMENT.filters["tojson"] = _to_json
ENVIRONMENT.globals["raise_exception"] = _refuse
ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
_compiled = lru_cache(maxsize=8)(ENVIRONMENT.from_string)


def _render(source: str, variables: dict[str, Any], most: int) -> tuple[str, str, list]:
    template, parts = _compiled(source), []
    marks: Any = ENVIRONMENT.extensions[Generation.identifier]
    marks.length, marks.ranges = 0, []
    for part in template.generate(**variables):
        parts.append(part)
        marks.length += len(part)
        if marks.length > most:
            raise OverflowError(f"it writes more than {most:,} characters")
    return "text", "".join(parts), marks.ranges


def _answer(source: str, variables: dict[str, Any] | None, most: int) -> str:
    try:
        if variables is not None:
            return json.dumps(_render(source, variables, most))
        _compiled(source)
        names = jinja2.meta.find_undeclared_variables(ENVIRONMENT.parse(source))
        return json.dumps(["names", [*names]])
    except MemoryError:
        reason = "it exceeds the memory of a chat template"
    except Exception as error:  # expressions of the template can raise any exception
        reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
    return json.dumps(["error", reason])


def main() -> None:
    """Answer requests until the standard input ends."""
    datetime.now()  # reads the time zone
    for module in LATE:
        import_module(module)
    if sys.platform != "win32":
        for limit in ("NOFILE", "FSIZE", "NPROC", "CORE"):
            resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (0, 0))
    for line in sys.stdin.buffer:
        (source, variables), seconds, size, most = json.loads(line)
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            most_bytes = size, resource.getrlimit(resource.RLIMIT_AS)[1]
            with suppress(ValueError, OSError):  # macOS, or there is a lower one
                resource.setrlimit(resource.RLIMIT_AS, most_bytes)
        sys.stdout.write(_answer(source, variables, most) + "\n")
        sys.stdout.flush()
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
