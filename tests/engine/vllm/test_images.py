"""Images in requests to vLLM: placeholders, the prompt that it computed, and what it renders."""

import json

import msgspec
import pytest

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.vllm.images import expansion_in, render_body
from baton.engine.vllm.protocol import ChoiceStream, generate_body, refusal
from baton.types.errors import InternalError, InvalidRequestError
from baton.types.images import PromptImage
from baton.types.params import SamplingParams

FIRST = PromptImage(b"first", b"\x01" * 16, 1, 3, (90,))
SECOND = PromptImage(b"second", b"\x02" * 16, 5, 2, (91, 92))
PROMPT = [10, 90, 90, 90, 11, 93, 93, 12]
SPEC = RequestSpec(
    kind=Kind.FULL,
    params=SamplingParams(max_tokens=8, temperature=0.0),
    hash_seed=b"\x01" * 16,
    images=(FIRST, SECOND),
)


def test_vllm_gets_placeholders_and_files_by_names_of_their_digest_and_length() -> None:
    resumed = msgspec.structs.replace(SPEC, emitted=((7, 8),))
    body = json.loads(generate_body("r", PROMPT, resumed, 0, (2,)))
    assert body["token_ids"] == [10, 90, 11, 91, 92, 12, 7, 8]
    assert [part["uuid"] for part in body["content_parts"]] == ["01" * 16 + "-3", "02" * 16 + "-2"]
    assert body["content_parts"][0]["url"].endswith(";base64,Zmlyc3Q=")


@pytest.mark.parametrize("own", [[], PROMPT[:-1], [*PROMPT[:-1], 13]])
def test_another_prompt_than_that_of_the_router_ends_the_request(own: list[int]) -> None:
    def event(prompt: list[int] | None) -> bytes:
        chunk = {"choices": [{"token_ids": [5]}], "prompt_token_ids": prompt}
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    stream = ChoiceStream("r", 0, SPEC, (2,))
    stream.prompt = tuple(PROMPT)
    with pytest.raises(InvalidRequestError, match=r"more than its size.*send one image per req"):
        stream.feed(event(own))
    stream = ChoiceStream("r", 0, SPEC, (2,))
    stream.prompt = tuple(PROMPT)
    assert stream.feed(event(PROMPT))
    assert stream.feed(event(None))  # only the first event has it


def test_the_tokens_of_an_image_are_those_of_a_rendered_chat() -> None:
    part = json.loads(render_body(b"first"))["messages"][0]["content"][0]
    assert part["image_url"]["url"].endswith(";base64,Zmlyc3Q=")
    places = [{"offset": 1, "length": 3}]
    rendered = {"token_ids": PROMPT, "features": {"mm_placeholders": {"image": places}}}
    found = expansion_in(json.dumps(rendered).encode(), "r")
    assert (found.prompt[found.begin : found.begin + found.count], found.begin) == ((90,) * 3, 1)
    for broken in ({"token_ids": PROMPT}, {**rendered, "features": {"mm_placeholders": {}}}, 5):
        with pytest.raises(InternalError):
            expansion_in(json.dumps(broken).encode(), "r")


def test_no_kv_of_images_moves() -> None:
    for kind in (Kind.PREFILL, Kind.REMOTE, Kind.HELD):
        moved = msgspec.structs.replace(SPEC, kind=kind)
        error = refusal(moved, hands_over=True, pulls=True)
        assert error is not None
        assert "images" in error.message
    assert refusal(SPEC, hands_over=True, pulls=True) is None
