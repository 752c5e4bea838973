"""Models that think: the thinking stands beside the content, streamed or whole."""

import pytest

from router.served_model import ServedModel
from tests.router.conftest import MODEL, events_of
from tests.router.emulated_worker import Script
from tests.router.grammars import fits

# As Qwen 3 has it: the model writes the tag; without thinking, the prompt holds an empty one.
WRITES_TAG = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{ m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
# As DeepSeek R1: the prompt ends within the thinking.
BEGINS = """{{ messages[-1].content.split('</think>')[-1] }}<|im_start|>assistant
{% if add_generation_prompt %}<think>
{% endif %}"""


@pytest.fixture
def thinking_fleet(make_fleet, artifact, model):
    async def make(template: str, text: str):
        served = ServedModel(artifact, (MODEL,), chat_template=template)
        ids = model.tokenizer.encode(text)
        return await make_fleet({"decode-0": Script(answer=ids, stop_token=2)}, served=served)

    return make


async def parts(fleet, **body) -> tuple[str, str, dict]:
    """Thinking, content and usage: the same, streamed or whole."""
    whole = (await fleet.chat(max_tokens=100, **body)).json()
    message = whole["choices"][0]["message"]
    options = {"include_usage": True}
    streamed = await fleet.chat(max_tokens=100, stream=True, stream_options=options, **body)
    events = events_of(streamed.text)[:-1]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
    content = "".join(delta.get("content", "") for delta in deltas)
    assert thoughts == message.get("reasoning_content", "")
    assert content == (message["content"] or "")
    assert events[-1]["usage"] == whole["usage"]
    return thoughts, content, whole["usage"]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (WRITES_TAG, "<think>\nParis, or Lyon?\n</think>\n\nParis."),
        (BEGINS, "Paris, or Lyon?\n</think>\n\nParis."),
    ],
)
async def test_thinking_stands_beside_the_content(thinking_fleet, model, template, text):
    fleet = await thinking_fleet(template, text)
    thoughts, content, usage = await parts(fleet)
    assert (thoughts, content) == ("Paris, or Lyon?", "Paris.")
    thought = model.tokenizer.encode(text[: text.index("</think>") + len("</think>")])
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert abs(counted - len(thought)) <= 2  # the tag itself is several tokens of this model
    assert counted < usage["completion_tokens"]
    hidden = await parts(fleet, include_reasoning=False)
    assert hidden[:2] == ("", "Paris.")


async def test_without_thinking_a_tag_is_text_of_its_own(make_fleet, model, thinking_fleet):
    ids = model.tokenizer.encode("<think>a</think>b")
    plain = await make_fleet({"decode-0": Script(answer=ids, stop_token=2)})
    assert (await parts(plain))[:2] == ("", "<think>a</think>b")
    closed = await thinking_fleet(WRITES_TAG, "Paris.")
    thoughts, content, usage = await parts(closed, enable_thinking=False)
    assert (thoughts, content) == ("", "Paris.")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_thinking_that_was_cut_is_no_content(thinking_fleet):
    fleet = await thinking_fleet(BEGINS, "Paris, or Lyon? Or")
    answer = (await fleet.chat(max_tokens=100)).json()["choices"][0]["message"]
    assert (answer["content"], answer["reasoning_content"]) == (None, "Paris, or Lyon? Or")
    again = await fleet.chat(messages=[{"role": "user", "content": "hi"}, answer])
    assert again.status_code == 200, again.text


async def test_what_was_thought_is_shown_to_a_template_that_shows_it(thinking_fleet, model):
    fleet = await thinking_fleet(WRITES_TAG, "x")
    earlier = {"role": "assistant", "content": "Paris.", "reasoning_content": "Hm."}
    await fleet.chat(messages=[{"role": "user", "content": "hi"}, earlier])
    sent = fleet.workers["decode-0"].submissions[0].prompt_tokens
    ids = [int.from_bytes(sent[i : i + 4], "little") for i in range(0, len(sent), 4)]
    assert "<think>Hm.</think>" in model.tokenizer.decode(ids)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def test_calls_and_shapes_come_behind_the_thinking(thinking_fleet, model):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    fleet = await thinking_fleet(BEGINS, f"Let me call.</think>{call}")
    message = (await fleet.chat(tools=[TOOL], max_tokens=100)).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Let me call."
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    await fleet.chat(guided_choice=["yes", "no"], max_tokens=100)
    grammar = fleet.workers["decode-0"].submissions[-1].sampling.grammar
    assert fits(model, grammar, "Hm.</think>\n\nyes")


async def test_a_budget_needs_an_end_of_one_token(thinking_fleet, make_fleet):
    fleet = await thinking_fleet(BEGINS, "x")
    refused = await fleet.chat(thinking_token_budget=5)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "thinking_token_budget")
    plain = await make_fleet({"decode-0": Script()})  # does not think: nothing to cut
    assert (await plain.chat(thinking_token_budget=5)).status_code == 200
