"""`baton serve`: a fleet without a fleet file, with a model or in front of running servers."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from pydantic import ValidationError

from baton.config.attached import AttachedServer
from baton.config.section import problem_of
from baton.engine.remote.attached import UnfitServerError
from baton.engine.remote.http import HttpOrigin
from baton.engine.vllm.attached import ModelCard, last_part, read_cards
from baton.folders import replace_file
from baton.types.errors import UnavailableError
from fleet.attached.sources import entry_of
from fleet.cli import lifecycle
from fleet.cli.common import exits_on, fail, note
from fleet.cli.vllm_flags import FlagError, keys_of, reference, text_of, whole
from fleet.local import state as fleet_state

_ATTACHED = "attached"
_RETRY_S = 0.5
_TELL_EVERY_S = 10.0


def serve(
    model_and_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL [FLAGS]", help="Model, then flags of `vllm serve`."),
    ] = None,
    attach: Annotated[
        list[str] | None,
        typer.Option(help="URL of a running vLLM server. Several: give the option again."),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key that the attached servers require.")
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(
            help="Python interpreter of vLLM, which runs the model. Default: Baton's engine."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the fleet file that this stands for, and exit.")
    ] = False,
) -> None:
    """Serve a model without a fleet file, in the foreground; Ctrl-C stops it.

    Understands the flags of `vllm serve` that Baton has a key for, such as --port, --max-model-len,
    --max-num-seqs, --max-num-batched-tokens, --tensor-parallel-size, --data-parallel-size,
    --quantization, --lora-modules, --served-model-name and --api-key. With --vllm all other flags
    are vLLM's.

    With --attach it puts Baton in front of running vLLM servers, which it never ends. MODEL is then
    for the tokenizer; default: the folder that the first server has loaded.

    Examples: `baton serve Qwen/Qwen3-0.6B --max-model-len 8k --port 9000`,
    `baton serve --attach http://gpu-1:8000 --attach http://gpu-2:8000`.
    """
    words = model_and_flags or []
    with exits_on(FlagError):
        model, keys, args = keys_of(words, by_vllm=vllm is not None)
        if attach:
            config = of_servers(attach, model, key_file) | keys
        elif model is None:
            fail("give a model, such as `baton serve ORG/NAME`, or --attach URL")
        else:
            python = str(vllm.absolute()) if vllm is not None else None
            config = {"fleet": "serve", "model": model, **whole(keys, python, args)}
        text = text_of(config)
    if dry_run:
        typer.echo(text, nl=False)
        return
    lifecycle.up(file=_written(config["fleet"], text))


def file_of(attach: list[str], model: str | None, key_file: Path | None) -> Path:
    """Write the fleet file of running vLLM servers, of which one is awaited."""
    return _written(_ATTACHED, text_of(of_servers(attach, reference(model), key_file)))


def of_servers(attach: list[str], model: str | None, key_file: Path | None) -> dict[str, Any]:
    """Return the fleet file keys of running vLLM servers, of which one is awaited."""
    key = str(key_file.absolute()) if key_file is not None else None
    try:
        servers = {AttachedServer(url=url, key_file=key): None for url in attach}
    except ValidationError as error:
        fail(f"--attach: {problem_of(error.errors()[0])}, such as http://gpu-1:8000")
    with exits_on(ValueError, UnfitServerError):
        entries = list(map(entry_of, servers))
        if problem := entries[0].problem:
            raise ValueError(problem)
        card = asyncio.run(_card([HttpOrigin.of_url(one.url, one.key) for one in entries]))
    if model is None and not Path(card.root or "").is_dir():
        fail(
            f"the servers have loaded {card.root or card.id}, which is no folder here: give the "
            "model with --model, such as `--model hub:ORG/NAME`, for its tokenizer"
        )
    names = dict.fromkeys((last_part(card.id), card.id))
    return {
        "fleet": _ATTACHED,
        "model": model or card.root,
        "served_model_name": list(names),
        "numerics": "fast",
        **({"max_context_tokens": card.max_model_len} if card.max_model_len else {}),
        "pools": {
            "engine": "vllm",
            "vllm": {"servers": [one.model_dump(exclude_defaults=True) for one in servers]},
        },
    }


def _written(fleet: str, text: str) -> Path:
    """Write the file of a fleet into its folder."""
    file = fleet_state.state_folder(fleet) / "fleet.yaml"
    replace_file(file, text.encode(), durable=True)
    return file


async def _card(origins: Sequence[HttpOrigin]) -> ModelCard:
    """Return the model of the servers as soon as one responds, with their longest context."""
    told_s = 0.0
    while True:
        answers = await asyncio.gather(*map(read_cards, origins), return_exceptions=True)
        if cards := [answer[0] for answer in answers if isinstance(answer, list)]:
            longest = max(card.max_model_len or 0 for card in cards)
            return msgspec.structs.replace(cards[0], max_model_len=longest or None)
        for error in answers:
            if isinstance(error, Exception) and not isinstance(error, UnavailableError):
                raise error
        if time.monotonic() - told_s > _TELL_EVERY_S:
            told_s = time.monotonic()
            note(f"waiting for a server: {answers[0]}")
        await asyncio.sleep(_RETRY_S)
