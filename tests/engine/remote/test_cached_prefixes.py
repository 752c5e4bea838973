"""Prefixes of a server without KV events, from the requests that were sent there."""

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.process import messages
from baton.engine.remote.cached_prefixes import ApproximatePrefixes
from baton.engine.remote.live_request import LiveRequest
from baton.types import events as ev
from baton.types.block_hashes import block_hashes
from baton.types.params import SampledToken, SamplingParams

SEED = bytes(16)
BLOCK = 32


class Known:
    """An approximate index, and the set that its changes make."""

    def __init__(self, blocks: int, *, by_slot: bool = False) -> None:
        self.held: set[bytes] = set()
        self.prefixes = ApproximatePrefixes(blocks, BLOCK, self._change, by_slot=by_slot)

    def _change(self, change: ev.CacheChanged) -> None:
        assert not self.held & set(change.stored)
        assert self.held >= set(change.removed)
        self.held |= set(change.stored)
        self.held -= set(change.removed)

    def serve(self, prompt: list[int], response: int = 0, cached: int | None = None) -> None:
        """Let a prompt with a response be computed; the server reports so many cached tokens."""
        self.respond(self.send(prompt), response, cached)

    def send(self, prompt: list[int]) -> LiveRequest:
        request = live(prompt)
        self.prefixes.sent(request)
        return request

    def respond(self, request: LiveRequest, response: int = 0, cached: int | None = None) -> None:
        self.prefixes.computed(request)
        tokens = tuple(SampledToken(7000 + at) for at in range(response))
        request.keep(ev.Tokens(request_id="r", choice=0, index=0, tokens=tokens))
        self.prefixes.responded(request, 0, cached)

    def cached(self, tokens: list[int]) -> int:
        return self.prefixes.cached_tokens(block_hashes(SEED, tokens))


def live(prompt: list[int]) -> LiveRequest:
    spec = RequestSpec(kind=Kind.FULL, params=SamplingParams(max_tokens=99), hash_seed=SEED)
    submit = messages.Submit(request_id="r", prompt_token_ids=b"", spec=spec)
    return LiveRequest(submit, prompt, 0, block_hashes(SEED, prompt[:-1]))


def prompt_of(first: int, tokens: int = 97) -> list[int]:
    return list(range(first, first + tokens))


def test_prompts_and_responses_are_known_in_whole_blocks_of_the_server() -> None:
    known = Known(1000)
    known.serve(prompt_of(0, 100), response=40)
    whole = [*prompt_of(0, 100), *range(7000, 7040)]
    assert known.cached(whole) == 128  # 139 tokens are computed, the last one of 140 is not
    assert known.cached(prompt_of(0, 70)) == 64
    assert known.cached(prompt_of(1)) == 0
    assert known.held == set(block_hashes(SEED, whole)[:8])


def test_no_more_blocks_are_known_than_the_server_has() -> None:
    known = Known(12)
    known.serve(prompt_of(0))
    known.serve(prompt_of(1000))
    known.serve(prompt_of(0))  # used again, so the other one goes first
    known.serve(prompt_of(2000))
    assert len(known.held) == known.prefixes.held_blocks == 12
    assert (known.cached(prompt_of(0)), known.cached(prompt_of(1000))) == (96, 0)


def test_nothing_is_known_after_the_server_has_erased_its_cache() -> None:
    known = Known(12)
    known.serve(prompt_of(0))
    known.prefixes.erased()
    assert (known.held, known.cached(prompt_of(0))) == (set(), 0)
    known.serve(prompt_of(0))
    assert known.cached(prompt_of(0)) == 96


def test_the_end_of_a_chain_is_forgotten_before_its_beginning() -> None:
    known = Known(9)
    known.serve(prompt_of(0))
    known.serve(prompt_of(1000, 65))
    assert known.cached(prompt_of(0)) == 64
    assert len(known.held) == 9


def test_a_server_that_has_lost_a_block_has_lost_what_was_used_before_it() -> None:
    known = Known(1000)
    known.serve(prompt_of(0))
    known.serve(prompt_of(1000))
    known.serve(prompt_of(2000))
    known.serve(prompt_of(1000), cached=0)  # 96 were expected
    assert known.cached(prompt_of(1000)) == 96  # computed again
    assert known.cached(prompt_of(0)) == 0
    assert known.cached(prompt_of(2000)) == 96


def test_a_prompt_that_misses_its_blocks_in_a_slot_shows_nothing_of_others() -> None:
    known = Known(1000, by_slot=True)
    known.serve(prompt_of(0))
    known.serve(prompt_of(1000))
    known.serve([*prompt_of(1000, 64), *prompt_of(5000, 33)], cached=0)  # 64 were expected
    assert known.cached(prompt_of(0)) == 96
    assert known.cached(prompt_of(1000)) == 96
    assert known.cached([*prompt_of(1000, 64), *prompt_of(5000, 33)]) == 96


def test_a_part_of_a_prompt_that_is_still_cached_stays_known() -> None:
    known = Known(1000)
    known.serve(prompt_of(0))
    known.serve([*prompt_of(0, 64), *prompt_of(5000, 33)])
    known.serve(prompt_of(0), cached=64)
    assert known.cached([*prompt_of(0, 64), *prompt_of(5000, 33)]) == 96
    assert known.cached(prompt_of(0)) == 96


def test_a_server_that_caches_nothing_is_known_to_have_nothing() -> None:
    known = Known(0)
    known.serve(prompt_of(0))
    assert known.cached(prompt_of(0)) == 0
    assert known.held == set()


def test_two_requests_at_once_that_both_compute_a_prompt_correct_nothing() -> None:
    known = Known(1000)
    known.serve(prompt_of(0))
    both = [known.send(prompt_of(1000)) for _ in range(2)]
    for request in both:
        known.respond(request, cached=0)
    assert known.cached(prompt_of(0)) == 96
