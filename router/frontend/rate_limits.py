"""Headers about the limits of a tenant, as OpenAI's and Anthropic's clients read them."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

from router.tenants.quota import Standing

Headers = list[tuple[bytes, bytes]]


def openai_headers(standings: Mapping[str, Standing]) -> Headers:
    """Return OpenAI's ``x-ratelimit-*`` headers, whose times are such as ``6m0s``."""
    headers: Headers = []
    for name, standing in _named(standings):
        for field, value in (
            ("limit", str(standing.limit)),
            ("remaining", str(standing.remaining)),
            ("reset", spelled(standing.reset_ns)),
        ):
            headers.append((f"x-ratelimit-{field}-{name}".encode(), value.encode()))
    return headers


def anthropic_headers(standings: Mapping[str, Standing], now: datetime | None = None) -> Headers:
    """Return Anthropic's ``anthropic-ratelimit-*`` headers, whose times are by RFC 3339."""
    headers: Headers = []
    now = now or datetime.now(UTC)
    for name, standing in _named(standings):
        reset = now + timedelta(seconds=-(-standing.reset_ns // 10**9))
        for field, value in (
            ("limit", str(standing.limit)),
            ("remaining", str(standing.remaining)),
            ("reset", reset.strftime("%Y-%m-%dT%H:%M:%SZ")),
        ):
            headers.append((f"anthropic-ratelimit-{name}-{field}".encode(), value.encode()))
    return headers


def spelled(duration_ns: int) -> str:
    """Return a duration as OpenAI spells it: ``12ms``, ``7.5s``, ``6m0s``, ``2h3m0s``."""
    duration_ms = -(-duration_ns // 1_000_000)
    if duration_ms < 1000:
        return f"{duration_ms}ms"
    minutes, rest_ms = divmod(duration_ms, 60_000)
    if not minutes:
        return f"{rest_ms / 1000:g}s"
    hours, minutes = divmod(minutes, 60)
    seconds = f"{minutes}m{rest_ms // 1000}s"
    return f"{hours}h{seconds}" if hours else seconds


def _named(standings: Mapping[str, Standing]) -> Iterator[tuple[str, Standing]]:
    """Yield the limit of requests, and the limit of tokens of which less is left."""
    if "rpm" in standings:
        yield "requests", standings["rpm"]
    tokens = [standings[kind] for kind in ("tpm", "tpd", "budget") if kind in standings]
    if tokens:
        yield "tokens", min(tokens, key=lambda standing: standing.remaining)
