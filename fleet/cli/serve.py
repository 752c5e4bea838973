"""`baton serve`: a fleet in front of servers that are running, without a fleet file."""

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer
import yaml

from baton.config.attached import AttachedServer
from baton.config.secrets import SecretError
from baton.engine.remote.attached import UnfitServerError
from baton.engine.remote.http import HttpOrigin
from baton.engine.vllm.attached import ModelCard, last_part, read_card
from baton.types.errors import UnavailableError
from fleet.attached.sources import entry_of
from fleet.cli import lifecycle
from fleet.cli.common import fail, note
from fleet.local import state as fleet_state

_FLEET = "attached"
_RETRY_S = 0.5
_TELL_EVERY_S = 10.0


def serve(
    attach: Annotated[
        list[str],
        typer.Option(help="URL of a running vLLM server. Several: give the option again."),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="Model as in a fleet file, for its tokenizer; its weights are not needed. "
            "Default: the folder that the first server has loaded."
        ),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key that the servers require.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the router. Default: 8000.")] = None,
) -> None:
    """Put Baton in front of running vLLM servers, in the foreground; Ctrl-C ends only Baton.

    Routes by cached prefixes, with admission, traces, and responses that continue when a server
    is lost. With a fleet file, `baton up` does the same, for servers that come and go.

    Example: `baton serve --attach http://gpu-1:8000 --attach http://gpu-2:8000`.
    """
    lifecycle.up(file=file_of(attach, model, key_file), port=port)


def file_of(attach: list[str], model: str | None, key_file: Path | None) -> Path:
    """Write the fleet file of running vLLM servers, of which the first one is awaited."""
    key = str(key_file.absolute()) if key_file is not None else None
    try:
        servers = [AttachedServer(url=url, key_file=key) for url in dict.fromkeys(attach)]
        first = entry_of(servers[0])
        card = asyncio.run(_card(HttpOrigin.of_url(first.url, first.key)))
    except (ValueError, SecretError, UnfitServerError) as error:
        fail(str(error))
    if model is None and not Path(card.root or "").is_dir():
        fail(
            f"{first.url} has loaded {card.root or card.id}, which is no folder here: give the "
            "model with --model, such as `--model hub:ORG/NAME`, for its tokenizer"
        )
    reference = model or card.root or ""
    names = dict.fromkeys((last_part(card.id), card.id))
    config = {
        "fleet": _FLEET,
        "model": reference if ":" in reference else str(Path(reference).absolute()),
        "served_model_name": list(names),
        "numerics": "fast",
        **({"max_context_tokens": card.max_model_len} if card.max_model_len else {}),
        "pools": {
            "engine": "vllm",
            "vllm": {"servers": [one.model_dump(exclude_defaults=True) for one in servers]},
        },
    }
    file = fleet_state.state_folder(_FLEET) / "fleet.yaml"
    fleet_state.write_whole(file, yaml.safe_dump(config, sort_keys=False).encode())
    return file


async def _card(origin: HttpOrigin) -> ModelCard:
    """Return the model that a server serves, as soon as it responds."""
    told_s = 0.0
    while True:
        try:
            return await read_card(origin)
        except UnavailableError as error:
            if time.monotonic() - told_s > _TELL_EVERY_S:
                told_s = time.monotonic()
                note(f"waiting for a server: {error.message}")
        await asyncio.sleep(_RETRY_S)
