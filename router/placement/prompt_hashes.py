"""Requests as the wire carries them."""

from collections.abc import Sequence

from batonpb.common_pb2 import Adapter, Capabilities, LogitBias
from batonpb.common_pb2 import SamplingParams as WireSampling
from batonpb.decode_pb2 import PrefillTarget

from engine.core.params import AdapterRef
from engine.core.block_hashes import block_names, name_seed
from engine.core.params import SamplingParams
from router.requests.request import GenerationRequest
from router.workers.link import WorkerLink
from router.workers.table import Slot, format_id, kv_format

_KEPT_SEEDS = 1024


def sampling(params: SamplingParams) -> WireSampling:
    """Sampling parameters, every field filled."""
    return WireSampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        n=params.n,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        logit_bias=[LogitBias(token_id=token, bias=bias) for token, bias in params.logit_bias],
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        prompt_logprobs=0 if params.prompt_logprobs is None else params.prompt_logprobs + 1,
        grammar=params.grammar,
    )


def target(link: WorkerLink) -> PrefillTarget:
    """A prefill worker, as the decode worker needs to know it."""
    return PrefillTarget(
        worker_id=link.worker_id, incarnation=link.incarnation, address=link.address
    )


def adapter(ref: AdapterRef | None) -> Adapter | None:
    """A LoRA adapter, as the workers need to know it."""
    if ref is None:
        return None
    return Adapter(name=ref.name, digest=bytes.fromhex(ref.digest), path=ref.path)


class NameCache:
    """Seeds of block names by KV format, adapter and scope: a tenant with a salt (bounded)."""

    def __init__(self) -> None:
        self._seeds: dict[tuple[str, str, str], bytes] = {}

    def seed(self, request: GenerationRequest, capabilities: Capabilities) -> bytes:
        """The seed of the request's block names on a worker of these capabilities."""
        digest = request.adapter_digest
        key = (format_id(capabilities), digest, request.cache_scope)
        known = self._seeds.get(key)
        if known is None:
            if len(self._seeds) >= _KEPT_SEEDS:
                self._seeds.clear()
            known = self._seeds[key] = name_seed(
                capabilities.weights_digest,
                kv_format(capabilities),
                capabilities.numerics_id,
                digest,
                request.cache_scope,
            )
        return known

    def of(self, request: GenerationRequest, slots: Sequence[Slot]) -> list[bytes]:
        """Names of the prompt's full blocks.

        The workers of a fleet share one format. Where some differ (a rolling upgrade), the first
        one's names find nothing on the others, which is safe.
        """
        link = slots[0].link
        if link is None:
            return []
        return block_names(self.seed(request, link.capabilities), request.prompt)
