"""Chat templates: the Hugging Face dialect, checks of messages, and templates that mean harm."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from edgespec.errors import ConfigError, MissingDependencyError
from edgespec.text import template_growth, template_limits
from edgespec.text.chat_template import ChatTemplate, check_messages

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    return ChatTemplate(source).render(messages, **variables)


class TestDialect:
    def test_blocks_leave_no_white_space_behind(self) -> None:
        source = (
            "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}!\n  {% endif %}\n{% endfor %}\nend"
        )
        assert render(source) == "Hi!\nend"

    @pytest.mark.parametrize(
        ("source", "text"),
        [
            ("{{ {'b': '<\u00e9>', 'a': [1, none]} | tojson }}", '{"b": "<\u00e9>", "a": [1, null]}'),
            ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
            ("{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
            ("{% for i in range(4) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "023"),
            ("{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{% endfor %}", "0True1"),
            ("{% for i in [1, 2, 3] if i != 2 %}{{ loop.index }}{{ i }};{% endfor %}", "11;23;"),
            ("{% for k, v in {'x': 1}.items() %}{{ k ~ v ~ '-' }}{% endfor %}", "x1-"),
            ("{% for n in [[1, [2]]] recursive %}{{ '(' ~ loop(n) if n is iterable else n }}{% endfor %}", "(1(2"),
            ("{% set n = namespace(s='') %}{% for i in 1, 2%}{% set n.s = n.s + '%d' % i %}{% endfor %}{{ n.s}}", "12"),
            ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') | upper }}", "ABAB"),
            ("{% set x %}{{ messages[0]['content'] }}{% endset %}{{ x.strip() | length }}", "2"),
            ("{{ messages | map(attribute='role') | join('+') }}{{ messages[1:] | length }}", "user0"),
            ("{{ messages | selectattr('role', 'equalto', 'user') | list | count }}", "1"),
            ("{{ 'a-b'.split('-')[-1] }}{{ 'x'.join(['1', '2']) }}{{ 'aXb'.replace('X', '') }}", "b1x2ab"),
            ("{{ '{:>3}'.format(7) }}{{ '%s' | format('q') }}{{ 'a\nb' | indent(2) }}", "  7qa\n  b"),
            ("{{ (3 * 'ab') + '-' * 2 }}{{ 2 ** 3 }}", "ababab--8"),
            ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
            ("{{ bos_token }}{{ missing }}{% if tools is defined %}no{% endif %}", "<s>"),
            ("{{ strftime_now('%Y')[:2] }}", "20"),
            ("{% for a, b in [(1, 2)] %}{{ a + b }}{% endfor %}", "3"),
        ],
    )  # fmt: skip
    def test_what_templates_use_works(self, source: str, text: str) -> None:
        assert render(source, bos_token="<s>") == text

    def test_raise_exception_reaches_the_user(self) -> None:
        with pytest.raises(ConfigError, match="refuses these messages: roles must alternate"):
            render("{{ raise_exception('roles must alternate') }}")

    def test_variables_reach_the_template(self) -> None:
        assert render(
            "{{ tools[0].name }}{{ add_generation_prompt }}", tools=[{"name": "f"}], add_generation_prompt=True
        ) == ("fTrue")

    def test_one_template_serves_several_threads(self) -> None:
        template = ChatTemplate("{% for i in range(200) %}{{ messages[0].content }}{% endfor %}")
        results: dict[int, str] = {}

        def work(index: int) -> None:
            results[index] = template.render([{"role": "user", "content": str(index)}])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {index: str(index) * 200 for index in range(4)}


class TestMessages:
    def test_text_parts_are_joined(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"

    def test_the_callers_messages_stay_as_they_are(self) -> None:
        messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"}]
        assert check_messages(messages) == [{"role": "user", "content": "a", "name": "n"}]
        assert messages[0]["content"] == [{"type": "text", "text": "a"}]

    @pytest.mark.parametrize(
        ("messages", "field"),
        [
            ("Hi", "messages is str"),
            ([], "messages is empty"),
            (["Hi"], r"messages\[0\] is str"),
            ([{"content": "Hi"}], r"messages\[0\]\.role is NoneType"),
            ([{"role": "", "content": "Hi"}], r"messages\[0\]\.role is empty"),
            ([*USER, {"role": "user", "content": None}], r"messages\[1\]\.content is missing or null"),
            ([{"role": "user", "content": 3}], r"messages\[0\]\.content is int"),
            ([{"role": "user", "content": "\ud800"}], r"messages\[0\]\.content holds half of a surrogate pair"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is a part of type 'image_url'"),
            ([{"role": "user", "content": ["Hi"]}], r"content\[0\] is a part of type 'str'"),
            ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text is NoneType"),
        ],
    )
    def test_the_field_at_fault_is_named(self, messages: Any, field: str) -> None:
        with pytest.raises(ConfigError, match=field):
            render("{{ messages[0].content }}", messages)


DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x | length }}"
HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop in a filter": "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "a long range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "macros without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a tree of macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a tree of texts": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% else %}{{ 'a' * 4000000 }}{% endif %}"
    "{% endmacro %}{{ f(4) }}",
    "a sum of texts": DOUBLING.replace("STEP", "ns.x + ns.x"),
    "a chain of texts": DOUBLING.replace("STEP", "ns.x ~ ns.x"),
    "a product of texts": DOUBLING.replace("STEP", "ns.x * 9"),
    "a product of lists": "{{ ([1] * 4000000) * 4000000 }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "large numbers": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "replacing": DOUBLING.replace("STEP", "ns.x | replace('a', 'aa')"),
    "replacing by a method": DOUBLING.replace("STEP", "ns.x.replace('', 'aa')"),
    "joining": DOUBLING.replace("STEP", "[ns.x, ns.x] | join(ns.x)"),
    "joining by a method": DOUBLING.replace("STEP", "ns.x.join([ns.x, ns.x])"),
    "captured blocks": "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "lists in lists": "{% set x = ['a'] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "objects in objects": "{% set x = 'a' %}" + "{% set x = {'a': x, 'b': x} %}" * 60 + "{{ x | tojson }}",
    "tuples in calls": "{% set x = 'a' %}" + "{% set x = dict(a=x, b=x) %}" * 60 + "{{ x }}",
    "padding": "{{ 'a'.center(10 ** 9) }}",
    "padding by keyword": "{{ 'a' | indent(width=999999999) }}",
    "indented JSON": "{{ [1] | tojson(indent=999999999) }}",
    "a wide format": "{{ '%999999999d' % 1 }}",
    "a wide format method": "{{ '{:999999999}'.format(1) }}",
    "a wide format field": "{{ '{:{}}'.format(1, 999999999) }}",
    "many fields": "{{ ('%(a)s' * 1000000) | format(a='a' * 4000000) }}",
    "bytes of a number": "{{ (1).to_bytes(999999999) }}",
    "bytes": "{{ 'a'.encode().center(999999999) }}",
    "much output": "{% for i in range(9) %}{{ 'a' * 4000000 }}{% endfor %}",
    "a wide date": "{{ strftime_now('%999999999d') }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "another filter": "{{ 'a' | lipsum }}",
    "changing the messages": "{{ messages.append(1) }}",
    "no syntax": "{% for %}",
    "deep nesting": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "deep loops": "{% for a in [1] %}" * 40 + "{% endfor %}" * 40,
    "a long template": "a" * (1 << 19),
    "half a pair": "{{ '\\ud800' }}",
}


class TestHostileTemplates:
    @pytest.fixture
    def small_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same checks sooner: most cases would make and drop large values first."""
        monkeypatch.setattr(template_limits, "_MAX_STEPS", 20_000)
        monkeypatch.setattr(template_limits, "_MAX_TOTAL", 1 << 25)
        monkeypatch.setattr(template_limits, "MAX_SIZE", 1 << 20)
        monkeypatch.setattr(template_growth, "MAX_SIZE", 1 << 20)

    @pytest.mark.usefixtures("small_limits")
    @pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
    def test_it_ends_with_a_sentence(self, source: str) -> None:
        with pytest.raises(ConfigError, match="chat template"):
            render(source)

    @pytest.mark.parametrize("name", ["nested loops", "a sum of texts", "lists in lists"])
    def test_the_real_limits_hold_too(self, name: str) -> None:
        with pytest.raises(ConfigError, match="chat template"):
            render(HOSTILE[name])

    def test_a_slow_template_meets_the_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(template_limits, "_MAX_SECONDS", -1.0)
        with pytest.raises(ConfigError, match="seconds"):
            render("{% for i in [1] %}{% endfor %}")

    def test_many_values_meet_the_total(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(template_limits, "_MAX_TOTAL", 1000)
        with pytest.raises(ConfigError, match="in all"):
            render("{% for i in range(99) %}{% set x = 'a' * 99 %}{% endfor %}")

    def test_weighing_stops_early(self) -> None:
        value: list[Any] = ["a"]
        for _ in range(200):
            value = [value, value]
        assert template_growth.MAX_SIZE < template_growth.weigh(value) < 2 * template_growth.MAX_SIZE

    def test_a_failing_template_leaves_no_budget_behind(self) -> None:
        template = ChatTemplate("{{ raise_exception('no') if messages[0].content == 'bad' else 'fine' }}")
        with pytest.raises(ConfigError):
            template.render([{"role": "user", "content": "bad"}])
        assert template.render(USER) == "fine"
        assert template_limits._budget.get(None) is None


def test_without_jinja2_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependencyError, match="pip install 'jinja2"):
        ChatTemplate("{{ messages }}")
