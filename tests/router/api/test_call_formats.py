"""Calls of model families over HTTP: the template chooses the format, clients see one form."""

import json

import pytest

from router.served_model import ServedModel
from tests.engine.text.calls.families import FAMILIES, WEATHER
from tests.router.conftest import events_of
from tests.router.emulated_worker import Script
from tests.router.grammars import matcher_of

ASKED = {
    "messages": [{"role": "user", "content": "Weather in Rome?"}],
    "tools": [WEATHER.described()],
    "max_tokens": 200,
}
IN_TEXT = [family for family in FAMILIES if not family.format.in_channels]


@pytest.mark.parametrize("family", IN_TEXT, ids=lambda family: family.template)
async def test_a_call_arrives_in_the_form_of_the_api(make_fleet, model, artifact, family):
    served = ServedModel(artifact, ("smollm2",), chat_template=family.source)
    thinking = served.thinking_of(served.render_chat(ASKED["messages"], [WEATHER]), shown=True)
    begun = thinking is not None and thinking.begun
    ids = served.tokenizer.encode(f"Hm.</think>\n\n{family.one}" if begun else family.one)
    fleet = await make_fleet({"decode-0": Script(answer=ids, stop_token=2)}, served=served)
    [choice] = (await fleet.chat(**ASKED)).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"].get("reasoning_content") == ("Hm." if begun else None)
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 3}
    [submission] = fleet.workers["decode-0"].submissions
    matcher = matcher_of(model, submission.sampling.grammar)
    assert matcher.try_consume_tokens(ids) == len(ids)

    answer = await fleet.chat(**ASKED, stream=True)
    deltas = [c["delta"] for event in events_of(answer.text)[:-1] for c in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    written = "".join(call["function"].get("arguments") or "" for call in calls)
    assert json.loads(written) == {"city": "Rome", "days": 3}
    assert len(calls) > 1, "arguments come as they are generated"
