"""Load and speed of an engine as a part of a worker's status."""

from batonpb.common_pb2 import BlockCounts, KvTier, WorkerStatus

from baton.engine.process.step_rates import StepRates
from baton.types.events import StepDone

_SAME = (
    *("running", "waiting", "answering", "answering_context", "coming_context"),
    *("queued_prompt_tokens", "queued_prompt_context"),
)


def engine_status(load: StepDone, rates: StepRates) -> WorkerStatus:
    """Return a status with the fields that follow from an engine's last step and its rates."""
    prompt = rates.prompt_fit
    decode = rates.decode_fit
    return WorkerStatus(
        kv_blocks=BlockCounts(
            total=load.blocks.total,
            free=load.blocks.free,
            cached=load.blocks.cached,
            leased=load.blocks.in_use,
            quarantined=load.blocks.quarantined,
        ),
        kv_tiers=[
            KvTier(
                name=tier.name,
                blocks=tier.places,
                held_blocks=tier.held,
                block_s=tier.block_ns / 1e9,
            )
            for tier in load.tiers
        ],
        steps=load.step,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        prefill_token_s=prompt.token_s,
        prefill_context_s=prompt.context_s,
        decode_step_s=rates.decode_step_s,
        decode_base_s=decode.step_s,
        decode_row_s=decode.row_s,
        decode_context_s=decode.context_s,
        **{name: getattr(load, name) for name in _SAME},
    )
