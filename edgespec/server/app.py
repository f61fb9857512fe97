"""The routes: who may ask, what is asked, and the answer in one piece or as server-sent events.

Knows requests and replies; decoding is the worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from edgespec.errors import ConfigError
from edgespec.outputs import CompletionOutput, Delta
from edgespec.server.bodies import Asked, BadRequest, field_of, read_json, read_request
from edgespec.server.replies import DONE, Reply, error_body, event
from edgespec.server.worker import Busy, Job, Stopped, Worker

if TYPE_CHECKING:
    from starlette.types import Send

    from edgespec.llm import LLM

__all__ = ["create_app"]

MOST_BODY = 16 << 20  # bytes
Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(llm: LLM, name: str, api_key: str | None = None, hosts: list[str] | None = None) -> Starlette:
    """The server of one model, called `name`; its `state.stop()` ends what it decodes.

    hosts: the Host headers that are answered; all where None. A page in a browser can send requests to this machine's
    own addresses under a name of its own: hosts keeps it out.
    """
    server = _Server(llm, name, api_key)
    routes = [
        Route("/health", server.health),
        Route("/v1/models", server.guarded(server.models)),
        Route("/v1/models/{name:path}", server.guarded(server.model)),
        Route("/v1/chat/completions", server.guarded(server.chat), methods=["POST"]),
        Route("/v1/completions", server.guarded(server.complete), methods=["POST"]),
    ]
    guards = [] if hosts is None else [Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)]
    app = Starlette(
        routes=routes, middleware=guards, lifespan=server.lifespan, exception_handlers={HTTPException: _say_http}
    )
    app.state.stop = server.stop
    return app


class _Events(StreamingResponse):
    """Closes its iterator whatever happens to the connection."""

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


class _Server:
    def __init__(self, llm: LLM, name: str, api_key: str | None) -> None:
        self.llm, self.name, self.api_key = llm, name, api_key
        self.worker: Worker | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.worker = Worker()
        try:
            yield
        finally:
            await run_in_threadpool(self.worker.close)

    def stop(self) -> None:
        """End the requests: who waits for connections to close would wait for them to come to their ends."""
        if self.worker is not None:
            self.worker.stop()

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint for those who have the key; its mistakes as JSON."""

        async def answer(request: Request) -> Response:
            try:
                self._check_key(request)
                return await endpoint(request)
            except ConfigError as error:
                return _say(error)
            except (Busy, Stopped) as error:
                return _error(str(error), 503)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # the request's; the server goes on
                return _error(f"internal error: {type(error).__name__}: {error}", 500)

        return answer

    def _check_key(self, request: Request) -> None:
        if self.api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), self.api_key.encode()):
            raise BadRequest("the API key is missing or wrong: send it as Authorization: Bearer KEY", None, 401)

    async def health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": 0, "owned_by": "edgespec"}
        return {**card, "max_model_len": self.llm.target.info.n_ctx}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise BadRequest(
                f"there is no model {name!r} here: {self.name!r} is served", "model", 404, "model_not_found"
            )

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, is_chat=True)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, is_chat=False)

    async def _answer(self, request: Request, *, is_chat: bool) -> Response:
        asked = read_request(read_json(await _body(request)), is_chat=is_chat)
        self._check_model(asked.model)
        deltas = await run_in_threadpool(self._begin, asked, is_chat)
        assert self.worker is not None
        job, reply = self.worker.submit(deltas), Reply(self.name, is_chat=is_chat)
        if asked.is_stream:
            return _Events(_events(job, reply, asked.wants_usage), media_type="text/event-stream")
        return JSONResponse(reply.whole(await _whole(job, request)))

    def _begin(self, asked: Asked, is_chat: bool) -> Iterator[Delta]:
        """The answer, not begun; raises BadRequest for what the model cannot take."""
        field = "messages" if is_chat else "prompt"
        try:
            ids = self.llm.encode_chat(asked.prompt) if is_chat else self.llm.encode(asked.prompt)
        except ConfigError as error:
            code = "context_length_exceeded" if "the context holds" in str(error) else None
            raise BadRequest(str(error), field, code=code) from error
        try:
            return self.llm.stream(ids, asked.params)
        except ConfigError as error:
            raise BadRequest(str(error), field_of(error)) from error


async def _whole(job: Job, request: Request) -> CompletionOutput:
    """The output of a job; raises ClientDisconnect as soon as nobody waits for it."""
    ending, leaving = asyncio.ensure_future(_output(job)), asyncio.ensure_future(_departure(request))
    try:
        await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            raise ClientDisconnect
        return ending.result()
    finally:
        ending.cancel()
        leaving.cancel()
        job.leave()


async def _output(job: Job) -> CompletionOutput:
    async with contextlib.aclosing(job.deltas()) as news:  # type: ignore[type-var]
        async for delta in news:
            if delta.output is not None:
                return delta.output
    raise Stopped("the request was ended")


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(job: Job, reply: Reply, wants_usage: bool) -> AsyncIterator[bytes]:
    """The events of a stream; a mistake after its beginning is an event too."""
    try:
        for chunk in reply.opening(wants_usage):
            yield event(chunk)
        async with contextlib.aclosing(job.deltas()) as news:  # type: ignore[type-var]
            async for delta in news:
                for chunk in reply.chunks(delta, wants_usage):
                    yield event(chunk)
        yield DONE
    except Stopped as error:
        yield event(error_body(str(error), 503))
    except Exception as error:
        yield event(error_body(f"{type(error).__name__}: {error}", 500))
    finally:
        job.leave()


async def _body(request: Request) -> bytes:
    """Raises BadRequest for one that is too large, or not called JSON, as a form of a foreign page would not be."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest(f"the content type is {kind!r}; application/json is wanted", None, 415)
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BODY:
            raise BadRequest(f"the body has more than {MOST_BODY >> 20} MiB", None, 413)
    return body


def _say(error: ConfigError) -> Response:
    if isinstance(error, BadRequest):
        return _error(str(error), error.status, error.param, error.code)
    return _error(str(error), 400)


def _error(message: str, status: int, param: str | None = None, code: str | None = None) -> Response:
    told = error_body(_plain(message), status, None if param is None else _plain(param), code)
    return JSONResponse(told, status_code=status)


def _plain(text: str) -> str:
    """Text that can be sent: a request may name fields that are none."""
    return text.encode("utf-8", "replace").decode()


async def _say_http(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.detail, error.status_code)
