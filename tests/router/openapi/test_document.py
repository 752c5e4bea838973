"""The description says what is so: every call has an answer, an example that works, its key."""

import jsonschema
import pytest

from baton.config.clients import ApiKeyConfig
from router.frontend.openapi import document
from tests.router.conftest import MODEL, events_of
from tests.router.emulated_worker import Script
from tests.router.page.chromium import CHROMIUM

CALLS = document.described()["calls"]
_NEED_FILES = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/batches"
EXAMPLES = [
    (name.split()[1], call)
    for name, call in CALLS.items()
    if "example" in call and name.split()[1] not in _NEED_FILES
]


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": Script(step_s=0.001)})


async def document_of(fleet) -> dict:
    return (await fleet.http.get("/openapi.json")).json()


def check(value, schema: dict, document: dict) -> None:
    whole = {**schema, "components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


async def test_every_call_is_described(fleet):
    document = await document_of(fleet)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            call = CALLS[f"{method} {path}"]
            assert operation["responses"]["default"]["content"], (method, path)
            answer = operation["responses"]["200"].get("content", {})
            if "answer" in call:
                schema = answer["application/json"]["schema"]
                assert schema["$ref"].endswith(f"/{call['answer']}")
            body = operation.get("requestBody", {}).get("content", {})
            if "application/json" in body:
                assert body["application/json"]["example"]
            assert operation["summary"]
            assert operation["description"]


async def test_every_reference_leads_somewhere(fleet):
    document = await document_of(fleet)
    names, open_ends = set(document["components"]["schemas"]), []

    def walk(node) -> None:
        if isinstance(node, dict):
            target = node.get("$ref")
            if isinstance(target, str) and target.rsplit("/", 1)[-1] not in names:
                open_ends.append(target)
            for item in node.values():
                walk(item)
        elif isinstance(node, list):
            for item in node:
                walk(item)

    walk(document)
    assert open_ends == []
    assert len(names) > 40


async def test_the_example_works_and_its_answer_is_as_described(fleet):
    document = await document_of(fleet)
    for path, call in EXAMPLES:
        operation = document["paths"][path]["post"]
        body = operation["requestBody"]["content"]["application/json"]["example"]
        assert body.get("model", MODEL) == MODEL
        answer = await fleet.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        content = operation["responses"]["200"]["content"]
        check(answer.json(), content["application/json"]["schema"], document)
        if "event" not in call:
            continue
        streamed = await fleet.http.post(path, json={**body, "stream": True})
        events = [event for event in events_of(streamed.text) if event != "[DONE]"]
        assert len(events) > 2
        # one of each kind: a schema of twenty alternatives takes long to try
        kinds = {event.get("type", index): event for index, event in enumerate(events)}
        for event in kinds.values():
            check(event, content["text/event-stream"]["schema"], document)


async def test_what_can_be_read_is_as_described(fleet):
    document = await document_of(fleet)
    for path in ("/v1/models", "/health/ready", "/health/live", "/version", "/load"):
        schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        check((await fleet.http.get(path)).json(), schema["schema"], document)
        with pytest.raises(jsonschema.ValidationError):
            check({"nothing": 1}, schema["schema"], document)


async def test_a_model_and_an_error_are_as_described(fleet):
    document = await document_of(fleet)
    operation = document["paths"]["/v1/models/{model_id}"]["get"]["responses"]
    known, unknown = [await fleet.http.get(f"/v1/models/{name}") for name in (MODEL, "other")]
    check(known.json(), operation["200"]["content"]["application/json"]["schema"], document)
    check(unknown.json(), operation["default"]["content"]["application/json"]["schema"], document)
    theirs = document["paths"]["/v1/messages"]["post"]["responses"]["default"]["content"]
    refused = await fleet.http.post("/v1/messages", json={"messages": []})
    assert refused.status_code == 400
    check(refused.json(), theirs["application/json"]["schema"], document)


async def test_an_error_of_each_api_is_as_described(fleet):
    document = await document_of(fleet)
    for path in ("/v1/messages", "/v1/responses", "/v1/chat/completions"):
        schema = document["paths"][path]["post"]["responses"]["default"]["content"]
        answer = await fleet.http.post(path, json={})
        assert answer.status_code == 400
        check(answer.json(), schema["application/json"]["schema"], document)


async def test_keys_are_described_as_they_are_asked_for(make_fleet):
    keys = {"key-of-ops": ApiKeyConfig(tenant="ops", role="operator")}
    with_keys = await make_fleet({"decode-0": None}, api_keys=keys)
    document = await document_of(with_keys)  # itself needs none
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert {} not in document["security"]
    for name, call in CALLS.items():
        method, path = name.split()
        if method != "get" or "{" in path or path not in document["paths"]:
            continue
        answer = await with_keys.http.get(path)  # a folder for files comes after the key
        is_open = document["paths"][path]["get"].get("security") == []
        assert is_open == call.get("open", False) == (answer.status_code != 401), path
    without = await document_of(await make_fleet({}))
    assert {} in without["security"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
async def test_the_page_shows_the_calls_and_asks_no_other_host(fleet, tab):
    await tab.go(f"{fleet.url}/docs")
    await tab.until("document.querySelectorAll('.opblock').length > 20")
    shown = await tab.js("document.querySelector('.swagger-ui').innerText")
    assert "/v1/chat/completions" in shown
    hosts = {url.split("/")[2] for url in tab.urls if url.startswith(("http", "ws"))}
    assert hosts == {fleet.url.removeprefix("http://")}


async def test_the_document_is_made_once(fleet, monkeypatch):
    """It was made anew for each call, and held the event loop for 90 ms: of any stranger, too."""
    whole, added = document._complete, []

    def complete(operation, *rest):
        added.append(operation)
        whole(operation, *rest)

    monkeypatch.setattr(document, "_complete", complete)
    first = await document_of(fleet)
    made_of = len(added)
    assert made_of > 20
    assert await document_of(fleet) == first
    assert len(added) == made_of
