"""The HTTP server over a table model, asked through real sockets."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chat_world import make_llm

from edgespec import LLM, SamplingParams

uvicorn = pytest.importorskip("uvicorn")

from edgespec.server.app import create_app  # noqa: E402
from edgespec.server.worker import Worker  # noqa: E402

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "seed": 4, "ignore_eos": True}
KEY = "secret"


class Client:
    """Asks one server."""

    def __init__(self, port: int, llm: LLM, app: Any) -> None:
        self.port, self.llm, self.stop = port, llm, app.state.stop

    @property
    def worker(self) -> Worker:
        worker = self.stop.__self__.worker
        assert isinstance(worker, Worker)
        return worker

    @contextmanager
    def open(self, method: str, path: str, body: Any = None, **headers: str) -> Iterator[http.client.HTTPResponse]:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", "Connection": "close"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, data, sent)
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()

    def post(self, path: str, body: Any, status: int = 200, **headers: str) -> Any:
        with self.open("POST", path, body, **headers) as response:
            text = response.read()
            assert response.status == status, text
            return json.loads(text)

    def events(self, path: str, body: Any) -> list[Any]:
        with self.open("POST", path, {**body, "stream": True}) as response:
            assert response.status == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            blocks = response.read().decode().split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


@contextmanager
def serve(llm: LLM, **options: Any) -> Iterator[Client]:
    app = create_app(llm, "tiny", **options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Client(server.servers[0].sockets[0].getsockname()[1], llm, app)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serve(make_llm(tmp_path, n_ctx=6000)) as client:
        yield client


def test_an_answer_is_that_of_the_python_api(client: Client) -> None:
    reply = client.post("/v1/chat/completions", {**CHAT, "model": "tiny", "temperature": 0.9})
    client.llm.forget()
    params = SamplingParams(max_tokens=12, seed=4, ignore_eos=True, temperature=0.9)
    output = client.llm.chat(CHAT["messages"], params).outputs[0]  # type: ignore[arg-type]
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": output.text, "refusal": None}
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["object"] == "chat.completion"
    stats, theirs = output.stats.to_dict(), reply["edgespec"]
    assert (theirs["rounds"], theirs["drafted"], theirs["accepted"]) == (
        stats["rounds"], stats["drafted"], stats["accepted"]
    )  # fmt: skip
    usage = reply["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12 == output.stats.prompt_tokens + 12
    again = client.post("/v1/chat/completions", CHAT)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("wants_usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_says_the_same_in_pieces(client: Client, path: str, wants_usage: bool) -> None:
    body: dict[str, Any] = (
        CHAT if "chat" in path else {"prompt": "hello", "max_tokens": 12, "seed": 4, "ignore_eos": True}
    )
    choice = client.post(path, body)["choices"][0]
    options = {"stream_options": {"include_usage": True}} if wants_usage else {}
    events = client.events(path, {**body, **options})
    pieces = [event["choices"][0] for event in events if event["choices"]]
    texts = [piece["delta"].get("content", "") if "chat" in path else piece["text"] for piece in pieces]
    assert "".join(texts) == (choice["message"]["content"] if "chat" in path else choice["text"])
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len({event["id"] for event in events}) == 1
    if not wants_usage:
        assert not any("usage" in event for event in events)
        return
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages"),
        ({"messages": [{"role": "user", "content": "x" * 7000}]}, "messages"),
        ({**CHAT, "logit_bias": {"99999": 1}}, "logit_bias"),
        ({**CHAT, "logit_bias": {"a": 1}}, "logit_bias"),
        ({**CHAT, "temperature": -1}, "temperature"),
        ({**CHAT, "best": 1}, "best"),
        ({**CHAT, "logit_bias": {"--5": 1}}, "logit_bias"),
        ({**CHAT, "logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({**CHAT, "temperature": 10**400}, "temperature"),
        ({**CHAT, "logit_bias": {"5": 10**400}}, "logit_bias"),
        (b'{"messages": [{"role": "user", "content": "a"}], "\\ud800": 1}', "?"),
        (b'{"seed": 1, "seed": 2}', None),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}, "messages[0].tool_calls"),
    ],
)
def test_mistakes_are_said_and_the_next_request_works(client: Client, body: Any, param: str | None) -> None:
    error = client.post("/v1/chat/completions", body, 400)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert client.post("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("prompt", [[-1], [99999], [], "", [1.5], ["a", "b"]])
def test_prompts_that_are_none_are_refused(client: Client, prompt: Any) -> None:
    assert client.post("/v1/completions", {"prompt": prompt}, 400)["error"]["param"] == "prompt"


def test_models_paths_types_and_sizes(client: Client) -> None:
    with client.open("GET", "/v1/models") as response:
        card = json.loads(response.read())["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", 6000)
    with client.open("GET", "/v1/models/tiny") as response:
        assert json.loads(response.read()) == card
    assert client.post("/v1/chat/completions", {**CHAT, "model": "other"}, 404)["error"]["code"] == "model_not_found"
    assert client.post("/v1/embeddings", {}, 404)["error"]["message"]
    with client.open("GET", "/v1/chat/completions") as response:
        assert response.status == 405
    assert client.post("/v1/chat/completions", CHAT, 415, Content_Type="text/plain")["error"]["message"]
    assert client.post("/v1/chat/completions", b" " * ((16 << 20) + 1), 413)["error"]["message"]
    with client.open("GET", "/health") as response:
        assert json.loads(response.read()) == {"status": "ok"}


def test_a_key_is_asked_for_where_there_is_one(tmp_path: Path) -> None:
    with serve(make_llm(tmp_path), api_key=KEY) as client:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": "Bearer "}):
            error = client.post("/v1/chat/completions", CHAT, 401, **given)["error"]
            assert error["type"] == "authentication_error"
        assert client.post("/v1/chat/completions", CHAT, Authorization=f"Bearer {KEY}")["choices"]
        with client.open("GET", "/v1/models") as response:
            assert response.status == 401
        with client.open("GET", "/health") as response:
            assert response.status == 200


def test_hosts_of_other_names_are_refused(tmp_path: Path) -> None:
    with serve(make_llm(tmp_path), hosts=["127.0.0.1"]) as client, client.open("GET", "/v1/models", Host="evil") as one:
        assert one.status == 400


class Gate:
    """Holds every answer of an LLM after its second round until it is opened; counts rounds and beginnings."""

    def __init__(self, llm: LLM) -> None:
        self.stream, self.rounds, self.begun = llm.stream, 0, 0
        self.opened, self.reached = threading.Event(), threading.Event()
        llm.stream = self._stream  # type: ignore[method-assign,assignment]

    def _stream(self, *args: Any) -> Iterator[Any]:
        return self._gated(self.stream(*args))

    def _gated(self, deltas: Iterator[Any]) -> Iterator[Any]:
        self.begun += 1
        try:
            for place, delta in enumerate(deltas):
                if place == 2:
                    self.reached.set()
                    assert self.opened.wait(60)
                self.rounds += 1
                yield delta
        finally:
            deltas.close()  # type: ignore[attr-defined]


def ask_and_stay(client: Client, body: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to that within a minute")


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_ends_its_request(client: Client, is_stream: bool) -> None:
    """A request of 5,000 tokens that nobody reads any more ends within a round; what waits behind it gets its turn."""
    gate, worker = Gate(client.llm), client.worker
    connection = ask_and_stay(client, {**CHAT, "max_tokens": 5000, "stream": is_stream})
    assert gate.reached.wait(60)
    job = worker._current
    assert job is not None
    connection.close()
    wait_until(job._is_left.is_set)
    gate.opened.set()
    assert client.post("/v1/chat/completions", CHAT)["choices"][0]["finish_reason"] == "length"
    assert gate.rounds <= 3 + 12


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_while_it_waits_is_not_decoded_for(client: Client, is_stream: bool) -> None:
    gate, worker = Gate(client.llm), client.worker
    first = ask_and_stay(client, CHAT)
    assert gate.reached.wait(60)
    second = ask_and_stay(client, {**CHAT, "stream": is_stream})
    wait_until(lambda: worker._waiting.qsize() == 1)
    waiting = worker._waiting.queue[0]
    assert waiting is not None
    second.close()
    wait_until(waiting._is_left.is_set)
    gate.opened.set()
    assert first.getresponse().status == 200
    first.close()
    assert client.post("/v1/chat/completions", CHAT)["choices"]
    assert gate.begun == 2, "the first and the last"


def test_too_many_requests_are_told_so(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.server.worker.MOST_WAITING", 1)
    gate, worker = Gate(client.llm), client.worker
    staying = [ask_and_stay(client, CHAT)]
    assert gate.reached.wait(60)
    staying.append(ask_and_stay(client, CHAT))
    wait_until(lambda: worker._waiting.qsize() == 1)
    assert "try again" in client.post("/v1/chat/completions", CHAT, 503)["error"]["message"]
    gate.opened.set()
    for connection in staying:
        assert connection.getresponse().status == 200
        connection.close()


def test_a_server_that_stops_tells_those_who_wait(tmp_path: Path) -> None:
    """Stopping waited for every request to come to its end, those in the queue too."""
    with serve(make_llm(tmp_path, n_ctx=6000)) as client:
        gate = Gate(client.llm)
        staying = [ask_and_stay(client, {**CHAT, "max_tokens": 5000, "stream": place == 0}) for place in range(1)]
        assert gate.reached.wait(60)
        staying.append(ask_and_stay(client, CHAT))
        wait_until(lambda: client.worker._waiting.qsize() == 1)
        client.stop()
        gate.opened.set()
        cut, refused = [connection.getresponse() for connection in staying]
        text = cut.read().decode()
        assert "was ended" in text
        assert "[DONE]" not in text
        assert refused.status == 503
        assert "stops" in client.post("/v1/chat/completions", CHAT, 503)["error"]["message"]
        for connection in staying:
            connection.close()
        assert gate.rounds <= 3


def test_an_answer_that_cannot_be_ended_well_is_the_requests_own(client: Client) -> None:
    """A trace that could not be written ended the decoding thread, and later requests waited for ever."""
    stream = client.llm.stream

    def fails_late(*args: Any) -> Iterator[Any]:
        try:
            yield from stream(*args)
        finally:
            raise OSError("the disk is full")

    client.llm.stream = fails_late  # type: ignore[method-assign,assignment]
    for _ in range(2):
        assert client.post("/v1/chat/completions", CHAT)["choices"]
        with client.open("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 500, "stream": True}) as response:
            response.read(100)
    client.llm.stream = stream  # type: ignore[method-assign]
    assert client.post("/v1/chat/completions", CHAT)["choices"]


def test_requests_at_once_are_answered_as_alone(client: Client) -> None:
    bodies = [{**CHAT, "seed": seed, "temperature": 1.0, "max_tokens": 30} for seed in range(6)]
    alone = [client.post("/v1/chat/completions", body)["choices"][0]["message"]["content"] for body in bodies]
    found: dict[int, str] = {}

    def ask(place: int) -> None:
        events = client.events("/v1/chat/completions", bodies[place])
        found[place] = "".join(event["choices"][0]["delta"].get("content", "") for event in events)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(len(bodies))] == alone


def test_streams_that_are_closed_at_random_leave_nothing_behind(client: Client) -> None:
    alone = client.post("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"]
    dice = random.Random(5)
    for _ in range(20):
        with client.open("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 3000, "stream": True}) as response:
            response.read(dice.randrange(1, 4000))
    with client.open("GET", "/health") as response:
        assert response.status == 200
    assert client.post("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"] == alone
    assert client.worker._waiting.qsize() == 0


def test_a_failure_while_decoding_is_the_requests_own(client: Client) -> None:
    stream = client.llm.stream

    def fails(*args: Any) -> Iterator[Any]:
        yield from list(stream(*args))[:2]
        raise RuntimeError("the device is gone")

    client.llm.stream = fails  # type: ignore[method-assign,assignment]
    assert "device is gone" in client.post("/v1/chat/completions", CHAT, 500)["error"]["message"]
    with client.open("POST", "/v1/chat/completions", {**CHAT, "stream": True}) as response:
        text = response.read().decode()
    assert "device is gone" in text
    assert "[DONE]" not in text
    client.llm.stream = stream  # type: ignore[method-assign]
    assert client.post("/v1/chat/completions", CHAT)["choices"]
