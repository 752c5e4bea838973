"""The chain of the audit log: every change of the file is found."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tenants.audit.chain import ZERO, ChainHead, Entry, head_of, sealed, verify

TEXTS = st.text(max_size=20)
VALUES = st.none() | TEXTS | st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=3)
ENTRIES = st.builds(Entry, **dict.fromkeys(("id", "time", "who", "verb"), TEXTS), after=VALUES)


def chain_of(entries: list[Entry]) -> tuple[list[bytes], ChainHead]:
    head = ChainHead()
    lines = []
    for entry in entries:
        line, head = sealed(entry, head)
        lines.append(line)
    return lines, head


@given(st.lists(ENTRIES, max_size=8))
def test_a_chain_is_valid_and_its_entries_are_there(entries):
    lines, head = chain_of(entries)
    verdict = verify(lines, head)
    assert (verdict.lines, verdict.head, verdict.broken_line) == (len(entries), head, 0)
    previous = ZERO
    for number, (line, entry) in enumerate(zip(lines, entries, strict=True), 1):
        fields = json.loads(line)
        assert fields["prev_sha256"] == previous and fields["seq"] == number
        assert (fields["who"], fields["verb"], fields["after"]) == (
            entry.who,
            entry.verb,
            entry.after,
        )
        previous = hashlib.sha256(line[:-1]).hexdigest()
    assert verify(lines).head == head, "without a recorded head, too"


@given(st.lists(ENTRIES, min_size=1, max_size=6), st.data())
def test_any_single_change_of_the_file_is_found(entries, data):
    lines, head = chain_of(entries)
    at = data.draw(st.integers(0, len(lines) - 1))
    kind = data.draw(
        st.sampled_from(["byte", "forge", "remove", "repeat", "swap", "insert", "cut"])
    )
    changed = list(lines)
    if kind == "byte":
        raw = bytearray(lines[at])
        place = data.draw(st.integers(0, len(raw) - 2))
        raw[place] ^= data.draw(st.integers(1, 255))
        changed[at] = bytes(raw)
    elif kind == "forge":
        before = head_of(lines[at - 1][:-1]) if at else ChainHead()
        changed[at] = sealed(data.draw(ENTRIES), before)[0]
    elif kind == "remove":
        del changed[at]
    elif kind == "repeat":
        changed.insert(at, lines[at])
    elif kind == "swap":
        other = data.draw(st.integers(0, len(lines) - 1))
        changed[at], changed[other] = lines[other], lines[at]
    elif kind == "insert":
        seq = data.draw(st.integers(0, len(lines) + 1))
        changed.insert(at, sealed(data.draw(ENTRIES), ChainHead(seq, ZERO))[0])
    else:
        changed = changed[:at]
    again = b"".join(changed).split(b"\n")[:-1]  # as the file is read
    if again == [line[:-1] for line in lines]:
        return
    verdict = verify(again, head)
    assert verdict.broken_line == verdict.lines + 1
    first = next((n for n, (a, b) in enumerate(zip(changed, lines, strict=False)) if a != b), None)
    assert verdict.lines <= (len(changed) if first is None else first + 1)


def test_a_longer_file_than_recorded_is_valid_and_a_forged_end_is_not():
    entries = [Entry(id=str(n), time="t", who="w", verb="v") for n in range(3)]
    lines, _ = chain_of(entries)
    known = chain_of(entries[:2])[1]
    assert verify(lines, known).broken_line == 0
    forged, _ = chain_of([entries[0], Entry(id="x", time="t", who="w", verb="v"), entries[2]])
    assert verify(forged).broken_line == 0, "nobody can see this without a record"
    verdict = verify(forged, known)
    assert (verdict.broken_line, verdict.problem) == (
        2,
        "its hash is not the one that was recorded",
    )


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b'{"seq":"1","prev_sha256":""}', b"\xff"])
def test_lines_that_are_no_entries_are_named(line):
    verdict = verify([line])
    assert verdict.broken_line == 1 and verdict.problem.startswith("it is no entry")


def test_long_values_are_cut_and_never_break_the_chain():
    entry = Entry(id="1", time="t", who="w", verb="v", after={"keys": ["k" * 100] * 1000})
    lines, head = chain_of([entry, entry])
    assert max(map(len, lines)) < 10_000 and json.loads(lines[0])["after"].endswith("…")
    assert verify(lines, head).lines == 2
