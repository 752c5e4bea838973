"""A line for every request that is over; texts only of tenants that asked, and redacted."""

import json
import logging

import pytest

from baton.config.clients import ApiKeyConfig
from baton.config.logs import LogsConfig
from baton.telemetry.logs import add_ids
from tests.router.conftest import until
from tests.router.emulated_worker import Script

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = f"00-{TRACE}-b7ad6b7169203331-01"
KEYS = {
    "key-that-is-told": ApiKeyConfig(tenant="told", log_text=True),
    "key-that-is-not": ApiKeyConfig(tenant="silent"),
}
TOLD, SILENT = ({"authorization": f"Bearer {key}"} for key in KEYS)
LOGS = LogsConfig(format="json", requests=True, max_text_chars=400)


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": Script(step_s=0)}, logs=LOGS, api_keys=KEYS)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="baton.requests")
    return lambda: [vars(r) for r in caplog.records if r.name == "baton.requests"]


async def test_a_request_has_one_line_with_its_ids_and_figures(fleet, lines, capture_ids):
    answer = await fleet.chat(headers={**SILENT, "traceparent": CLIENT})
    [line] = lines()
    assert (line["endpoint"], line["status"], line["tenant"]) == ("chat", 200, "silent")
    assert (line["end"], line["completion_tokens"]) == ("length", 4)
    assert line["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert 0 < line["first_token_s"] <= line["elapsed_s"]
    assert line["decode"] == "decode-0"
    assert capture_ids() == [(answer.headers["x-request-id"], TRACE)]


async def test_lines_of_a_call_have_the_id_that_its_client_gave_it(fleet, caplog):
    caplog.handler.addFilter(add_ids)
    caplog.set_level(logging.INFO, logger="baton.requests")
    named = {**SILENT, "x-request-id": "order-66"}
    await fleet.chat(headers=named)
    await fleet.chat(headers=named, n=0)
    await fleet.chat(headers=SILENT)
    told = [vars(record) for record in caplog.records if record.name == "baton.requests"]
    ids = [line.get("client_request_id") for line in told]
    assert ids == ["order-66", "order-66", None]


async def test_texts_are_only_of_those_who_asked_and_redacted(fleet, lines):
    text = "Write to ada@lovelace.example about the engine."
    for headers in (SILENT, TOLD):
        await fleet.chat(text, headers=headers)
    await until(lambda: len(lines()) == 2)  # texts are redacted in another process
    silent, told = lines()
    assert "prompt" not in silent and "answers" not in silent
    assert "lovelace" not in json.dumps(silent, default=str)
    assert "Write to [email] about the engine." in told["prompt"]
    assert len(told["answers"]) == 1 and told["answers"][0]
    assert "lovelace" not in json.dumps(told, default=str)


async def test_a_secret_at_the_border_of_the_redacted_part_is_not_logged(fleet, lines):
    """Redaction shortens the text, so that the end of the part would be logged."""
    for begin in range(0, 21, 2):
        await fleet.chat("x" * begin + " ada@lovelace.example" * 100, headers=TOLD)
    await until(lambda: len(lines()) == 11)
    for line in lines():
        assert "[email]" in line["prompt"] and line["prompt"].endswith("…")
        assert "ada" not in line["prompt"]


async def test_a_long_text_is_cut(fleet, lines):
    await fleet.chat("word " * 500, headers=TOLD)
    await until(lines)
    [line] = lines()
    assert len(line["prompt"]) == LOGS.max_text_chars + 1 and line["prompt"].endswith("…")


async def test_refusals_and_errors_have_a_line_too(make_fleet, lines):
    fleet = await make_fleet({"decode-0": Script(step_s=1)}, logs=LOGS, api_keys=KEYS)
    late = await fleet.chat(headers={**SILENT, "x-baton-timeout-ms": "100"})
    nonsense = await fleet.chat(headers=SILENT, temperature=-1)
    await fleet.workers["decode-0"].stop()
    await until(lambda: fleet.state("decode-0") != "ready")
    alone = await fleet.chat(headers=SILENT)
    answers = (late, nonsense, alone)
    assert [line["status"] for line in lines()] == [504, 400, 503]
    assert [line["error"] for line in lines()] == [a.json()["error"]["code"] for a in answers]


async def test_without_being_asked_for_there_is_none(make_fleet, lines):
    fleet = await make_fleet({"decode-0": Script(step_s=0)})
    assert (await fleet.chat()).status_code == 200
    assert lines() == []


@pytest.fixture
def capture_ids(caplog):
    """The ids as a handler of the product would have them."""
    from baton.telemetry import logs

    caught = []

    class Handler(logging.Handler):
        def emit(self, record):
            caught.append((record.request_id, record.trace_id))

    handler = Handler()
    handler.addFilter(logs.add_ids)
    logger = logging.getLogger("baton.requests")
    logger.addHandler(handler)
    yield lambda: caught
    logger.removeHandler(handler)
