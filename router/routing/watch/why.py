"""Why a request took as long as it did: one cause, and one sentence. Sans-IO.

Every possible cause is put into seconds: what it cost **beyond** what the work needs. The one that
cost most is told if that was a part of the whole worth telling; otherwise nothing was slow, and the
sentence says where the time went. No text of prompts or answers comes near this.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

TOLD_FROM_S = 0.05
TOLD_SHARE = 0.15
"""A cause is told from this part of the request's time on, and from ``TOLD_FROM_S``."""
SLOWER_THAN_PEERS = 0.5
"""A prefill worker is slow when it computes less than this part of its peers' tokens a second."""
JUDGED_TOKENS = 32
"""Of fewer tokens no rate can be told: every prefill has a fixed cost."""
LONG_STALL_GAPS = 5.0
"""A gap is a stall when it is so many times the usual one, and over ``TOLD_FROM_S``."""
LONG_PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of one request. Seconds are on the router's clock.

    Attributes:
        elapsed_s: Arrival to the last byte, or until now.
        phases_s: As ``baton_phase_seconds`` has them; they add up to ``elapsed_s`` at the end.
        worker_queue_s: The part of the phase ``queue`` that was spent at the worker.
        prefill_worker: That computed the prompt.
        prefill_s: That computing the prompt took there.
        peers_prefill_tokens_per_s: What the other workers are expected to do, 0 if there is none.
        held_elsewhere_tokens: Prompt tokens that the best other worker had in its cache.
        expected_step_s: A decode step of this worker as the router expected it; 0 if unknown.
        lost_to_repairs_s: First placement until the one that served, or until another prefill
            worker had the prompt.
        repairs: What was repaired, such as ``prefill-0 failed: the frame is damaged``.
        paused_s: Between the last token at one worker and the first at the next.
        moves: Why the answer went on at another worker, each time.
        stalls_s: The longest gaps between tokens, the longest first.
        stalled_before_token: The token that came after the longest one.
    """

    elapsed_s: float
    phases_s: Mapping[str, float] = field(default_factory=dict)
    state: str = "ended"
    error: str = ""
    worker_queue_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    prefill_s: float = 0.0
    peers_prefill_tokens_per_s: float = 0.0
    held_elsewhere_tokens: int = 0
    expected_step_s: float = 0.0
    lost_to_repairs_s: float = 0.0
    repairs: tuple[str, ...] = ()
    repaired_frames: int = 0
    transfer_bytes: int = 0
    preemptions: int = 0
    usual_gap_s: float = 0.0
    paused_s: float = 0.0
    moves: tuple[str, ...] = ()
    stalls_s: tuple[float, ...] = ()
    stalled_before_token: int = 0


class Why(NamedTuple):
    """``cause`` is a constant name for programs, ``sentence`` for people, ``cost_s`` its price."""

    cause: str
    sentence: str
    cost_s: float


def why(facts: Facts) -> Why:
    """The one cause that cost most."""
    found = sorted(_excesses(facts), key=lambda one: one.cost_s, reverse=True)
    if facts.error:
        because = f" Before that: {found[0].sentence}" if found and _worth(facts, found[0]) else ""
        return Why("failed", f"It failed: {facts.error}.{because}", facts.elapsed_s)
    if facts.state == "queued":
        told = f"It has waited in the router's queue for {_s(facts.elapsed_s)}."
        return Why("queued", told, facts.elapsed_s)
    if found and _worth(facts, found[0]):
        return found[0]
    if facts.state == "running" and "decode" not in facts.phases_s:
        return _no_token_yet(facts)
    return _work(facts)


def _no_token_yet(facts: Facts) -> Why:
    """Workers tell of a request when it has a token: until then there are two ways to wait."""
    placed_s = facts.phases_s.get("prefill", 0.0)
    told = f"It was placed {_s(placed_s)} ago and has no token: it waits for KV blocks at"
    told += f" {facts.decode_worker}, or {facts.prefill_worker} is not through its"
    return Why("no_token_yet", f"{told} {facts.prompt_tokens} prompt tokens.", placed_s)


def _worth(facts: Facts, one: Why) -> bool:
    return one.cost_s >= max(TOLD_FROM_S, TOLD_SHARE * facts.elapsed_s)


def _excesses(facts: Facts) -> Iterator[Why]:
    yield from _waiting(facts)
    yield from _repairing(facts)
    yield from _going_on(facts)
    yield from _computing(facts)
    yield from _moving(facts)
    yield from _writing(facts)
    yield from _serving(facts)


def _waiting(facts: Facts) -> Iterator[Why]:
    at_worker_s = facts.worker_queue_s
    at_router_s = max(facts.phases_s.get("queue", 0.0) - at_worker_s - facts.lost_to_repairs_s, 0.0)
    told = f"It waited {_s(at_router_s)} of {_s(facts.elapsed_s)} in the router's queue for a place"
    yield Why("queued", f"{told}: the fleet was full.", at_router_s)
    told = f"It waited {_s(at_worker_s)} of {_s(facts.elapsed_s)} at {facts.prefill_worker}"
    yield Why("worker_queue", f"{told}, behind other prompts.", at_worker_s)


def _repairing(facts: Facts) -> Iterator[Why]:
    if facts.repairs:
        times = f" ({len(facts.repairs)} repairs)" if len(facts.repairs) > 1 else ""
        told = f"{_s(facts.lost_to_repairs_s)} went into a repair{times}: {facts.repairs[-1]}."
        yield Why("repaired", told, facts.lost_to_repairs_s)


def _going_on(facts: Facts) -> Iterator[Why]:
    if facts.moves:
        times = f" ({len(facts.moves)} moves)" if len(facts.moves) > 1 else ""
        told = f"It paused for {_s(facts.paused_s)} while {facts.decode_worker} took it over{times}"
        yield Why("moved", f"{told}: {facts.moves[-1]}.", facts.paused_s)


def _computing(facts: Facts) -> Iterator[Why]:
    computed = max(facts.prompt_tokens - facts.cached_tokens, 1)
    if facts.prefill_s <= 0:
        return
    rate = computed / facts.prefill_s
    peers = facts.peers_prefill_tokens_per_s
    slow = computed >= JUDGED_TOKENS and rate < SLOWER_THAN_PEERS * peers
    if slow:
        told = f"{facts.prefill_worker} computed the prompt at {rate:.0f} tokens/s"
        told += f" where its peers do {peers:.0f}: {_s(facts.prefill_s)} for {computed} tokens."
        yield Why("slow_prefill_worker", told, facts.prefill_s - computed / peers)
    missed = facts.held_elsewhere_tokens - facts.cached_tokens
    if missed > 0:
        told = f"{facts.prefill_worker or 'its worker'} computed {missed} tokens of the prompt that"
        told += " another worker had in its cache."
        yield Why("no_prefix_hit", told, missed / max(rate, peers))
    if computed >= LONG_PROMPT_TOKENS and not slow:
        share = "nothing" if not facts.cached_tokens else f"{facts.cached_tokens} tokens"
        told = f"Computing {computed} tokens of its prompt took {_s(facts.prefill_s)} of"
        told += f" {_s(facts.elapsed_s)}: {share} of it was in the cache."
        # What missed elsewhere is told by that name.
        yield Why("long_prompt", told, facts.prefill_s - max(missed, 0) / max(rate, peers))


def _moving(facts: Facts) -> Iterator[Why]:
    exposed_s = facts.phases_s.get("transfer", 0.0)
    what = f"handing {facts.transfer_bytes / 2**20:.1f} MiB over"
    told = f"Its second token waited {_s(exposed_s)} for {what}"
    told += f" from {facts.prefill_worker} to {facts.decode_worker}"
    if facts.repaired_frames:
        told += f", {facts.repaired_frames} damaged frames of which were pulled again"
    yield Why("transfer", f"{told}.", exposed_s)


def _writing(facts: Facts) -> Iterator[Why]:
    usual_s = facts.usual_gap_s
    floor_s = max(LONG_STALL_GAPS * usual_s, TOLD_FROM_S)
    exposed_s = facts.phases_s.get("transfer", 0.0)
    # The wait for the hand-off is told by its own name.
    stalls_s = [
        gap_s
        for gap_s in facts.stalls_s
        if gap_s >= floor_s and not 0 < exposed_s <= gap_s <= exposed_s + floor_s
    ]
    stalled_s = sum(gap_s - usual_s for gap_s in stalls_s)
    if facts.preemptions:
        times = "once" if facts.preemptions == 1 else f"{facts.preemptions} times"
        told = f"{facts.decode_worker} ran out of KV blocks and preempted it {times}"
        told += f": its answer stood still for {_s(stalled_s)} while it was computed again."
        yield Why("preempted", told, stalled_s)
    elif stalls_s:
        told = f"Its answer stood still for {_s(max(stalls_s))} before token"
        told += f" {facts.stalled_before_token} at {facts.decode_worker} (usually"
        told += f" {_s(usual_s)} a token)"
        told += (
            f", and {len(stalls_s)} times in all, {_s(stalled_s)}." if len(stalls_s) > 1 else "."
        )
        yield Why("stalled", told, stalled_s)
    expected_s = facts.expected_step_s
    if expected_s > 0 and usual_s > 1.5 * expected_s:
        told = f"{facts.decode_worker} wrote a token every {_s(usual_s)} where the router expected"
        told += f" {_s(expected_s)}: more streams ran beside it, or it is slow."
        yield Why("slow_decode", told, facts.completion_tokens * (usual_s - expected_s))


def _serving(facts: Facts) -> Iterator[Why]:
    delivery_s = facts.phases_s.get("delivery", 0.0)
    told = f"The client took {_s(delivery_s)} to read the end of the answer."
    yield Why("slow_client", told, delivery_s)
    tokenize_s = facts.phases_s.get("tokenize", 0.0)
    told = f"Reading, checking and tokenizing the request took {_s(tokenize_s)} in the router."
    yield Why("tokenize", told, tokenize_s)
    rest_s = facts.phases_s.get("unattributed", 0.0)
    told = f"{_s(rest_s)} went by between router and worker and belong to no phase: look at the"
    yield Why("unattributed", f"{told} network and at the load of their hosts.", rest_s)


def _work(facts: Facts) -> Why:
    """Nothing was slow: where the time went all the same."""
    until = "in all" if facts.state == "ended" else "so far"
    told = f"Nothing was slow: {_s(facts.elapsed_s)} {until}"
    parts = {name: took_s for name, took_s in facts.phases_s.items() if took_s > 0}
    if not parts:
        return Why("nothing_slow", f"{told}.", 0.0)
    name = max(parts, key=lambda part: parts[part])
    does = {
        "prefill": f"computing {facts.prompt_tokens - facts.cached_tokens} tokens of the prompt",
        "decode": f"writing {facts.completion_tokens} tokens",
    }
    return Why("nothing_slow", f"{told}, {_s(parts[name])} of it {does.get(name, name)}.", 0.0)


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"
