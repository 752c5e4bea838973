"""Names of a prompt's blocks, computed ahead."""

from dataclasses import replace
from types import SimpleNamespace

from batonpb.common_pb2 import Capabilities

from baton.types.block_hashes import HASH_BYTES
from router.routing.placement import prompt_hashes
from router.routing.placement.prompt_hashes import HashSeedCache
from router.routing.workers.slot import WorkerSlot
from tests.router.conftest import record_of
from tests.router.requests.fake_links import request


def test_hashes_computed_ahead_are_used_for_the_same_seed_and_prompt_only(monkeypatch):
    made: list[int] = []
    hashes = prompt_hashes._hashes
    monkeypatch.setattr(
        prompt_hashes, "_hashes", lambda seed, ids: made.append(len(ids)) or hashes(seed, ids)
    )
    seeds = HashSeedCache()
    asked = request(prompt=range(5000))
    assert seeds.chain(asked) == b"", "no worker is known"
    slot = WorkerSlot(record_of("decode-0", "fake", "decode"))
    slot.link = SimpleNamespace(capabilities=Capabilities(weights_digest=b"one"))
    plain = prompt_hashes.prompt_hashes(asked, [slot], seeds)
    ahead = replace(asked, chain=seeds.chain(asked))
    assert seeds.chain(request(prompt=range(64))) == b"", "a short prompt takes no time"
    made.clear()
    assert prompt_hashes.prompt_hashes(ahead, [slot], seeds) == plain
    assert not made
    longer = replace(ahead, prompt=(*ahead.prompt, *range(32)), goes_on=True)
    assert len(prompt_hashes.prompt_hashes(longer, [slot], seeds)) == len(plain) + 2 * HASH_BYTES
    slot.link = SimpleNamespace(capabilities=Capabilities(weights_digest=b"other"))
    assert prompt_hashes.prompt_hashes(ahead, [slot], seeds) != plain
    assert made == [5032, 5000]
