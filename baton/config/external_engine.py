"""Fleet file sections on engines that are installed by themselves: vLLM and llama-server."""

import itertools
import operator
from collections.abc import Collection
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from baton.config.attached import AttachedServers
from baton.config.network import AbsoluteFile
from baton.config.section import Section

ExternalKind = Literal["vllm", "llama-server"]
"""Engines of which the fleet file has a section in ``pools``."""

# arguments of `vllm serve` that a worker sets itself, and where the fleet file has them
TAKEN = {
    "--host": "workers reach vLLM by a socket of their own: remove it",
    "--port": "workers reach vLLM by a socket of their own: remove it",
    "--uds": "workers reach vLLM by a socket of their own: remove it",
    "--api-key": "workers reach vLLM by a socket of their own: use `api_keys` of the fleet file",
    "--served-model-name": "use `served_model_name` of the fleet file",
    "--model": "use `model` of the fleet file",
    "--max-model-len": "use `max_context_tokens` of the fleet file",
    "--max-num-seqs": "use `max_batch_requests` of the fleet file",
    "--chat-template": "use `chat_template` of the fleet file",
    "--tokens-only": "it disables structured output: remove it",
    "--lora-modules": "use `adapters.load` of the fleet file",
    "--kv-events-config": "workers set it: remove it",
    "--kv-transfer-config": "use `hand_off`",
    "--scheduling-policy": "workers set it to `priority`: remove it",
    "--structured-outputs-config": "workers set its backend to `guidance`: remove it",
    "--no-enable-prefix-caching": "routers place requests by cached prefixes: remove it",
    "--max-logprobs": "workers set it: remove it",
}

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM
_TENSOR = ("--tensor-parallel-size", "-tp")
_PIPELINE = ("--pipeline-parallel-size", "-pp")


class VllmTiersConfig(Section):
    """Storage of each vLLM worker for KV that its pool has no room for.

    Attributes:
        memory_mb: Host memory per worker in MB, in addition to its pool.
    """

    memory_mb: Annotated[int, Field(ge=0, le=16_777_216)] = 0


class VllmConfig(Section):
    """vLLM of all workers, see ``docs/guide/vllm.md``.

    Attributes:
        python: Absolute path, on every host, of an interpreter with vLLM.
        args: Further arguments of ``vllm serve``, one word each.
        prefill_args: Arguments of prefill workers behind ``args``, such as another width.
        gpus: GPUs of each worker, which Ray reserves; 0: vLLM's build is for CPUs.
        hand_off: How prefill workers hand KV over to decode workers: ``nixl`` is vLLM's
            NixlConnector, which needs the package ``nixl`` beside vLLM. ``baton`` is experimental:
            Baton's own transports, for vLLM 0.32 without pipeline parallelism. Without it there are
            no prefill workers.
        kv_tiers: KV storage below the GPUs' memory, by vLLM's OffloadingConnector.
        batch_invariant: Turn vLLM's batch-invariant mode on, which ``numerics: exact`` needs.
        servers: Running servers to attach, instead of ``python``. See
            ``docs/guide/attached.md``.
    """

    python: AbsoluteFile | None = None
    args: Annotated[tuple[str, ...], Field(max_length=200)] = ()
    prefill_args: Annotated[tuple[str, ...], Field(max_length=200)] = ()
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    hand_off: Literal["nixl", "baton"] | None = None
    kv_tiers: VllmTiersConfig = VllmTiersConfig()
    batch_invariant: bool = False
    servers: AttachedServers | None = None

    @model_validator(mode="after")
    def _starts_or_attaches(self) -> Self:
        if (self.servers is None) == (self.python is None):
            raise ValueError(
                "needs `python: FILE`, with which vLLM is started, or `servers: …`, which are "
                "running: one of them"
            )
        own = self.model_fields_set & {
            "args",
            "prefill_args",
            "gpus",
            "kv_tiers",
            "batch_invariant",
        }
        if self.servers is not None and own:
            raise ValueError(f"{min(own)}: not for `servers`, which are running already")
        if self.servers is not None and self.hand_off == "baton":
            raise ValueError("hand_off: baton is not for `servers`: use `nixl`")
        roles = {server.role for server in self.servers.known} if self.servers is not None else ()
        if "prefill" in roles and self.hand_off is None:
            raise ValueError("servers: role: prefill needs `hand_off: nixl`")
        return self

    @model_validator(mode="after")
    def _tiers_are_of_gpus(self) -> Self:
        if self.kv_tiers.memory_mb and not self.gpus:
            raise ValueError(
                "kv_tiers: vLLM's OffloadingConnector copies from GPUs, and refuses to start on "
                "CPUs: set `gpus`, or remove it"
            )
        if self.kv_tiers.memory_mb and self.hand_off is not None:
            raise ValueError("kv_tiers cannot be combined with `hand_off`: remove one of them")
        return self

    @field_validator("args", "prefill_args", mode="before")
    @classmethod
    def _words_to_tuple(cls, value: object) -> object:
        """Accept the numbers that YAML reads from a list of words."""
        if not isinstance(value, list):
            raise ValueError("must be a list of words")
        return tuple(str(one) if isinstance(one, int | float) else one for one in value)

    @model_validator(mode="after")
    def _refuse_taken_arguments(self) -> Self:
        for argument in (*self.args, *self.prefill_args):
            name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
            if name in TAKEN:
                raise ValueError(f"args: {name}: {TAKEN[name]}")
        return self

    @property
    def serves_adapters(self) -> bool:
        """True if the workers serve LoRA adapters."""
        return self.servers is not None or any(
            word.replace("_", "-") == "--enable-lora" for word in self.args
        )

    def args_of(self, role: str) -> tuple[str, ...]:
        """Return the arguments of the workers of a role."""
        return self.args + self.prefill_args if role == "prefill" else self.args

    @model_validator(mode="after")
    def _copies_of_whole_layers(self) -> Self:
        if self.hand_off == "baton" and max(self._numbers(_PIPELINE)) > 1:
            raise ValueError(
                "hand_off: baton copies no KV of pipeline stages: use `nixl`, or no "
                "--pipeline-parallel-size"
            )
        return self

    @model_validator(mode="after")
    def _gpus_suffice(self) -> Self:
        ranks = list(map(operator.mul, self._numbers(_TENSOR), self._numbers(_PIPELINE)))
        if ranks[0] != ranks[1] and (self.hand_off != "baton" or self.batch_invariant):
            raise ValueError(
                "prefill_args: workers of unequal width need `hand_off: baton`, and no "
                "`batch_invariant`, whose sums depend on the width"
            )
        width = max(ranks)
        if self.gpus and self.gpus < width:
            raise ValueError(f"gpus: {self.gpus}, but the parallel sizes in args need {width}")
        return self

    def _numbers(self, names: Collection[str]) -> list[int]:
        """Return an argument's value for workers of each role."""
        return [_number(self.args_of(role), names) for role in ("prefill", "decode")]


def _number(args: Collection[str], names: Collection[str]) -> int:
    """Return the last value of an argument, or 1 without a number."""
    found = "1"
    for word, following in itertools.pairwise((*args, "")):
        name, has_value, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if has_value else following
    return int(found) if found.isdecimal() else 1  # vLLM refuses what is no number


class LlamaServerConfig(Section):
    """Attached servers of llama.cpp, see ``docs/guide/llama-server.md``.

    Attributes:
        servers: The servers. They have neither roles nor KV events.
    """

    servers: AttachedServers

    @model_validator(mode="after")
    def _has_neither_roles_nor_events(self) -> Self:
        for entry in self.servers.known:
            if entry.role != "decode" or entry.events or entry.replay:
                raise ValueError(
                    f"servers: {entry.url}: llama-server has no role `prefill` and no KV events: "
                    "remove these keys"
                )
        return self


def adapter_rank_limit(most: int) -> int:
    """Return the value of vLLM's ``--max-lora-rank`` for ranks up to ``most``, at most 512."""
    return next(rank for rank in _LORA_RANKS if rank >= most)


def refuse_unsupported(kind: str, requested: dict[str, bool]) -> None:
    """Raise ``ValueError`` for the first feature that a fleet with an external engine requests.

    Args:
        kind: Name of the engine.
        requested: Fleet file keys, with the fix behind them, and whether the file sets them.
    """
    for key in (key for key, is_set in requested.items() if is_set):
        raise ValueError(f"{key} (pools.engine is {kind})")
