"""`edgespec serve` on the real model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from edgespec import LLM, SamplingParams

pytestmark = pytest.mark.real_model
pytest.importorskip("uvicorn")

HEARS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from edgespec.cli import main; main()"


@pytest.fixture
def server(child_env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HEARS, "serve", "--port", "0", "--draft", "ngram"],
        env=child_env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def test_the_server_gives_the_same_rounds_as_the_api(server: subprocess.Popen[str], real_bundle: str) -> None:
    assert server.stderr is not None
    line = next(line for line in server.stderr if "serving" in line)
    address = re.search(r"http://\S+/v1", line)
    assert address is not None
    messages = [{"role": "user", "content": "Name three rivers."}]
    body = {"model": "smollm2-135m", "messages": messages, "max_tokens": 24, "temperature": 0.8, "seed": 5}
    request = urllib.request.Request(
        f"{address[0]}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        reply = json.load(response)
    with LLM(real_bundle, draft="ngram") as llm:
        output = llm.chat(messages, SamplingParams(max_tokens=24, temperature=0.8, seed=5)).outputs[0]
    assert reply["choices"][0]["message"]["content"] == output.text
    for name in ("rounds", "drafted", "accepted"):
        assert reply["edgespec"][name] == output.stats.to_dict()[name]
    server.send_signal(signal.SIGINT)
    out, err = server.communicate(timeout=60)
    assert out == ""
    assert "Traceback" not in err
    assert server.returncode in (0, 130)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "give an --api-key"),
        (["--api-key", ""], "--api-key must be"),
        (["--host", "no.such.host.invalid", "--api-key", "x"], "cannot listen on no.such.host.invalid"),
        (["--port", "70000"], "70000"),
    ],
)
def test_addresses_that_cannot_be_served_are_one_line(
    child_env: dict[str, str], arguments: list[str], message: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edgespec", "serve", *arguments], env=child_env, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
