"""Kinds of servers that a fleet attaches."""

from functools import partial

from baton.config.fleet_file import FleetConfig
from baton.engine.llama_server.attached import LlamaServers
from baton.engine.remote.attached import ServerKind
from baton.engine.vllm.attached import VllmServers
from baton.model.artifact import resolve_model


def kind_of(config: FleetConfig) -> ServerKind:
    """Return the servers of a lane's model, whose files are read without weights. Blocks.

    Raises:
        ModelError: The model is missing.
    """
    find = partial(resolve_model, config.model, allow_unsupported=True, with_weights=False)
    if config.pools.engine.external == "llama-server":
        return LlamaServers(find())
    reference = config.model.removeprefix("hub:").partition("@")[0]
    adapters = config.adapters.max_loaded * config.wants_adapters
    return VllmServers((*config.model_names, reference), find(), adapters, config.pools.hand_off)
