"""Schemas and expressions of clients: no file, no socket, no freeze, a result or `unchecked`."""

import asyncio
import json
import os
import resource
import socket
import time
from functools import partial
from pathlib import Path

import pytest

from baton.config.logs import LogsConfig
from baton.telemetry.metrics import Metrics
from baton.text.answer_check import Match
from router.routing.checks.answers import AnswerChecks
from tests.house.imports import ROOT, modules
from tests.router.conftest import until
from tests.router.emulated_worker import Script
from tests.telemetry.values import value_of

# Places of a reference that a grammar compiler does not look at, with the pointer that leads there.
HIDDEN = {
    "x-q": lambda ref: {"x-q": ref, "not": {"$ref": "#/x-q"}},
    "default": lambda ref: {"default": ref, "not": {"$ref": "#/default"}},
    "const": lambda ref: {"const": ref, "not": {"$ref": "#/const"}},
    "enum": lambda ref: {"enum": [ref], "not": {"$ref": "#/enum/0"}},
    "examples": lambda ref: {"examples": [ref], "not": {"$ref": "#/examples/0"}},
    "dependencies": lambda ref: {"dependencies": {"a": ref}, "not": {"$ref": "#/dependencies/a"}},
    "then": lambda ref: {"then": ref, "not": {"$ref": "#/then"}},
    "base": lambda ref: {"$id": ref["$ref"], "not": {"$ref": "other"}},
    "anchor": lambda ref: {"$id": ref["$ref"], "not": {"$ref": "#nowhere"}},
    "dialect": lambda ref: {"$schema": ref["$ref"], "not": ref},
}
PATTERN = {
    "properties": {"a" * 40 + "!": {"const": 1}},
    "x-q": {"patternProperties": {"^(a+)+$": True}, "unevaluatedProperties": {"type": "string"}},
    "not": {"$ref": "#/x-q"},
}
ENUM = {
    "x-e": {"enum": [*range(20000), {"a": "x"}]},
    "x-all": {"allOf": [{"$ref": "#/x-e"}] * 2400},
    "not": {"$ref": "#/x-all"},
}
LEVELS = {f"L{i}": {"allOf": [{"$ref": f"#/$defs/L{i + 1}"}] * 2} for i in range(60)}
DEEP = {"not": {"$ref": "#/$defs/L0"}, "$defs": {**LEVELS, "L60": {"type": "integer"}}}
COSTLY = {
    "pattern": (PATTERN, {"a" * 40 + "!": 1}),
    "enum": (ENUM, {"a": "x"}),
    "levels": (DEEP, 1),
    "ever deeper": ({"not": {"properties": {"a": {"$ref": "#/not"}}}}, {"a": 1}),
}


@pytest.fixture
async def checks():
    made = AnswerChecks(Metrics("router", model="m"))
    yield made
    await made.close()


async def violated(checks: AnswerChecks, schema: dict, answer: object) -> dict[str, float]:
    before = dict(counts(checks))
    await checks._count_violations([(json.dumps(schema), json.dumps(answer))], "default")
    return {name: count - before.get(name, 0) for name, count in counts(checks).items()}


def counts(checks: AnswerChecks) -> dict[str, float]:
    names = ("unchecked", "uniqueItems", "not")
    of = partial(value_of, checks._metrics, "baton_schema_violations")
    return {name: of(keyword=name) for name in names}


def test_only_the_confined_process_compares_with_schemas() -> None:
    users = [
        str(path.relative_to(ROOT))
        for path in modules().values()
        if "jsonschema" in path.read_text()
    ]
    assert users == ["baton/text/answer_check.py"]


async def test_no_schema_opens_a_socket_or_a_file(checks, tmp_path: Path) -> None:
    fifo = tmp_path / "asked"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        for place, hide in HIDDEN.items():
            for target in (url, f"{url}#/a", fifo.as_uri(), "file:///dev/zero"):
                found = await violated(checks, hide({"$ref": target}), {"a": 1})
                assert found["unchecked"] or place == "dependencies", (place, target, found)
        problem = await checks.problem(Match("1", schema=json.dumps({"$ref": url})))
        with pytest.raises(BlockingIOError):
            listener.accept()
    os.close(reader)
    assert "reference" in problem


async def test_the_process_can_open_nothing_whatever_a_library_tries(checks) -> None:
    assert await checks.problem(Match("a", regex="a")) == ""
    pid = checks._process._process.pid
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (0, 0)


@pytest.mark.parametrize("name", COSTLY)
async def test_a_costly_schema_is_unchecked_and_the_next_is_checked(checks, name: str) -> None:
    schema, answer = COSTLY[name]
    assert (await violated(checks, schema, answer))["unchecked"] == (name != "ever deeper")
    assert await violated(checks, {"uniqueItems": True}, [1, 1]) == {
        "unchecked": 0,
        "uniqueItems": 1,
        "not": 0,
    }


async def test_a_check_that_ends_the_process_has_no_result(checks) -> None:
    assert await checks.problem(Match("a", regex="a")) == ""
    slow = asyncio.create_task(checks.problem(Match("a" * 40 + "!", regex="^(a+)+$")))
    await asyncio.sleep(0.1)
    checks._process._process.kill()
    assert "takes over" in await slow
    assert await checks.problem(Match("b", regex="a")) == "the text does not match 'a'"


async def test_a_slow_rule_leaves_the_text_out(checks) -> None:
    rules = {**LogsConfig().rules, "hard": "(a+)+$"}
    assert await checks.redacted(rules, ["a" * 40 + "!"], "t") is None
    assert await checks.redacted(rules, ["I am a@b.example", ""], "t") == ["I am [email]", ""]


@pytest.mark.parametrize("name", ["pattern", "enum"])
async def test_liveness_answers_during_a_check(make_fleet, model, name: str) -> None:
    schema, answer = COSTLY[name]
    script = Script(answer=model.tokenizer.encode(json.dumps(answer)), stop_token=2)
    fleet = await make_fleet({"decode-0": script})
    shape = {"type": "json_schema", "json_schema": {"name": "s", "strict": False, "schema": schema}}
    assert (await fleet.chat(response_format=shape, max_tokens=100)).status_code == 200
    longest_s = 0.0
    count = partial(value_of, fleet.router.metrics)
    until_s = time.monotonic() + 20
    while not count("baton_schema_violations", keyword="unchecked"):
        began_s = time.monotonic()
        assert began_s < until_s
        assert (await fleet.http.get("/health/live")).status_code == 200
        longest_s = max(longest_s, time.monotonic() - began_s)
        await asyncio.sleep(0.01)
    assert longest_s < 0.3, "the check alone takes 0.5 s"
    await until(lambda: fleet.lane.gateway.in_flight == 0)
