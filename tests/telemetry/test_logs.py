"""Lines of a log: two layouts, the ids of request and trace, and what is redacted."""

import asyncio
import io
import json
import logging
import time
from collections.abc import Iterator

import pytest

from baton.config.logs import DEFAULT_REDACT, LogsConfig
from baton.telemetry.logs import LogFormat, request_context, set_up_logs, trace_id_of
from baton.text.answer_check import Redaction, answered

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
LOG = logging.getLogger("baton.test")


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(layout: LogFormat, before: str = "", **fields: str) -> io.StringIO:
    stream = io.StringIO()
    set_up_logs(layout, stream, before=before, fields=fields)
    return stream


def test_a_line_of_text_ends_with_the_ids() -> None:
    stream = written("text", before="77 ")
    LOG.info("outside")
    with request_context("req-1", TRACEPARENT):
        LOG.warning("inside %d", 5)
    outside, inside = stream.getvalue().splitlines()
    assert outside.endswith(" 77 INFO baton.test: outside")
    assert inside.endswith(f" 77 WARNING baton.test: inside 5 [request=req-1 trace={TRACE}]")


def test_a_line_of_json_is_one_object_whatever_happened() -> None:
    stream = written("json", fleet="f", worker="worker-3")
    with request_context("req-1", TRACEPARENT):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            LOG.exception("it\nfailed", extra={"tenant": "search"})
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"]) == ("ERROR", "baton.test")
    assert (found["message"], found["tenant"]) == ("it\nfailed", "search")
    assert (found["request_id"], found["trace_id"]) == ("req-1", TRACE)
    assert (found["fleet"], found["worker"]) == ("f", "worker-3")
    assert found["exc_info"].endswith("ValueError: two\nlines")
    assert found["time"].endswith("+00:00")


def test_no_text_of_others_forges_a_line_or_steers_a_terminal() -> None:
    stream = io.StringIO()
    set_up_logs("text", stream)
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        logging.getLogger("x").exception("name=%s", "a\n2026 ERROR router: forged\x1b[31m\u202e")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith(r"name=a\n2026 ERROR router: forged\x1b[31m\u202e")
    assert rest[-1] == r"ValueError: \x1b[2J"


async def test_tasks_that_begin_in_a_request_belong_to_it() -> None:
    stream = written("json")

    async def work() -> None:
        await asyncio.sleep(0)
        LOG.info("work")

    async with asyncio.TaskGroup() as tasks:
        for name in ("a", "b"):
            with request_context(name, ""):
                tasks.create_task(work())
        tasks.create_task(work())
    ids = [json.loads(line).get("request_id") for line in stream.getvalue().splitlines()]
    assert ids == ["a", "b", None]


@pytest.mark.parametrize(
    "nonsense", ["", "00", "00-xyz-1-01", f"00-{'0' * 32}-1-01", f"00-{TRACE.upper()}-1-01"]
)
def test_nonsense_is_no_trace(nonsense: str) -> None:
    assert trace_id_of(nonsense) == ""
    assert trace_id_of(TRACEPARENT) == TRACE


def test_what_rules_match_is_redacted() -> None:
    text = "I am Ada, ada@lovelace.example, card 4111 1111 1111 1111, key sk-abcdefghijkl0123"
    assert redacted(text, name="Ada|Grace") == "I am [name], [email], card [card], key [secret]"


def test_a_default_rule_can_be_taken_away() -> None:
    assert set(LogsConfig(redact={"email": ""}).rules) == set(DEFAULT_REDACT) - {"email"}
    assert redacted("a@b.example", email="") == "a@b.example"


@pytest.mark.parametrize(
    "text", ["-" * 50_000, "8" * 50_000, "a." * 25_000, "@a." * 16_000, "sk-" * 16_000]
)
def test_the_default_rules_take_time_in_proportion_to_the_text(text: str) -> None:
    began_s = time.thread_time()
    assert redacted(text)
    assert time.thread_time() - began_s < 1, "quadratic rules take a minute"


def redacted(text: str, **rules: str) -> str:
    [shown] = answered(Redaction(dict(LogsConfig(redact=rules).rules), [text])).texts
    return shown


@pytest.mark.parametrize(("rule", "why"), [("(", "not a regular expression"), ("x*", "everywhere")])
def test_rules_that_cannot_work_are_refused(rule: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        LogsConfig(redact={"bad": rule})
