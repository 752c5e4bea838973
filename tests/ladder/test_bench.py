"""The bench of the ladder: parts of a router's work, timed with its own functions."""

import json

from benchmarks.ladder.__main__ import Row, Seen, growth, prompts, table
from benchmarks.ladder.bodies import MANY_TOOLS, MESSAGES, SCHEMA_BYTES, TOOLS_BYTES, bodies
from benchmarks.ladder.phases import medians, phases_of
from router.served_model import ServedModel
from tests.ladder.rungs import CONTEXT_TOKENS
from tests.ladder.test_prompt_sizes import artifact

__all__ = ["artifact"]


def test_bodies_are_as_long_as_their_names_say():
    told = bodies()
    assert len(json.dumps(told["150 KB of tools"]["tools"])) > TOOLS_BYTES
    assert len(told["200 tools"]["tools"]) == MANY_TOOLS
    assert len(told["1,000 messages"]["messages"]) == MESSAGES
    schema = told["schema of 50 KB"]["response_format"]["json_schema"]["schema"]
    assert SCHEMA_BYTES < len(json.dumps(schema)) < SCHEMA_BYTES * 1.1
    everything = told["all together"]
    assert len(everything["messages"]) == MESSAGES
    assert len(everything["tools"]) == MANY_TOOLS
    assert len(json.dumps(everything["tools"])) > TOOLS_BYTES


def test_rows_hold_the_parts_of_a_routers_work_and_growth_compares_them(artifact):
    model = ServedModel(artifact, ("default",), max_context_tokens=CONTEXT_TOKENS, emulated=True)
    chats = prompts(model)
    seen = Seen(first=9.0, over=5.0, router_cpu=7.0, answer_tokens=4)
    rows = []
    for name, chat in chats.items():
        raw = json.dumps(chat).encode()
        phases = medians(lambda raw=raw: phases_of(raw, model), 1)
        assert 0 <= int(name.split()[0].replace(",", "")) - phases.tokens < 8
        assert phases.body > 0 and phases.tokenizer > 0 and phases.submission > 0
        rows.append(
            Row(
                name=name,
                body_bytes=len(raw),
                phases=phases,
                seen={"colocated": seen, "disaggregated": seen},
                router_mib=1.0,
                worker_mib=2.0,
            )
        )
    assert table(rows).row_count == len(rows) == 6
    [over] = growth(rows).columns[-2].cells
    assert over == "0.06", "the same time for sixteen times as many tokens"
