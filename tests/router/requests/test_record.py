"""The record of a request: each token once, whatever the frames do; one end."""

import struct
from dataclasses import replace

import pytest
from batonpb.decode_pb2 import RequestRoute, TokenRun
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.text.reasoning import ReasoningSyntax, ReasoningTags, Thinking
from baton.text.tools import PROMPTED
from baton.types.errors import DeadlineError, InternalError
from baton.types.params import SamplingParams
from baton.wire.tokens import pack_tokens, unpack_tokens
from router.request import GenerationRequest, Shown
from router.routing.requests.record import RequestRecord
from router.routing.requests.recovery_policy import after_prefill_failure, after_worker_death
from tests.soak import examples


def request(n: int = 1, stops=(), mode="auto", **sampling) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        prompt=(1, 2, 3),
        sampling=SamplingParams(max_tokens=100, n=n, **sampling),
        shown=Shown(stops=tuple(stops)),
        mode=mode,
        arrived_ns=1,
        deadline_ns=10**12,
    )


def run(index: int, ids, choice: int = 0, reason: str = "", attempt: int = 1, **more) -> TokenRun:
    return TokenRun(
        request_id="r",
        attempt=attempt,
        choice=choice,
        index=index,
        token_ids=struct.pack(f"<{len(ids)}I", *ids),
        finish_reason=reason,
        **more,
    )


@pytest.fixture
def record(model) -> RequestRecord:
    made = RequestRecord(request(), model.tokenizer)
    made.next_attempt()
    return made


def shown(record: RequestRecord, choice: int = 0) -> str:
    return "".join(delta.text for delta in record.take() if delta.choice == choice)


IDS = list(range(1000, 1030))


@settings(max_examples=examples(100), deadline=None)
@given(
    ids=st.lists(st.integers(0, 49_000), min_size=3, max_size=30),  # halves of characters, too
    sizes=st.lists(st.sampled_from((1, 1, 1, 2, 3)), min_size=30, max_size=30),
    again=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_the_short_way_of_plain_answers_gives_what_the_long_way_gives(model, ids, sizes, again):
    quick, slow = (RequestRecord(request(), model.tokenizer) for _ in range(2))
    slow.choices[0].plain = False
    for record in (quick, slow):
        record.next_attempt()
    slow_ways, at = [], 0
    for size, repeated in zip(sizes, again, strict=True):
        some = ids[at : at + size]
        if not some:
            break
        last = at + size >= len(ids)
        for _ in range(1 + repeated):
            part = run(at, some, reason="length" if last else "")
            results = [record.on_run(part, at + 1) for record in (quick, slow)]
            assert results[0] == results[1]
        slow_ways.append(not quick.is_plain)
        assert "".join(quick.take_texts()) + shown(quick) == shown(slow)
        at += size
    first, second = quick.choices[0], slow.choices[0]
    for name in ("token_ids", "next_index", "completion_tokens", "finish_reason"):
        assert getattr(first, name) == getattr(second, name)
    assert quick.second_token_ns == slow.second_token_ns
    assert quick.last_token_ns == slow.last_token_ns
    assert slow_ways.count(True) <= 1  # the end


@given(
    ids=st.lists(st.integers(0, 49_000), min_size=3, max_size=16),
    taken=st.lists(st.booleans(), min_size=16, max_size=16),
)
def test_a_plain_answer_has_the_same_pieces_whenever_they_are_taken(model, ids, taken):
    at_once, now_and_then, joined = (RequestRecord(request(), model.tokenizer) for _ in range(3))
    pieces = {}
    for record in (at_once, now_and_then, joined):
        record.next_attempt()
        pieces[record] = []
    for at, token in enumerate(ids):
        part = run(at, [token], reason="length" if at + 1 == len(ids) else "")
        for record, takes in ((at_once, True), (now_and_then, taken[at] or at + 1 == len(ids))):
            record.on_run(part, at + 1)
            if takes:
                pieces[record] += record.take_texts()
                pieces[record] += [(delta.text, delta.finish_reason) for delta in record.take()]
    joined.on_run(run(0, ids[:1]), 1)
    joined.on_run(run(1, ids[1:-1]), 2)
    joined.on_run(run(len(ids) - 1, ids[-1:], reason="length"), 3)
    pieces[joined] = joined.take_texts()
    pieces[joined] += [(delta.text, delta.finish_reason) for delta in joined.take()]
    assert pieces[now_and_then] == pieces[joined] == pieces[at_once]


def test_a_client_that_is_far_behind_gets_one_piece(model):
    record = RequestRecord(request(), model.tokenizer)
    record.next_attempt()
    for at in range(1000):
        record.on_run(run(at, [IDS[at % len(IDS)]]), at + 1)
    assert len(record.take_texts()) <= 17


@pytest.mark.parametrize(
    "asked",
    [
        request(stops=["x"]),
        request(logprobs=0),
        request(n=2),
        replace(request(), expected_calls=PROMPTED.expected(())),
    ],
    ids=["stop", "logprobs", "choices", "tools"],
)
def test_only_answers_of_text_alone_have_a_short_way(model, asked):
    record = RequestRecord(asked, model.tokenizer)
    record.next_attempt()
    record.on_run(run(0, IDS[:1]), 1)
    assert not record.is_plain
    assert record.take_texts() == []


@settings(max_examples=examples(200), deadline=None)
@given(
    cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    repeats=st.lists(st.integers(0, 6), min_size=30, max_size=30),
    losses=st.lists(st.booleans(), min_size=30, max_size=30),
    takes=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_lost_and_repeated_runs_give_each_token_once(model, cuts, repeats, losses, takes):
    record = RequestRecord(request(), model.tokenizer)
    record.next_attempt()
    text, sent = "", 0
    for cut, repeat, lost, take in zip(cuts, repeats, losses, takes, strict=True):
        begin = max(sent - repeat, 0)
        ids = IDS[begin : sent + cut]
        sent = begin + len(ids)
        reason = "length" if sent == len(IDS) else ""
        if lost:
            sent = record.next_indices[0]  # the worker starts again where the resume asks
            continue
        result = record.on_run(run(begin, ids, reason=reason), 5)
        if result.gap:
            sent = record.next_indices[0]
        if take:
            text += shown(record)
        if record.ended:
            break
    if not record.ended:
        begin = record.next_indices[0]
        record.on_run(run(begin, IDS[begin:], reason="length"), 9)
    assert record.ended
    assert record.choices[0].token_ids == IDS
    assert record.completion_tokens == len(IDS)
    assert text + shown(record) == model.tokenizer.decode(IDS)


def test_a_hole_is_reported_and_nothing_taken(record):
    assert record.on_run(run(2, [1000]), 5).gap
    assert record.next_indices == [0]
    assert not record.begun


def test_frames_of_another_attempt_are_dropped(record):
    record.next_attempt()
    assert record.on_run(run(0, [1000], attempt=1), 5).fresh_tokens == 0
    record.on_route(RequestRoute(request_id="r", attempt=1, cached_tokens=9), 5)
    assert record.cached_tokens == 0
    assert record.on_run(run(0, [1000], attempt=2), 5).fresh_tokens == 1


def test_the_first_end_counts(record):
    assert record.fail(DeadlineError("late"), 5)
    assert not record.fail(InternalError("later"), 6)
    assert record.error.code == "deadline_exceeded"
    assert record.on_run(run(0, [1000]), 7).fresh_tokens == 0


def test_tokens_behind_a_stop_string_do_not_count(model):
    ids = model.tokenizer.encode("one two three four")
    record = RequestRecord(request(stops=("two",)), model.tokenizer)
    record.next_attempt()
    result = record.on_run(run(0, ids), 5)
    assert result.stopped
    assert record.finished
    assert record.completion_tokens == 2
    assert shown(record) == "one "


def test_a_stop_token_counts_and_is_not_shown(record, model):
    ids = model.tokenizer.encode("Hello")
    record.on_run(run(0, ids, reason="stop", has_stop_token=True, stop_token_id=2), 5)
    assert record.completion_tokens == 2
    assert record.choices[0].stop_reason is None  # an end token of the model's own
    assert shown(record) == "Hello"


def test_a_stop_token_that_the_client_named_is_the_reason(model):
    record = RequestRecord(request(stop_token_ids=(2,)), model.tokenizer)
    record.next_attempt()
    record.on_run(run(0, [1000], reason="stop", has_stop_token=True, stop_token_id=2), 5)
    assert record.choices[0].stop_reason == 2


def test_what_ended_the_text_is_shown_where_asked_for(model):
    asked = request(stops=("two",))
    record = RequestRecord(
        replace(asked, shown=Shown(stops=("two",), stop_text=True)), model.tokenizer
    )
    record.next_attempt()
    record.on_run(run(0, model.tokenizer.encode("one two three")), 5)
    assert shown(record) == "one two"
    for special, end in ((False, ""), (True, "<|im_end|>")):
        record = RequestRecord(
            replace(request(), shown=Shown(stop_text=True, special_tokens=special)), model.tokenizer
        )
        record.next_attempt()
        ids = model.tokenizer.encode("Hello")
        record.on_run(run(0, ids, reason="stop", has_stop_token=True, stop_token_id=2), 5)
        assert shown(record) == f"Hello{end}"


def test_pieces_of_one_call_are_one_delta(model):
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    record = RequestRecord(
        replace(request(), expected_calls=PROMPTED.expected(())), model.tokenizer
    )
    record.next_attempt()
    record.on_run(run(0, model.tokenizer.encode(text * 2), reason="stop"), 5)
    [delta] = record.take()
    assert [(c.index, c.name, c.arguments) for c in delta.calls] == [
        (0, "f", '{"a": 1}'),
        (1, "f", '{"a": 1}'),
    ]
    assert delta.finish_reason == "tool_calls"


THINK = ReasoningSyntax(tags=ReasoningTags("<think>", "</think>"))


@pytest.mark.parametrize(("visible", "reasoning"), [(True, "Let me see."), (False, "")])
def test_thinking_is_told_apart_and_counted(model, visible, reasoning):
    thinking = Thinking(THINK, begun=True, shown=visible)
    record = RequestRecord(replace(request(), thinking=thinking), model.tokenizer)
    record.next_attempt()
    thought = model.tokenizer.encode("Let me see.\n</think>")
    answer = model.tokenizer.encode("\n\nParis")
    record.on_run(run(0, [*thought, *answer], reason="stop"), 5)
    [delta] = record.take()
    assert (delta.reasoning, delta.text) == (reasoning, "Paris")
    assert record.reasoning_tokens == len(thought)
    assert record.completion_tokens == len(thought) + len(answer)


def test_what_has_begun_goes_on_at_the_next_worker(record):
    record.on_run(run(0, [1000]), 5)
    record.next_attempt("worker lost")
    assert record.attempt == 2
    assert record.next_indices == [1]
    assert [unpack_tokens(one.token_ids) for one in record.emitted] == [[1000]]
    assert record.to_place.prompt == (*record.request.prompt, 1000)
    record.on_run(run(1, [1001], attempt=1), 6)  # the first worker, late
    assert record.next_indices == [1]
    record.on_run(run(1, [1001], attempt=2), 9)
    assert record.choices[0].token_ids == [1000, 1001]
    assert (record.moves, record.paused_ns) == (["worker lost"], 4)


def test_what_was_sent_before_any_token_cannot_be_started_again(record):
    record.sent = True  # its prompt's log-probabilities, for example
    with pytest.raises(InternalError):
        record.next_attempt()


@given(ids=st.lists(st.integers(0, 2**32 - 1)))
def test_packing(ids):
    assert unpack_tokens(pack_tokens(ids)) == ids
    assert pack_tokens(ids) == struct.pack(f"<{len(ids)}I", *ids)


class TestRepair:
    """What follows when a worker fails."""

    @pytest.mark.parametrize(
        ("mode", "died", "others", "may_wait", "action"),
        [
            ("auto", True, [b"q"], True, "replace"),
            ("auto", False, [b"q"], True, "replace"),
            ("auto", False, [], True, "local"),
            ("auto", True, [], True, "wait"),  # the cause of the crash is unknown: not here
            ("auto", True, [b"p"], True, "wait"),  # the failed one itself is no other
            ("auto", True, [], False, "refuse"),
            ("disaggregated", True, [], True, "wait"),
            ("disaggregated", False, [], True, "refuse"),
            ("disaggregated", True, [b"q"], True, "replace"),
        ],
    )
    def test_after_a_prefill_failure(self, model, mode, died, others, may_wait, action):
        record = RequestRecord(request(mode=mode), model.tokenizer)
        repair = after_prefill_failure(
            record, failed=b"p", peer_died=died, others=others, may_wait=may_wait
        )
        assert repair.action == action
        assert (repair.refusal is not None) == (action == "refuse")

    def test_a_worker_that_takes_no_prompts_now_is_no_reason_to_refuse(self, model):
        """It has turned, or drains: another one comes."""
        record = RequestRecord(request(mode="disaggregated"), model.tokenizer)
        fields = {"failed": b"p", "peer_died": False, "unavailable": True}
        assert after_prefill_failure(record, others=[], may_wait=True, **fields).action == "wait"
        assert after_prefill_failure(record, others=[], may_wait=False, **fields).action == "refuse"
        again = after_prefill_failure(record, others=[b"p", b"q"], may_wait=True, **fields)
        assert again.action == "replace"
        assert (
            after_prefill_failure(record, others=[b"p"], may_wait=True, **fields).action == "wait"
        )
        assert not record.failed_prefills, "it may be asked again"
        assert not record.died_holding

    def test_two_deaths_are_enough(self, record):
        first = after_prefill_failure(
            record, failed=b"p", peer_died=True, others=[b"q"], may_wait=True
        )
        second = after_prefill_failure(
            record, failed=b"q", peer_died=True, others=[b"r"], may_wait=True
        )
        assert (first.action, second.action) == ("replace", "refuse")
        assert second.refusal.code == "poison_request"

    def test_a_prefill_and_a_decode_death_add_up(self, record):
        after_prefill_failure(record, failed=b"p", peer_died=True, others=[], may_wait=True)
        assert after_worker_death(record, dead=b"d", reason="x", died=True).code == "poison_request"

    def test_failures_that_killed_nobody_do_not_count_as_deaths(self, record):
        for name in (b"a", b"b", b"c"):
            after_prefill_failure(
                record, failed=name, peer_died=False, others=[b"z"], may_wait=True
            )
        assert after_worker_death(record, dead=b"d", reason="x", died=True) is None

    def test_silent_workers_do_not_count_as_dead(self, record):
        """Defect 8: slow is not dead."""
        for name in (b"a", b"b", b"c"):
            assert after_worker_death(record, dead=name, reason="x", died=False) is None
        record.next_attempt()
        late = after_worker_death(record, dead=b"d", reason="x", died=False)
        assert (late.code, late.retryable) == ("worker_lost", True)
        assert not record.died_holding

    def test_a_begun_stream_is_not_moved(self, record):
        record.sent = True
        assert after_worker_death(record, dead=b"d", reason="x", died=True).code == "worker_lost"


CALL = 'Wait. <tool_call>{"name": "f", "arguments": {"a": [1, 2]}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "end", "reason"),
    [
        (CALL, "stop", "tool_calls"),
        (CALL, "length", "length"),
        (CALL[:-20], "length", "length"),
        (CALL + "<tool_call>{", "stop", "stop"),
        ("Wait. ", "stop", "stop"),
    ],
)
def test_calls_are_apart_from_text_and_the_end_tells_of_whole_ones(model, text, end, reason):
    record = RequestRecord(
        replace(request(), expected_calls=PROMPTED.expected(())), model.tokenizer
    )
    record.next_attempt()
    ids = model.tokenizer.encode(text)
    deltas = []
    for index, token in enumerate(ids):
        last = index == len(ids) - 1
        record.on_run(run(index, [token], reason=end if last else ""), 5)
        deltas += record.take()
    assert "".join(delta.text for delta in deltas).startswith("Wait. ")
    assert deltas[-1].finish_reason == reason
    calls = [call for delta in deltas for call in delta.calls]
    assert [call.name for call in calls if call.id] == ["f"] * ("<tool_call>" in text)
    written = "".join(call.arguments for call in calls)
    assert bool(written) is bool(calls)
    assert '{"a": [1, 2]}'.startswith(written)


def test_a_record_that_is_kept_holds_no_schema(model):
    asked = replace(request(), checked_schema='{"uniqueItems": true}', checked_tools={"f": "{}"})
    record = RequestRecord(asked, model.tokenizer)
    record.next_attempt()
    ids = model.tokenizer.encode("[1, 1]")
    record.on_run(run(0, ids, reason="stop"), 5)
    assert record.choices[0].checks == [('{"uniqueItems": true}', "[1, 1]")]
    record.release_payload()
    assert (record.request.checked_schema, record.request.checked_tools) == ("", {})
    assert "uniqueItems" not in repr(vars(record.choices[0]))


def test_a_token_that_overtakes_the_scores_of_its_prompt_is_a_gap(model):
    """A step on a new stream can be faster than its resume, which brings scores and token again."""
    record = RequestRecord(request(prompt_logprobs=1), model.tokenizer)
    record.next_attempt()
    result = record.on_run(run(0, IDS[:1]), 5)
    assert result.gap
    assert not record.ended
    assert record.next_indices == [0]
