"""Parameters of a KV transfer between two vLLMs, as a real one returned them."""

from pathlib import Path

import msgspec
import pytest

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.process import messages
from baton.engine.remote.live_request import LiveRequest
from baton.engine.vllm import facts, protocol
from baton.engine.vllm.hand_off_nixl import NixlHandOff
from baton.types.errors import InternalError
from baton.types.params import SampledToken, SamplingParams
from tests.engine.vllm.record import LONG, SEEDS

ANSWER = protocol.read_chunk((Path(__file__).parent / "recorded/prefill.json").read_bytes())


HAND_OFF = NixlHandOff(block_tokens=32)


def request(prompt: list[int], n: int = 1) -> LiveRequest:
    params = SamplingParams(max_tokens=4, n=n, temperature=1.0)
    spec = RequestSpec(kind=Kind.PREFILL, params=params, hash_seed=SEEDS[0])
    submit = messages.Submit(request_id="r", prompt_token_ids=b"", spec=spec)
    return LiveRequest(submit, prompt, generation=1)


def parameters() -> protocol.Parameters:
    return HAND_OFF.held(request(LONG), ANSWER.kv_transfer_params)


def test_the_parameters_travel_unchanged() -> None:
    own = parameters()
    assert own["do_remote_prefill"] is True
    both = request(LONG, n=2)
    both.first = {choice: (SampledToken(7, 0.0, ()), own) for choice in (0, 1)}
    assert HAND_OFF.to_load(both, HAND_OFF.publish(both)) == [own, own]


@pytest.mark.parametrize("data", [b"", b"[1]", b"{}", b"[]"])
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(InternalError, match=r"KV transfer"):
        HAND_OFF.to_load(request(LONG), data)


def test_a_vllm_that_holds_less_than_the_prompt_is_refused() -> None:
    """Models with a recurrent state leave the last token to the decode worker."""
    with pytest.raises(InternalError, match="199 of 200 prompt tokens"):
        HAND_OFF.held(request(LONG), {**parameters(), "remote_num_tokens": 199})
    for odd in ([], 5, "12", [1, 2], [[1], None]):
        with pytest.raises(InternalError, match="no NixlConnector"):
            HAND_OFF.held(request(LONG), {**parameters(), "remote_block_ids": odd})
    for nothing in (None, {}):
        with pytest.raises(InternalError, match="no NixlConnector"):
            HAND_OFF.held(request(LONG), nothing)


def test_a_prompt_that_fills_its_last_block_gets_one_for_the_first_token() -> None:
    own = parameters()
    data = msgspec.json.encode([own])
    assert own["remote_block_ids"] == [[1, 2, 3, 4, 5, 6, 7]]
    assert HAND_OFF.to_load(request(LONG), data) == [own]
    (padded,) = HAND_OFF.to_load(request([*LONG, *range(24)]), data)
    assert padded["remote_block_ids"] == [[1, 2, 3, 4, 5, 6, 7, 7]]


def test_the_id_of_a_hand_off_names_the_block_size() -> None:
    assert facts.hand_off_id("nixl", 32, 1) == "nixl/block32/tp1"
    assert facts.hand_off_id("", 32, 1) == ""
