"""Parameters of a KV transfer between two vLLMs, as a real one returned them."""

from pathlib import Path

import pytest

from baton.engine.vllm import protocol, transfer
from baton.types.errors import InternalError
from tests.engine.vllm.record import LONG

ANSWER = protocol.read_chunk((Path(__file__).parent / "recorded/prefill.json").read_bytes())


def parameters() -> transfer.Parameters:
    return transfer.held(ANSWER.kv_transfer_params, len(LONG))


def test_the_parameters_travel_unchanged() -> None:
    own = parameters()
    assert own["do_remote_prefill"] is True
    assert transfer.decode(transfer.encode([own, own]), 2) == [own, own]


@pytest.mark.parametrize("data", [b"", b"[1]", b"{}", b"[]"])
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(InternalError, match=r"KV transfer"):
        transfer.decode(data, 1)


def test_a_vllm_that_holds_less_than_the_prompt_is_refused() -> None:
    """Models with a recurrent state leave the last token to the decode worker."""
    with pytest.raises(InternalError, match="199 of 200 prompt tokens"):
        transfer.held({**parameters(), "remote_num_tokens": 199}, 200)
    for nothing in (None, {}, {"remote_block_ids": []}):
        with pytest.raises(InternalError, match="no NixlConnector"):
            transfer.held(nothing, 200)


def test_a_prompt_that_fills_its_last_block_gets_one_for_the_first_token() -> None:
    own = parameters()
    assert own["remote_block_ids"] == [[1, 2, 3, 4, 5, 6, 7]]
    assert transfer.to_load(own, 200, 32) == own
    padded = transfer.to_load(own, 224, 32)["remote_block_ids"]
    assert padded == [[1, 2, 3, 4, 5, 6, 7, 7]]


def test_the_id_of_a_hand_off_names_the_block_size() -> None:
    assert transfer.hand_off_id("nixl", 32) == "nixl/block32"
    assert transfer.hand_off_id("", 32) == ""
