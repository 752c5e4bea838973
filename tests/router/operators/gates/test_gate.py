"""Gate machine, golden answers, and files of golden prompts."""

import pytest

from baton.config.golden_file import GoldenFileError, read_golden
from baton.types.gates import Evidence, GoldenPrompt, GoldenRound, Tally
from baton.types.routes import NameRoute, RouteTable
from baton.types.versioned import TableChangeError
from router.frontend.operators.gates.golden import GoldenAnswer, difference
from router.lanes.gate import EVERY_NS, Gate, GateBook, Outcome
from router.lanes.routes import route, thrown_out, with_alias, with_canary

CANARY = NameRoute(target="v1", canary="v2", share=0.1, since_ms=7)


def gate() -> Gate:
    return Gate("chat", CANARY)


def answer(*tokens: int, text: str = "", prompt: tuple[int, ...] = (1,)) -> GoldenAnswer:
    return GoldenAnswer(prompt, tokens, text)


def test_the_first_wrong_golden_answer_decides() -> None:
    machine = gate()
    assert machine.on_round(GoldenRound(at_ms=1, right=3)) == ""
    reason = machine.on_round(GoldenRound(at_ms=2, wrong={"capital": "token 0 is 5 instead of 4"}))
    assert reason == "golden prompt 'capital': token 0 is 5 instead of 4"
    assert machine.judge(Evidence()) == reason


def test_a_reason_fits_a_header() -> None:
    wrong = {"é": "the text does not match 'a\nb\x00ü'" + "x" * 500}
    reason = gate().on_round(GoldenRound(at_ms=1, wrong=wrong))
    assert reason.isascii()
    assert reason.isprintable()
    assert len(reason) == 200


def test_golden_prompts_without_an_answer_decide_after_three_rounds_in_a_row() -> None:
    machine = gate()
    failed = GoldenRound(at_ms=1, failed={"a": "timeout"})
    assert [machine.on_round(failed) for _ in range(2)] == ["", ""]
    assert machine.on_round(GoldenRound(at_ms=1, right=1)) == ""
    found = [machine.on_round(failed) for _ in range(3)]
    assert found == ["", "", "golden prompt 'a' has no answer: timeout"]


def test_golden_prompts_run_every_20_requests_and_every_5_seconds() -> None:
    machine = gate()
    assert machine.round_due(0)
    assert not machine.round_due(EVERY_NS - 1)
    machine.judge(Evidence(canary=Tally(requests=19)))
    assert not machine.round_due(EVERY_NS - 1)
    machine.judge(Evidence(canary=Tally(requests=20)))
    assert machine.round_due(EVERY_NS - 1)
    assert not machine.round_due(EVERY_NS)
    assert machine.round_due(2 * EVERY_NS - 1)


def test_evidence_is_the_same_until_redis_confirms_it() -> None:
    machine = gate()
    machine.ended("v2", Outcome(failed=True))
    machine.ended("v1", Outcome(failed=False, ttft_s=0.1, itl_s=0.01))
    machine.ended("fallback", Outcome(failed=True))
    number, taken = machine.take()
    assert (number, taken.canary.requests, taken.canary.errors) == (1, 1, 1)
    assert (taken.stable.requests, taken.stable.errors) == (1, 0)
    assert sum(taken.stable.ttft.values()) == sum(taken.stable.itl.values()) == 1
    machine.ended("v2", Outcome(failed=False))
    assert machine.take() == (1, taken)
    machine.confirmed()
    number, later = machine.take()
    assert (number, later.canary.requests, later.canary.errors) == (2, 1, 0)
    machine.confirmed()
    assert machine.take() == (3, Evidence())


def test_a_router_alone_judges_by_the_last_sums_and_its_own_requests() -> None:
    machine = gate()
    machine.judge(Evidence(canary=Tally(requests=2, errors=2)))
    for _ in range(3):
        machine.ended("v2", Outcome(failed=True))
    machine.take()
    assert machine.judge_alone() == ""
    machine.ended("v2", Outcome(failed=True))
    reason = "6 of 6 requests failed, with the stable model 0 of 0"
    assert machine.judge_alone() == reason
    assert machine.totals.canary.requests == 2


def test_a_new_canary_of_a_name_has_a_new_gate_and_a_larger_share_keeps_it() -> None:
    book = GateBook()
    table = with_canary(RouteTable(), "chat", "v2", 0.1, now_ms=5)
    book.follow(table)
    [first] = book
    book.follow(with_canary(table, "chat", "v2", 0.5, now_ms=9))
    assert book.get("chat") is first
    assert first.entry.share == 0.5
    book.follow(with_canary(RouteTable(), "chat", "v2", 0.1, now_ms=6))
    assert book.get("chat") is not first
    book.follow(RouteTable())
    assert list(book) == []


def test_a_canary_that_was_thrown_out_leaves_its_reason_until_the_next_change() -> None:
    table = with_canary(RouteTable(), "chat", "v2", 1.0, now_ms=5)
    entry = table.names["chat"]
    out = thrown_out(table, "chat", entry, "golden prompt 'a': wrong")
    found = route(out, "chat", "t", str, lambda _: True)
    assert (found.model, found.why) == ("chat", "rollback: golden prompt 'a': wrong")
    assert out.names["chat"].thrown_out == "v2"
    with pytest.raises(TableChangeError, match="no longer the canary"):
        thrown_out(out, "chat", entry, "again")
    newer = with_canary(RouteTable(), "chat", "v2", 1.0, now_ms=6)
    with pytest.raises(TableChangeError, match="no longer the canary"):
        thrown_out(newer, "chat", entry, "of another rollout")
    again = with_canary(out, "chat", "v2", 0.5, now_ms=8)
    assert not again.names["chat"].thrown_out
    assert again.names["chat"].since_ms == 8
    assert route(with_alias(out, "chat", "v1"), "chat", "t", str, lambda _: True).why == "alias"


@pytest.mark.parametrize(
    ("expected", "given", "problem"),
    [
        ({"tokens": (4, 5)}, answer(4, 5), ""),
        ({"tokens": (4, 5)}, answer(4, 6), "token 1 is 6 instead of 5"),
        ({"tokens": (4, 5)}, answer(4), "the answer has 1 tokens instead of 2"),
        ({"same_as": "v1"}, answer(4), ""),
        ({"same_as": "v1"}, answer(5), "token 0 is 5 instead of 4"),
        ({"same_as": "v1"}, answer(4, prompt=(2,)), "the prompt has other tokens than for v1"),
    ],
)
def test_answers_are_compared(expected, given, problem: str) -> None:
    golden = GoldenPrompt(name="a", prompt="b", **expected)
    found = difference(golden, given, answer(4) if golden.same_as else None)
    assert problem in found
    assert bool(problem) == bool(found)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"name": "a", "prompt": "b"}', "needs one of tokens, regex, schema and same_as"),
        ('{"name": "a", "tokens": [1]}', "needs either prompt or messages"),
        ('{"name": "a", "messages": [{}], "regex": "b"}', "needs role and content"),
        ('{"name": "a", "prompt": "b", "regex": "("}', "regex '('"),
        ('{"name": "a", "prompt": "b", "token": [1]}', "unknown field `token`"),
        ('{"name": "", "prompt": "b", "tokens": [1]}', "1 to 80 printable characters"),
        ('{"name": "a", "prompt": "b", "tokens": [1], "max_tokens": 0}', "from 1 to 1024"),
        ("nonsense", "golden.jsonl:2"),
        ('{"name": "ok", "prompt": "b", "tokens": [1]}', "the name 'ok' is used twice"),
    ],
)
def test_errors_of_a_file_name_the_line(tmp_path, line: str, problem: str) -> None:
    file = tmp_path / "golden.jsonl"
    file.write_text('{"name": "ok", "prompt": "b", "tokens": [1]}\n' + line + "\n")
    with pytest.raises(GoldenFileError, match=r"golden.jsonl:2") as error:
        read_golden(file)
    assert problem in str(error.value)


def test_a_file_has_prompts(tmp_path) -> None:
    file = tmp_path / "golden.jsonl"
    file.write_text('\n{"name": "a", "messages": [{"role": "user", "content": "b"}], "regex": "c"}')
    [found] = read_golden(file)
    assert found.messages[0]["content"] == "b"
    file.write_text("\n")
    with pytest.raises(GoldenFileError, match="has 0 prompts"):
        read_golden(file)
    with pytest.raises(GoldenFileError, match="cannot read golden prompts"):
        read_golden(tmp_path / "none")
