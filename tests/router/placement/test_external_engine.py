"""Responses that an external engine cannot take over from a prefill worker stay on one worker."""

import random
from typing import Any

import pytest

from baton.types.images import PromptImage
from baton.types.params import SamplingParams
from benchmarks.placement import fleet
from router.request import GenerationRequest
from router.routing.placement.placer import Placer
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.workers.slot import WorkerSlot
from router.settings import LaneSettings


class Table(list[WorkerSlot]):
    """Workers, all of them usable."""

    @property
    def usable(self) -> list[WorkerSlot]:
        return self

    def get(self, worker_id: str) -> WorkerSlot | None:
        return next((slot for slot in self if slot.worker_id == worker_id), None)

    def news(self) -> None:
        return None


IMAGE = PromptImage(b"file", b"d" * 16, 3, 200, (9,))


def modes(
    external: str, goes_on: bool = False, images: tuple[PromptImage, ...] = (), **params: Any
) -> set[str]:
    """Return the modes that the placer compares for a request."""
    workers = Table(fleet(2, 2, random.Random(1)))
    settings = LaneSettings(model="m", model_names=("m",), external=external)
    placer = Placer(
        settings,
        workers,
        PrefixIndex(),
        clock_ns=lambda: 0,
        hashes_of=lambda *_: [],
    )
    request = asked(2048, goes_on=goes_on, images=images, **params)
    return {one.mode for one in placer.quote(request).placement.candidates}


def asked(
    length: int, goes_on: bool = False, images: tuple[PromptImage, ...] = (), **params: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        prompt=tuple(range(length)),
        sampling=SamplingParams(max_tokens=64, **params),
        arrived_ns=0,
        deadline_ns=10**18,
        goes_on=goes_on,
        images=images,
    )


def test_prompts_may_be_handed_over() -> None:
    assert modes("vllm") == {"colocated", "disaggregated"}


@pytest.mark.parametrize(
    "params",
    [
        {"grammar": "g"},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"bad_words": ((5, 6),)},
        {"prompt_logprobs": 1},
    ],
)
def test_what_depends_on_the_output_so_far_stays_on_one_worker(params: dict[str, Any]) -> None:
    assert modes("vllm", **params) == {"colocated"}
    assert modes("", **params) == {"colocated", "disaggregated"}


def test_a_resumed_response_stays_on_one_worker() -> None:
    assert modes("vllm", goes_on=True) == {"colocated"}


def test_a_prompt_with_images_stays_on_one_worker() -> None:
    assert modes("vllm", images=(IMAGE,)) == {"colocated"}


def test_a_prompt_goes_to_attached_servers_whose_context_has_room_for_it() -> None:
    workers = Table(fleet(0, 3, random.Random(1)))
    for slot, room in zip(workers, (1024, 2048, 2049), strict=True):
        assert slot.link is not None
        slot.link.capabilities.max_context_tokens = room
    settings = LaneSettings(model="m", model_names=("m",), external="vllm", attached=True)
    placer = Placer(settings, workers, PrefixIndex(), hashes_of=lambda *_: [])
    placed = {
        length: {
            placer.quote(asked(length), may_spread=False).placement.chosen.decode.worker_id
            for _ in range(40)
        }
        for length in (1000, 2000, 2048, 3000)
    }
    assert placed[1000] <= {"decode-1", "decode-2"}, "64 tokens of a response have room, too"
    assert placed[2000] <= {"decode-1", "decode-2"}, "no server has room for all of it"
    assert placed[2048] == {"decode-2"}
    assert placed[3000], "a server refuses it"
    largest = workers[2].incarnation
    assert placer.could_place(asked(2000), largest)
    assert not placer.could_place(asked(2048), largest), "the others would refuse it"
