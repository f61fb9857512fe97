"""`edgespec serve`: the model behind OpenAI's HTTP API."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any

import click

from edgespec.cli import console
from edgespec.cli.options import engine_options, model_option
from edgespec.cli.run import load_llm
from edgespec.errors import ConfigError, MissingDependencyError
from edgespec.text.tokenizer_files import check_text

__all__ = ["command"]

GRACE_S = 5  # for connections to close, once told to end


@click.command("serve")
@model_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address; others than this machine's need a key.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535), help="0: any that is free.")
@click.option("--api-key", envvar="EDGESPEC_API_KEY", help="Key that requests must bring.  [$EDGESPEC_API_KEY]")
@click.option("-a", "--alias", help="What the model is called in the API.  [the model's name]")
@engine_options
def command(**values: Any) -> None:
    """Serve a model over HTTP, as OpenAI does: /v1/chat/completions, /v1/completions, /v1/models.

    Requests are answered one after another, streamed where they ask for it. Fields of a request have the names of the
    Python API (temperature, top_k, min_p, seed, stop_token_ids ...), whose defaults hold.
    """
    try:
        import uvicorn  # noqa: F401  # said here where it is missing

        from edgespec.server.app import create_app
    except ImportError as error:
        raise MissingDependencyError(f"{error.name} is not installed: pip install 'edgespec[server]'") from error
    host, api_key = values["host"], values["api_key"]
    is_local = _is_local(host)
    if values["trace"] is not None:
        raise ConfigError("--trace is of one request, and a server has many: use it with `edgespec run`")
    if values["alias"] is not None:
        check_text(values["alias"], "--alias")
        if not values["alias"].strip():
            raise ConfigError("--alias is empty: give a name, or leave it out")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise ConfigError("--api-key must be printable ASCII without spaces around it, and not empty")
    if api_key is None and not is_local:
        raise ConfigError(f"--host {host} is open to other machines: give an --api-key, or stay on 127.0.0.1")
    with _listen(host, values["port"]) as listener, load_llm({**values, "as_json": False}, may_plan=True) as llm:
        name = values["alias"] or llm.target.info.name
        port = listener.getsockname()[1]
        hosts = ["127.0.0.1", "localhost", "[::1]", "::1", host] if is_local else None
        app = create_app(llm, name, api_key, hosts)
        server = _server(app)
        listener.listen()  # whoever reads the next line may ask at once
        console.say(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1 (Ctrl-C ends)")
        server.run(sockets=[listener])


def _server(app: Any) -> Any:
    """A uvicorn server that ends its requests when it is told to end, and waits for connections for a few seconds."""
    import uvicorn

    class Server(uvicorn.Server):  # type: ignore[misc]
        def handle_exit(self, sig: int, frame: Any) -> None:
            super().handle_exit(sig, frame)
            app.state.stop()

    return Server(uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=GRACE_S))


def _is_local(host: str) -> bool:
    """Whether nobody but this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket; raises ConfigError where the address cannot be had."""
    listener = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        if os.name == "posix":  # elsewhere it lets two servers take one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host}, port {port}: {reason}; try another --port") from error
