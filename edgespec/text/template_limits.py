"""A Jinja sandbox in which every template ends soon and stays small.

Jinja has no `while`: a template can only run long through loops, calls, filters and operators, and only grow large
through the last three, through literals and through blocks that capture output. All of these are counted here, partly
by rewriting the parsed template, and what can make a large value is checked before it does. So neither threads nor
signals are needed, and the same template fails in the same way everywhere. Knows nothing of chats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from edgespec.errors import ConfigError
from edgespec.text.template_growth import GROWTH, MAX_RANGE, MAX_SIZE, weigh

__all__ = ["LimitedEnvironment"]

_MAX_STEPS = 500_000
_MAX_SECONDS = 10.0
_MAX_TOTAL = 1 << 29  # of all values that one rendering makes
_MAX_NUMBER = 1 << 64

_FILTERS = (
    "abs attr batch capitalize count d default dictsort e escape first float format groupby indent int items join "
    "last length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string "
    "title trim unique upper wordcount"
)
_GLOBALS = ("namespace", "dict", "cycler", "joiner")

_Value = TypeVar("_Value")


class _Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self.n_steps = 0
        self.n_made = 0
        self.deadline = time.monotonic() + _MAX_SECONDS

    def step(self) -> None:
        self.n_steps += 1
        if self.n_steps > _MAX_STEPS:
            raise ConfigError(f"the chat template takes more than {_MAX_STEPS:,} steps; it may never end.")
        if time.monotonic() > self.deadline:
            raise ConfigError(f"the chat template takes more than {_MAX_SECONDS:.0f} seconds.")

    def make(self, size: int) -> None:
        """Account for a value of `size`, as `weigh` counts."""
        self.n_made += size
        if size > MAX_SIZE:
            raise ConfigError(f"the chat template makes a text or list of over {MAX_SIZE:,} characters.")
        if self.n_made > _MAX_TOTAL:
            raise ConfigError(f"the chat template makes over {_MAX_TOTAL:,} characters in all.")


_budget: ContextVar[_Budget] = ContextVar("chat_template_budget")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Counts steps and sizes; only `render_limited` may run its templates.

    filters, functions: what templates may use besides Jinja's own.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], functions: Mapping[str, Callable[..., Any]]) -> None:
        # The optimizer would run filters while compiling, outside any budget.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        known = {name: self.filters[name] for name in _FILTERS.split()} | dict(filters)
        self.filters = {name: _limited(name, function) for name, function in known.items()}
        self.filters.update({_Rewrite.CONCAT: _concat, _Rewrite.LOOP: _Loop, _Rewrite.LITERAL: _made})
        self.globals = {name: self.globals[name] for name in _GLOBALS} | {"range": _range} | dict(functions)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Rewrite().visit(super()._parse(source, name, filename))
        return template

    def render_limited(self, template: Template, variables: dict[str, Any]) -> str:
        """The template's output; ConfigError over the limits."""
        token = _budget.set(_Budget())
        try:
            pieces, size = [], 0
            for piece in template.generate(variables):
                size += len(piece)
                _budget.get().make(size if size > MAX_SIZE else len(piece))
                pieces.append(piece)
            return "".join(pieces)
        finally:
            _budget.reset(token)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Joins what macros and `{% set %}` blocks captured."""
        texts = list(pieces)
        _budget.get().make(sum(map(len, texts)))
        return "".join(texts)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `format_map`, which Jinja hands out wrapped."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            _budget.get().make(GROWTH["format"](value.__self__, args, kwargs))
            return wrapped(*args, **kwargs)

        return limited

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template, methods included. args: context, callee, the call's own arguments."""
        context, callee, *rest = args
        _budget.get().step()
        subject, name = getattr(callee, "__self__", None), getattr(callee, "__name__", "")
        if isinstance(subject, (int, float, bytes)) or name in ("translate", "encode"):
            raise ConfigError(f"the chat template calls {name} of {type(subject).__name__}, which is not supported.")
        if isinstance(subject, str) and name in GROWTH:
            if name == "join" and rest:
                rest[0] = list(rest[0])
                _budget.get().make(GROWTH[name](rest[0], (subject,), {}))
            else:
                _budget.get().make(GROWTH[name](subject, tuple(rest), kwargs))
        return _made(super().call(context, callee, *rest, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The operators that can make large values."""
        budget = _budget.get()
        budget.step()
        budget.make(GROWTH[operator](left, (right,), {}))
        return _made(super().call_binop(context, operator, left, right))


def _made(value: _Value) -> _Value:
    """`value`, unless it is larger than values may be, written out in full."""
    if isinstance(value, (str, list, tuple, dict)):
        _budget.get().make(weigh(value))
    elif isinstance(value, int) and abs(value) > _MAX_NUMBER:
        raise ConfigError("the chat template computes with numbers over 64 bits.")
    return value


def _range(*args: int) -> range:
    """`range` of at most 100,000 entries."""
    result = range(*args)
    if len(result) > MAX_RANGE:
        raise ConfigError(f"the chat template asks for a range of {len(result):,} entries, over {MAX_RANGE:,}.")
    return result


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts as a step and checks what it is given and what it gives."""
    passes = getattr(function, "jinja_pass_arg", None)
    n_hidden = 0 if passes is None else 1

    def limited(*args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        if name in GROWTH:
            _budget.get().make(GROWTH[name](args[n_hidden], args[n_hidden + 1 :], kwargs))
        return _made(function(*args, **kwargs))

    if passes is not None:
        limited.jinja_pass_arg = passes  # type: ignore[attr-defined]
    return limited


def _concat(items: list[Any]) -> str:
    """The `~` operator."""
    _budget.get().step()
    return LimitedEnvironment.concat(str(item) for item in items)


class _Loop:
    """What a `for` iterates over, each entry counting as a step."""

    def __init__(self, items: Any) -> None:
        iter(items)  # not iterable: say so now
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        budget = _budget.get()
        for item in self._items:
            budget.step()
            yield item

    def __len__(self) -> int:
        return len(self._items)


class _Rewrite(NodeTransformer):
    """Puts the counting filters into a parsed template."""

    CONCAT, LOOP, LITERAL = "_limited_concat", "_limited_loop", "_limited_literal"

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(self.CONCAT, nodes.List(node.nodes, lineno=node.lineno))

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filter(self.LOOP, node.iter)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._literal(node) if node.ctx == "load" else node

    def _literal(self, node: nodes.Expr) -> nodes.Expr:
        """A list that holds another list twice, which another holds twice, is small until it is written out."""
        self.generic_visit(node)
        return _filter(self.LITERAL, node)


def _filter(name: str, subject: nodes.Node) -> nodes.Filter:
    return nodes.Filter(subject, name, [], [], None, None, lineno=subject.lineno)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body
