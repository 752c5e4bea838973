"""Agents: the shape of their load, by real tokenizers, and the same load for the same seed."""

import json

import numpy as np
import pytest

from baton.config.fleet_file import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from baton.text.tokenizer import load_tokenizer
from loadtest.client.answer import ToolCall
from loadtest.client.dialogue import Dialogue
from loadtest.workloads.agents import MAX_TOOLS, Agents, agent_plan, agent_prompt, alone
from loadtest.workloads.plan import AgentSetup
from loadtest.workloads.prompts import PromptWriter

CALL = ToolCall(id="c1", name="read_file", arguments='{"path": "a"}')


@pytest.fixture(scope="module")
def tokens():
    tokenizer = load_tokenizer(resolve_model(DEFAULT_MODEL).tokenizer)
    return lambda text: len(tokenizer.encode(text))


@pytest.mark.parametrize(("tools", "total"), [(24, 19_000), (8, 6_000)])
def test_system_and_tools_have_the_tokens_asked_for(tokens, tools, total):
    setup = AgentSetup(key=1, tools=tools, tokens=total)
    system, offered = agent_prompt(setup, PromptWriter(3))
    assert tokens(system) + tokens(json.dumps(offered)) == pytest.approx(total, rel=0.03)
    assert tokens(json.dumps(offered)) == pytest.approx(0.75 * total, rel=0.05)
    names = {tool["function"]["name"] for tool in offered}
    assert len(names) == tools
    for tool in offered:
        schema = tool["function"]["parameters"]
        assert set(schema["required"]) < set(schema["properties"])
        assert all(one["description"] for one in schema["properties"].values())


def test_the_largest_number_of_tools_has_different_names():
    _, offered = agent_prompt(AgentSetup(key=1, tools=MAX_TOOLS, tokens=100), PromptWriter(3))
    assert len({tool["function"]["name"] for tool in offered}) == MAX_TOOLS


def test_turns_grow_as_planned_and_results_have_8_kb(tokens):
    plan = agent_plan(Agents(sessions=3, turns=200), name="agents", seed=4)
    writer = PromptWriter(plan.seed)
    first, second, _ = plan.conversations
    lengths = [turn.prompt_tokens for turn in first.turns]
    assert lengths == [turn.prompt_tokens for turn in second.turns]
    assert min(lengths) >= 500
    assert max(lengths) * 5.4 == pytest.approx(8192, rel=0.01)
    longest = writer.text(first.turns[int(np.argmax(lengths))].prompt)
    assert len(longest) == pytest.approx(8192, rel=0.02)
    assert tokens(longest) == pytest.approx(max(lengths), rel=0.01)
    assert writer.text(first.turns[0].prompt) != writer.text(second.turns[0].prompt)
    assert [turn.number for turn in first.turns] == list(range(1, 201))
    assert [turn.continues for turn in first.turns] == [False] + [True] * 199


def test_a_seed_gives_one_load_and_sessions_share_what_is_asked():
    plan, same, other = (agent_plan(Agents(), name="agents", seed=seed) for seed in (4, 4, 5))
    assert plan.digest() == same.digest() != other.digest()
    assert plan.request_count == 80
    assert len({conversation.agent for conversation in plan.conversations}) == 1
    own = agent_plan(Agents(shared=False), name="agents", seed=4)
    assert len({conversation.agent for conversation in own.conversations}) == 10


def test_a_session_alone_has_equal_lengths_and_no_common_prefix():
    plan = agent_plan(Agents(), name="agents", seed=4)
    single = alone(plan)
    assert single.conversations == plan.conversations[:1]
    texts = [
        agent_prompt(p.conversations[0].agent, PromptWriter(p.seed))[0] for p in (plan, single)
    ]
    assert texts[0].split()[20:40] != texts[1].split()[20:40]


def test_a_call_is_answered_by_its_result_and_anything_else_by_a_user():
    dialogue = Dialogue("be brief", [{}])
    assert [m["role"] for m in dialogue.ask("one")] == ["system", "user"]
    dialogue.keep("I read", [CALL, ToolCall(id="c2", name="x", arguments="{}")])
    *_, answer, first, second = dialogue.ask("two")
    assert answer["content"] == "I read"
    assert answer["tool_calls"][0]["function"] == {
        "name": "read_file",
        "arguments": '{"path": "a"}',
    }
    assert (first["role"], first["tool_call_id"], first["content"]) == ("tool", "c1", "done")
    assert (second["role"], second["tool_call_id"], second["content"]) == ("tool", "c2", "two")
    dialogue.keep("done", [])
    assert dialogue.ask("three")[-1] == {"role": "user", "content": "three"}


@pytest.mark.parametrize("cut", ['{"path": "a', ""])
def test_a_call_that_was_cut_is_not_sent_back(cut):
    dialogue = Dialogue()
    dialogue.ask("one")
    dialogue.keep("text", [ToolCall(id="c1", name="read_file", arguments=cut)])
    assert dialogue.ask("two") == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "text"},
        {"role": "user", "content": "two"},
    ]


def test_a_turn_without_a_response_is_not_part_of_the_next():
    dialogue = Dialogue()
    dialogue.ask("one")
    dialogue.keep("", [CALL])
    dialogue.ask("refused")
    dialogue.keep("", [])
    assert [m["content"] for m in dialogue.ask("two")] == ["one", "", "two"]
    dialogue.begin()
    assert len(dialogue.ask("again")) == 1
