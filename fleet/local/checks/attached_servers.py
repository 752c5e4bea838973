"""Check of the servers that a fleet attaches, for `baton doctor`."""

import asyncio

from baton.config.fleet_file import FleetConfig
from baton.engine.remote.http import HttpOrigin
from baton.engine.vllm.attached import default_events, examine
from baton.types.errors import BatonError
from fleet.attached.sources import ServerEntry, ServerSource, names_of
from fleet.local.checks.preflight import Finding


def attached_servers(config: FleetConfig) -> list[Finding]:
    """Return what each server is, or lacks. Each computes one token."""
    return [one for lane in config.lanes for one in asyncio.run(_of_lane(lane))]


async def _of_lane(config: FleetConfig) -> list[Finding]:
    if config.pools.servers is None:
        return []
    try:
        entries = await ServerSource(config.pools.servers).read()
    except (OSError, ValueError) as error:
        return [Finding("servers", False, str(error))]
    if not entries:
        return [Finding("servers", False, "there are none now")]
    return list(await asyncio.gather(*(_checked(config, entry) for entry in entries)))


async def _checked(config: FleetConfig, entry: ServerEntry) -> Finding:
    origin = HttpOrigin.of_url(entry.url, entry.key, entry.address)
    try:
        facts = await examine(
            origin,
            names_of(config),
            adapters=config.wants_adapters,
            hand_off=config.pools.hand_off,
        )
    except BatonError as error:
        return Finding(entry.label, False, error.message)
    events = entry.events
    if events is None:
        events = await default_events(entry.host, facts)
    prefixes = "exact, by KV events" if events else "approximate, without KV events"
    text = (
        f"{facts.engine}, {facts.model}, {facts.max_context_tokens} tokens of context, "
        f"{facts.blocks} blocks of {facts.block_tokens}; cached prefixes are {prefixes}"
    )
    return Finding(entry.label, True, text)
