"""Bodies of requests: what is read, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec import SamplingParams
from edgespec.server.bodies import BadRequest, read_json, read_request

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_fields_have_the_names_of_the_python_api_and_of_openai() -> None:
    asked = read_request(
        {**CHAT, "model": "m", "max_completion_tokens": 9, "temperature": 0.5, "top_k": 4, "stop": "x", "seed": 3,
         "logit_bias": {"7": -100}, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
         "user": "me", "n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}, "top_p": None},
        is_chat=True,
    )  # fmt: skip
    assert asked.params == SamplingParams(
        max_tokens=9, temperature=0.5, top_k=4, stop=("x",), seed=3, logit_bias={7: -100.0}, ignore_eos=True
    )
    assert (asked.prompt, asked.model, asked.is_stream, asked.wants_usage) == (CHAT["messages"], "m", True, True)
    assert read_request({"prompt": ["a"]}, is_chat=False).prompt == "a"
    assert read_request({"prompt": [[1, 2]]}, is_chat=False).prompt == [1, 2]
    assert read_request({"prompt": "a"}, is_chat=False).params == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "much"}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"a": 1}}, "stream_options.a"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        ({"model": 5}, "model"),
        ({"messages": None}, "messages"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_request({**CHAT, **fields}, is_chat=True)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize("prompt", [5, {"a": 1}, ["a", "b"], [[1], [2]], True])
def test_prompts_of_other_kinds_are_refused(prompt: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        read_request({"prompt": prompt}, is_chat=False)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"\xff", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 100_000]
)
def test_bodies_that_are_no_json_objects_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="the body is"):
        read_json(body)


def test_a_body_is_read() -> None:
    assert read_json(json.dumps(CHAT).encode()) == CHAT
