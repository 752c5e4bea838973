"""Properties of a vLLM that are read before its first request, and the errors about them."""

from dataclasses import replace

import pytest

from baton.engine.remote.attached import UnfitServerError
from baton.engine.remote.http import HttpOrigin
from baton.engine.vllm.attached import examine
from baton.types.errors import UnavailableError
from benchmarks.emulated_vllm import EmulatedServer, Emulation

LIKE = Emulation(model="org/smol", root="/models/smol")


async def examined(emulation: Emulation, key: str = "", **more: object):  # type: ignore[no-untyped-def]
    server = EmulatedServer(emulation)
    url = await server.start()
    options = {"names": ["smol"], "adapters": False, **more}
    try:
        return await examine(HttpOrigin.of_url(url, key), **options)  # type: ignore[arg-type]
    finally:
        await server.stop()


async def test_the_properties_are_read() -> None:
    facts = await examined(replace(LIKE, ranks=2, key="k"), "k")
    assert (facts.engine, facts.model, facts.root) == ("vllm/0.32.0", "org/smol", "/models/smol")
    assert (facts.block_tokens, facts.blocks, facts.ranks) == (32, 2048, 2)
    assert facts.max_context_tokens == 8192


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"missing": frozenset(["--enable-scale-out"])}, "add `--enable-scale-out`"),
        (
            {"missing": frozenset(["--enable-prompt-tokens-details"])},
            "add `--enable-prompt-tokens-details`",
        ),
        ({"block_tokens": 24}, "add `--block-size`"),
        ({"key": "k"}, "`key_file`.*`--api-key`"),
        ({"model": "other", "root": "other"}, "--served-model-name smol"),
    ],
)
async def test_what_a_server_lacks_is_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(UnfitServerError, match=named):
        await examined(replace(LIKE, **changes))  # type: ignore[arg-type]


async def test_adapters_need_a_server_that_loads_them() -> None:
    with pytest.raises(UnfitServerError, match="--enable-lora"):
        await examined(LIKE, adapters=True)


async def test_a_server_without_a_prefix_cache_has_no_blocks() -> None:
    facts = await examined(replace(LIKE, missing=frozenset(["--no-enable-prefix-caching"])))
    assert facts.blocks == 0


async def test_an_unhealthy_server_is_not_unfit() -> None:
    with pytest.raises(UnavailableError, match="503"):
        await examined(replace(LIKE, fault="dead"))
