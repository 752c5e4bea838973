"""Recorded answers of a running router: the calls of `tests/conformance/cases.py`, over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from baton.config.fleet_file import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from router.served_model import ServedModel
from tests.clients.server import KEY, MODEL, serving
from tests.router.conftest import until
from tests.router.emulated_worker import EmulatedWorker, Script

DONE = "[DONE]"
# A model is known to think by the tags in its template.
_TEMPLATE = (
    "{# <think></think> #}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)
_MOST_BODY_BYTES = 20_000
_SLOT_REQUESTS = 4


class Event(NamedTuple):
    """Event of a stream, or a whole body, which has no name."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer to one call; ``call`` is its path in the specification."""

    case: str
    call: str
    status: int
    content_type: str
    events: tuple[Event, ...]

    @property
    def is_stream(self) -> bool:
        """Return whether the answer is a stream of events."""
        return self.content_type == "text/event-stream"

    @property
    def body(self) -> Any:
        """The whole body."""
        (event,) = self.events
        return event.value


class BreakingWorker(EmulatedWorker):
    """Worker whose running requests can fail."""

    def break_off(self) -> None:
        """Let all running requests fail."""
        for job in self.jobs.values():
            if job.task is not None and not job.task.done():
                job.task.cancel()
                self._end(job.submission, ("internal", "it broke", False))


class Recorder:
    """Client of a router with one worker, which returns scripted texts."""

    def __init__(self, http: httpx.AsyncClient, worker: BreakingWorker, model: ServedModel) -> None:
        self.answers: list[Answer] = []
        self.http = http
        self._worker = worker
        self._model = model

    def write(self, text: str, **script: Any) -> None:
        """Make the worker write ``text`` from now on."""
        ids = self._model.tokenizer.encode(text, add_special_tokens=False)
        end = self._model.artifact.config.eos_token_ids[0]
        fields = {"answer": ids, "stop_token": end, "step_s": 0.0005, **script}
        self._worker.script = Script(**fields)

    async def record(self, case: str, call: str, path: str = "", **request: Any) -> Answer:
        """Send a request and record its answer; ``path`` is that of the call by default."""
        method, _, template = call.partition(" ")
        response = await self.http.request(method, path or template, **request)
        return self.keep(case, call, response)

    def keep(self, case: str, call: str, response: httpx.Response) -> Answer:
        """Record an answer that has been received."""
        content_type = response.headers.get("content-type", "").partition(";")[0]
        stream = content_type == "text/event-stream"
        events = _events_of(response.text) if stream else [Event("", response.json())]
        answer = Answer(
            case=case,
            call=call,
            status=response.status_code,
            content_type=content_type,
            events=tuple(events),
        )
        self.answers.append(answer)
        return answer

    async def interrupt(
        self, case: str, call: str, body: dict[str, Any], act: Callable[[Any], Awaitable[object]]
    ) -> None:
        """Record a stream during which ``act`` is called with the first event."""
        lines: list[str] = []
        async with self.http.stream("POST", call.partition(" ")[2], json=body) as response:
            incoming = response.aiter_lines()
            while not (lines and lines[-1].startswith("data: ")):
                lines.append(await anext(incoming))
            await act(json.loads(lines[-1].removeprefix("data: ")))
            lines += [line async for line in incoming]
        headers = {"content-type": response.headers["content-type"]}
        text = "\n".join(lines)
        self.keep(case, call, httpx.Response(response.status_code, headers=headers, text=text))

    async def break_off(self, _: object) -> None:
        """Let all requests at the worker fail."""
        self._worker.break_off()

    async def until_idle(self) -> None:
        """Wait until the worker runs nothing."""
        jobs = self._worker.jobs.values()
        await until(lambda: all(job.task is None or job.task.done() for job in jobs))

    async def fill(self) -> list[asyncio.Task[httpx.Response]]:
        """Fill the worker and the queue with requests, which run until they are cancelled."""
        self.write("one " * 400, step_s=0.1)
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 400}

        def begin() -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(self.http.post("/v1/completions", json=body))

        before = len(self._worker.submissions)
        calls = [begin() for _ in range(_SLOT_REQUESTS)]
        await until(lambda: len(self._worker.submissions) >= before + _SLOT_REQUESTS)
        while True:
            calls.append(begin())
            done, _ = await asyncio.wait(calls[-1:], timeout=0.5)
            if done:
                assert calls.pop().result().status_code == 429
                return calls


async def recording() -> AsyncIterator[Recorder]:
    """Yield the recorder of a new router, and end both."""
    model = ServedModel(resolve_model(DEFAULT_MODEL), (MODEL,), chat_template=_TEMPLATE)
    worker = BreakingWorker("decode-0", "decode", Script())
    limits = {
        "max_body_bytes": _MOST_BODY_BYTES,
        "window_requests": _SLOT_REQUESTS,
        "max_queued_requests": 1,
    }
    async with serving(model, worker, **limits) as url:
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=20) as http:
            yield Recorder(http, worker, model)


def _events_of(text: str) -> list[Event]:
    events = []
    for block in text.strip().split("\n\n"):
        name = data = ""
        for line in block.split("\n"):
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = line.removeprefix("data: ")
        if data:
            events.append(Event(name, data if data == DONE else json.loads(data)))
    return events
