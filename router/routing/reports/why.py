"""Explains why a request took as long as it did: one cause, and one sentence. Sans-IO.

Every possible cause is converted into seconds: its cost **beyond** what the work needs. The most
expensive one is named if it is a relevant part of the total. Otherwise nothing was slow, and the
sentence names the longest phase. Texts of prompts and responses are never used.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

REPORTED_FROM_S = 0.05
REPORTED_SHARE = 0.15
"""Share of the request's time from which a cause is named, if it is over ``REPORTED_FROM_S``."""
SLOWER_THAN_PEERS = 0.5
"""Share of its peers' tokens per second below which a prefill worker is slow."""
JUDGED_TOKENS = 32
"""Number of tokens below which no rate is judged: every prefill has a fixed cost."""
LONG_STALL_GAPS = 5.0
"""Multiple of the usual gap that is a stall, if it is over ``REPORTED_FROM_S``."""
LONG_PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Known figures of one request. Seconds are on the router's clock.

    Attributes:
        phases_s: Phases of ``baton_phase_seconds``; at the end their sum is ``elapsed_s``.
        worker_queue_s: Part of the phase ``queue`` that was spent at the worker.
        prefix_wait_s: Part of the phase ``queue`` in which another request computed its prefix.
        held_elsewhere_tokens: Prompt tokens that the best other worker had in its cache.
        expected_step_s: Decode step that the router expected of this worker; 0 if unknown.
        lost_to_repairs_s: First placement until the one that served, or until another prefill
            worker had the prompt.
        repairs: Repairs, such as ``worker-0 failed: the frame is damaged``.
        moves: Reason of each migration.
        stalls_s: Longest gaps between tokens, sorted; the first precedes ``stalled_before_token``.
    """

    elapsed_s: float
    phases_s: Mapping[str, float] = field(default_factory=dict)
    state: str = "ended"
    error: str = ""
    worker_queue_s: float = 0.0
    prefix_wait_s: float = 0.0
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
    """Cause: ``cause`` is a constant for programs, ``sentence`` for people, ``cost_s`` its cost."""

    cause: str
    sentence: str
    cost_s: float


def why(facts: Facts) -> Why:
    """Return the most expensive cause."""
    causes = sorted(_excesses(facts), key=lambda cause: cause.cost_s, reverse=True)
    if facts.error:
        is_known = causes and _worth(facts, causes[0])
        because = f" Before that: {causes[0].sentence}" if is_known else ""
        return Why("failed", f"It failed: {facts.error}.{because}", facts.elapsed_s)
    if facts.state == "queued":
        text = f"It has waited in the router's queue for {_s(facts.elapsed_s)}."
        return Why("queued", text, facts.elapsed_s)
    if causes and _worth(facts, causes[0]):
        return causes[0]
    if facts.state == "running" and "decode" not in facts.phases_s:
        return _no_token_yet(facts)
    return _work(facts)


def _no_token_yet(facts: Facts) -> Why:
    """Explain a request without a token, of which its workers report nothing yet."""
    placed_s = facts.phases_s.get("prefill", 0.0)
    text = f"It was placed {_s(placed_s)} ago and has no token: it waits for KV blocks at"
    text += f" {facts.decode_worker}, or {facts.prefill_worker} is still computing its"
    return Why("no_token_yet", f"{text} {facts.prompt_tokens} prompt tokens.", placed_s)


def _worth(facts: Facts, cause: Why) -> bool:
    return cause.cost_s >= max(REPORTED_FROM_S, REPORTED_SHARE * facts.elapsed_s)


def _excesses(facts: Facts) -> Iterator[Why]:
    yield from _waiting(facts)
    yield from _repairing(facts)
    yield from _migrating(facts)
    yield from _computing(facts)
    yield from _transferring(facts)
    yield from _decoding(facts)
    yield from _serving(facts)


def _waiting(facts: Facts) -> Iterator[Why]:
    at_worker_s = facts.worker_queue_s
    for_prefix_s = facts.prefix_wait_s
    elsewhere_s = at_worker_s + for_prefix_s + facts.lost_to_repairs_s
    at_router_s = max(facts.phases_s.get("queue", 0.0) - elsewhere_s, 0.0)
    text = f"It waited {_s(at_router_s)} of {_s(facts.elapsed_s)} in the router's queue for a place"
    yield Why("queued", f"{text}: the fleet was full.", at_router_s)
    text = f"It waited {_s(for_prefix_s)} of {_s(facts.elapsed_s)} in the router, while another"
    yield Why("prefix_wait", f"{text} request computed the prefix of its prompt.", for_prefix_s)
    text = f"It waited {_s(at_worker_s)} of {_s(facts.elapsed_s)} at {facts.prefill_worker}"
    yield Why("worker_queue", f"{text}, behind other prompts.", at_worker_s)
    reserved_s = facts.phases_s.get("reservation", 0.0)
    text = f"It waited {_s(reserved_s)} of {_s(facts.elapsed_s)} at {facts.decode_worker}"
    yield Why("reservation", f"{text} for KV blocks and a place in its batch.", reserved_s)
    shared_s = facts.phases_s.get("shared_steps", 0.0)
    text = f"It waited {_s(shared_s)} of {_s(facts.elapsed_s)} between its own chunks, while"
    text += f" {facts.prefill_worker} computed other requests in the same steps."
    yield Why("shared_steps", text, shared_s)


def _repairing(facts: Facts) -> Iterator[Why]:
    if facts.repairs:
        times = f" ({len(facts.repairs)} repairs)" if len(facts.repairs) > 1 else ""
        text = f"A repair took {_s(facts.lost_to_repairs_s)}{times}: {facts.repairs[-1]}."
        yield Why("repaired", text, facts.lost_to_repairs_s)


def _migrating(facts: Facts) -> Iterator[Why]:
    if facts.moves:
        times = f" ({len(facts.moves)} migrations)" if len(facts.moves) > 1 else ""
        text = f"It paused for {_s(facts.paused_s)} until {facts.decode_worker} resumed it{times}"
        yield Why("moved", f"{text}: {facts.moves[-1]}.", facts.paused_s)


def _computing(facts: Facts) -> Iterator[Why]:
    computed = max(facts.prompt_tokens - facts.cached_tokens, 1)
    if facts.prefill_s <= 0:
        return
    rate = computed / facts.prefill_s
    peers = facts.peers_prefill_tokens_per_s
    slow = computed >= JUDGED_TOKENS and rate < SLOWER_THAN_PEERS * peers
    if slow:
        text = f"{facts.prefill_worker} computed the prompt at {rate:.0f} tokens/s, its peers do"
        text += f" {peers:.0f}: {_s(facts.prefill_s)} for {computed} tokens."
        yield Why("slow_prefill_worker", text, facts.prefill_s - computed / peers)
    missed = facts.held_elsewhere_tokens - facts.cached_tokens
    if missed > 0:
        text = f"{facts.prefill_worker or 'its worker'} computed {missed} tokens of the prompt that"
        text += " another worker had in its cache."
        yield Why("no_prefix_hit", text, missed / max(rate, peers))
    if computed >= LONG_PROMPT_TOKENS and not slow:
        share = "nothing" if not facts.cached_tokens else f"{facts.cached_tokens} tokens"
        text = f"Computing {computed} tokens of its prompt took {_s(facts.prefill_s)} of"
        text += f" {_s(facts.elapsed_s)}: {share} of it was in the cache."
        # Tokens cached elsewhere are a cause of their own.
        yield Why("long_prompt", text, facts.prefill_s - max(missed, 0) / max(rate, peers))


def _transferring(facts: Facts) -> Iterator[Why]:
    exposed_s = facts.phases_s.get("transfer", 0.0)
    text = f"Its second token waited {_s(exposed_s)} for the transfer of"
    text += f" {facts.transfer_bytes / 2**20:.1f} MiB"
    text += f" from {facts.prefill_worker} to {facts.decode_worker}"
    if facts.repaired_frames:
        text += f", {facts.repaired_frames} damaged frames of which were pulled again"
    yield Why("transfer", f"{text}.", exposed_s)


def _decoding(facts: Facts) -> Iterator[Why]:
    usual_s = facts.usual_gap_s
    floor_s = max(LONG_STALL_GAPS * usual_s, REPORTED_FROM_S)
    exposed_s = facts.phases_s.get("transfer", 0.0)
    # The wait for the hand-off is a cause of its own.
    stalls_s = [
        gap_s
        for gap_s in facts.stalls_s
        if gap_s >= floor_s and not 0 < exposed_s <= gap_s <= exposed_s + floor_s
    ]
    stalled_s = sum(gap_s - usual_s for gap_s in stalls_s)
    if facts.preemptions:
        times = "once" if facts.preemptions == 1 else f"{facts.preemptions} times"
        text = f"{facts.decode_worker} ran out of KV blocks and preempted it {times}"
        text += f": its response stalled for {_s(stalled_s)} while it was computed again."
        yield Why("preempted", text, stalled_s)
    elif stalls_s:
        text = f"Its response stalled for {_s(max(stalls_s))} before token"
        text += f" {facts.stalled_before_token} at {facts.decode_worker} (usually"
        text += f" {_s(usual_s)} a token)"
        text += f", {len(stalls_s)} times for {_s(stalled_s)} in total" if stalls_s[1:] else ""
        yield Why("stalled", f"{text}.", stalled_s)
    expected_s = facts.expected_step_s
    if expected_s > 0 and usual_s > 1.5 * expected_s:
        text = f"{facts.decode_worker} generated a token every {_s(usual_s)}, the router expected"
        text += f" {_s(expected_s)}: more streams ran beside it, or it is slow."
        yield Why("slow_decode", text, facts.completion_tokens * (usual_s - expected_s))


def _serving(facts: Facts) -> Iterator[Why]:
    delivery_s = facts.phases_s.get("delivery", 0.0)
    text = f"The client took {_s(delivery_s)} to read the end of the response."
    yield Why("slow_client", text, delivery_s)
    tokenize_s = facts.phases_s.get("tokenize", 0.0)
    text = f"Reading, checking and tokenizing the request took {_s(tokenize_s)} in the router."
    yield Why("tokenize", text, tokenize_s)
    rest_s = facts.phases_s.get("unattributed", 0.0)
    text = f"{_s(rest_s)} between router and worker belong to no phase: check the network and"
    yield Why("unattributed", f"{text} the load of their hosts.", rest_s)
    between_s = facts.phases_s.get("between_workers", 0.0)
    text = f"{_s(between_s)} passed between {facts.decode_worker} and {facts.prefill_worker} beyond"
    text += " queueing and computing: check the network and the load of their hosts."
    yield Why("between_workers", text, between_s)


def _work(facts: Facts) -> Why:
    """Return the longest phase of a request in which nothing was slow."""
    until = "in total" if facts.state == "ended" else "so far"
    text = f"Nothing was slow: {_s(facts.elapsed_s)} {until}"
    parts = {name: took_s for name, took_s in facts.phases_s.items() if took_s > 0}
    if not parts:
        return Why("nothing_slow", f"{text}.", 0.0)
    name = max(parts, key=lambda part: parts[part])
    does = {
        "prefill": f"computing {facts.prompt_tokens - facts.cached_tokens} tokens of the prompt",
        "decode": f"generating {facts.completion_tokens} tokens",
    }
    return Why("nothing_slow", f"{text}, {_s(parts[name])} of it {does.get(name, name)}.", 0.0)


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"
