"""The conversation with the router whose answers are judged."""

import asyncio
import json
from typing import Any

import httpx

from tests.clients.server import MODEL
from tests.conformance.answers import Answer, Recorder
from tests.conformance.cases import (
    BASE,
    BATCH,
    BATCHES,
    CANCEL,
    CASES,
    CHAT,
    EMBEDDINGS,
    FILE,
    FILES,
    HI,
    ITEMS,
    RESPONSE,
    RESPONSES,
    SENTENCE,
    TOOLS,
    WEATHER_CALL,
    WHOLE,
)

_LINE = {"method": "POST", "url": "/v1/chat/completions"}  # of a batch
_ENDED = ("completed", "failed", "expired", "cancelled")


async def play(recorder: Recorder) -> None:
    """Send every call."""
    await _forms(recorder)
    await _whole(recorder)
    await _models(recorder)
    await _stored(recorder)
    await _cancelled(recorder)
    await _files(recorder)
    await _refused(recorder)
    await _failed(recorder)


async def _forms(recorder: Recorder) -> None:
    for call, cases in CASES.items():
        for case in cases:
            recorder.write(case.writes)
            body = {"model": MODEL, **BASE[call], **case.body}
            streamed = {**body, "stream": True}
            await recorder.record(f"{case.name}, streamed", call, json=streamed)
            body.pop("stream_options", None)
            await recorder.record(case.name, call, json=body)


async def _whole(recorder: Recorder) -> None:
    for call, body in WHOLE.items():
        await recorder.record("whole", call, json={"model": MODEL, **body})
    packed = {"model": MODEL, "input": "hi", "encoding_format": "base64"}
    await recorder.record("base64", EMBEDDINGS, json=packed)


async def _models(recorder: Recorder) -> None:
    await recorder.record("list", "GET /v1/models")
    await recorder.record("one", "GET /v1/models/{model}", f"/v1/models/{MODEL}")
    await recorder.record("unknown", "GET /v1/models/{model}", "/v1/models/other")


async def _stored(recorder: Recorder) -> None:
    """A call, its result, and both responses as they are stored."""
    recorder.write(f"<think>Hm</think>So: {WEATHER_CALL}")
    body = {"model": MODEL, **TOOLS, "input": [{"role": "user", "content": "hi"}]}
    first = (await recorder.record("first turn", RESPONSES, json=body)).body
    items = first["output"]
    result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "18 C"}
    recorder.write("18 degrees")
    more = {"model": MODEL, **TOOLS, "input": [*body["input"], *items, result]}
    second = (await recorder.record("second turn", RESPONSES, json=more)).body
    next_turn = {"model": MODEL, "input": "more", "previous_response_id": second["id"]}
    await recorder.record("third turn", RESPONSES, json=next_turn)
    for response in (first, second):
        path = f"/v1/responses/{response['id']}"
        await recorder.record("stored", RESPONSE, path)
        await recorder.record("stored", ITEMS, f"{path}/input_items")
    path = f"/v1/responses/{second['id']}"
    await recorder.record("one item", ITEMS, f"{path}/input_items?limit=1")
    await recorder.record("an ended one", CANCEL, f"{path}/cancel")
    gone = await recorder.http.delete(path)
    assert gone.status_code == 200
    for call, end in ((RESPONSE, ""), (ITEMS, "/input_items"), (CANCEL, "/cancel")):
        await recorder.record("deleted", call, f"{path}{end}")


async def _cancelled(recorder: Recorder) -> None:
    recorder.write("one " * 400, step_s=0.1)
    body = {"model": MODEL, "input": "hi", "stream": True}

    async def cancel(created: dict[str, Any]) -> None:
        path = f"/v1/responses/{created['response']['id']}"
        await recorder.record("running", RESPONSE, path)
        await recorder.record("running", CANCEL, f"{path}/cancel")

    await recorder.interrupt("cancelled, streamed", RESPONSES, body, cancel)


async def _files(recorder: Recorder) -> None:
    recorder.write(SENTENCE)
    await _upload(recorder, b"", {"purpose": "unknown"})
    good = {"model": MODEL, "messages": HI, "max_tokens": 4}
    lines = [{**_LINE, "custom_id": "a", "body": good}, {**_LINE, "custom_id": "b", "body": {}}]
    text = "\n".join(map(json.dumps, lines))
    file = (await _upload(recorder, text.encode(), {})).body
    expiring = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    unused = (await _upload(recorder, b"x", expiring)).body
    await recorder.record("one", FILE, f"/v1/files/{file['id']}")
    request = {"input_file_id": file["id"], "endpoint": _LINE["url"]}
    request["completion_window"] = "24h"
    await _batch(recorder, "completed", {**request, "metadata": {"a": "b"}})
    other = {**request, "endpoint": "/v1/embeddings"}
    await _batch(recorder, "of the other endpoint", other)
    await recorder.record("unknown file", BATCHES, json={**request, "input_file_id": "file-0"})
    await recorder.record("unknown", BATCH, "/v1/batches/batch_0")
    cancel = "POST /v1/batches/{batch_id}/cancel"
    recorder.write("one " * 400, step_s=0.1)
    begun = (await recorder.record("begun", BATCHES, json=request)).body
    await recorder.record("begun", cancel, f"/v1/batches/{begun['id']}/cancel")
    await recorder.record("list", "GET /v1/batches")
    await recorder.record("list", "GET /v1/files")
    await recorder.record("page", "GET /v1/files", "/v1/files?limit=1")
    delete = "DELETE /v1/files/{file_id}"
    await recorder.record("in use", delete, f"/v1/files/{file['id']}")
    await recorder.record("one", delete, f"/v1/files/{unused['id']}")
    await recorder.record("deleted", delete, f"/v1/files/{unused['id']}")
    await recorder.record("deleted", FILE, f"/v1/files/{unused['id']}")


async def _upload(recorder: Recorder, content: bytes, form: dict[str, str]) -> Answer:
    files = {"file": ("in.jsonl", content)}
    data = {"purpose": "batch", **form}
    return await recorder.record("upload", FILES, files=files, data=data)


async def _batch(recorder: Recorder, case: str, request: dict[str, Any]) -> None:
    name = (await recorder.record(case, BATCHES, json=request)).body["id"]
    while (await recorder.http.get(f"/v1/batches/{name}")).json()["status"] not in _ENDED:
        await asyncio.sleep(0.02)
    ended = (await recorder.record(case, BATCH, f"/v1/batches/{name}")).body
    for file in (ended["output_file_id"], ended["error_file_id"]):
        if file is not None and request["endpoint"] == _LINE["url"]:
            content = await recorder.http.get(f"/v1/files/{file}/content")
            for line in map(json.loads, content.text.splitlines()):
                answer = line["response"]
                told = httpx.Response(answer["status_code"], json=answer["body"])
                recorder.keep(f"{case}, line {line['custom_id']}", CHAT, told)


async def _refused(recorder: Recorder) -> None:
    """Send requests that are rejected, with each status."""
    bases = {**BASE, **WHOLE}
    for call, base in bases.items():
        body = {"model": MODEL, **base}
        await recorder.record("400", call, json={**body, "model": 5})
        await recorder.record("400, no JSON", call, content=b"{")
        await recorder.record("404", call, json={**body, "model": "other"})
        await recorder.record("413", call, json={**body, "user": "x" * 30_000})
        headers = {"authorization": "Bearer wrong"}
        await recorder.record("401", call, json=body, headers=headers)
        await recorder.record("405", call.replace("POST", "PUT"), json=body)
    filling = await recorder.fill()
    for call, base in bases.items():
        await recorder.record("429", call, json={"model": MODEL, **base})
    for request in filling:
        request.cancel()
    await asyncio.gather(*filling, return_exceptions=True)
    await recorder.until_idle()


async def _failed(recorder: Recorder) -> None:
    """Send requests that fail, before and after the first token."""
    recorder.write("one " * 400, step_s=0.1)
    for call, base in BASE.items():
        body = {"model": MODEL, **base, "stream": True}
        await recorder.interrupt("broken, streamed", call, body, recorder.break_off)
    for code, case in (("internal", "500"), ("unavailable", "503")):
        recorder.write("", fail=(code, "it broke", False))
        for call in (*BASE, EMBEDDINGS):
            body = {"model": MODEL, **({**BASE, **WHOLE}[call])}
            await recorder.record(case, call, json=body)
