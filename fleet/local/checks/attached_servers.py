"""Check of the servers that a fleet attaches, for `baton doctor`."""

import asyncio

from baton.config.fleet_file import FleetConfig
from baton.engine.remote.attached import ServerKind
from baton.engine.remote.http import HttpOrigin
from baton.model.model_config import ModelError
from baton.types.errors import BatonError
from fleet.attached.process import kind_of
from fleet.attached.sources import ServerEntry, ServerSource
from fleet.local.checks.preflight import Finding


def attached_servers(config: FleetConfig) -> list[Finding]:
    """Return what each server is, or lacks. Each computes one token."""
    return [one for lane in config.lanes for one in asyncio.run(_of_lane(lane))]


async def _of_lane(config: FleetConfig) -> list[Finding]:
    if config.pools.servers is None:
        return []
    try:
        entries = await ServerSource(config.pools.servers).read()
        kind = await asyncio.to_thread(kind_of, config)
    except (OSError, ValueError, ModelError) as error:
        return [Finding("servers", False, str(error))]
    if not entries:
        return [Finding("servers", False, "there are none now")]
    return list(await asyncio.gather(*(_checked(kind, entry) for entry in entries)))


async def _checked(kind: ServerKind, entry: ServerEntry) -> Finding:
    if entry.problem:
        return Finding(entry.label, False, entry.problem)
    origin = HttpOrigin.of_url(entry.url, entry.key, entry.address)
    try:
        facts = await kind.examine(origin)
        events = await kind.events(origin, facts, entry.events)
    except BatonError as error:
        return Finding(entry.label, False, error.message)
    prefixes = "exact, by KV events" if events else "approximate, as no KV events arrive"
    text = (
        f"{facts.engine}, {facts.model}, {facts.max_context_tokens} tokens of context, "
        f"{facts.blocks} blocks of {facts.block_tokens}; cached prefixes are {prefixes}"
    )
    return Finding(entry.label, True, text)
