"""Which pairs a round of probes goes through."""

from router.routing.requests.readiness import pairs_of


def names(role: str, count: int) -> list[str]:
    return [f"{role}-{number}" for number in range(count)]


def test_of_a_few_workers_every_pair_is_probed_in_every_round() -> None:
    for number in range(3):
        assert len(set(pairs_of(names("p", 4), names("d", 4), number))) == 16


def test_of_many_each_worker_is_probed_in_each_round_and_each_pair_in_time() -> None:
    for prefills, decodes in ((25, 25), (3, 20), (20, 3), (1, 40)):
        seen: set[tuple[str, str]] = set()
        for number in range(min(prefills, decodes)):
            pairs = pairs_of(names("p", prefills), names("d", decodes), number)
            assert len(pairs) == max(prefills, decodes)
            assert {prefill for prefill, _ in pairs} == set(names("p", prefills))
            assert {decode for _, decode in pairs} == set(names("d", decodes))
            seen |= set(pairs)
        assert len(seen) == prefills * decodes
