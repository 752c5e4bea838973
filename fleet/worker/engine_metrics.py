"""Metrics of a worker that follow from its engine's events."""

from baton.engine.process.handle import EngineHandle
from baton.telemetry.metrics import Metrics
from baton.types import events as ev
from baton.types.pool_counts import TierCounts


class EngineMetrics:
    """Updates a worker's metrics from the events of its engine."""

    def __init__(self, engine: EngineHandle, metrics: Metrics, max_adapters: int) -> None:
        self._engine = engine
        self._metrics = metrics
        self._max_adapters = max_adapters
        self._tiers: tuple[TierCounts, ...] = ()
        engine.on_adapter_changed = self._note_adapter
        engine.after_step.append(self._note_step)
        metrics.before_page.append(self._show_load)
        if max_adapters:
            metrics.before_page.append(self._show_adapters)

    def note_cache(self, change: ev.CacheChanged) -> None:
        """Count blocks that entered or left the cache."""
        self._metrics.inc("baton_kv_events", len(change.stored), kind="stored")
        self._metrics.inc("baton_kv_events", len(change.removed), kind="removed")

    def _note_adapter(self, change: ev.AdapterChanged) -> None:
        metrics = self._metrics
        metrics.set("baton_adapters_held", change.held)
        if change.what == "evicted":
            metrics.inc("baton_adapter_evictions", adapter=change.name)
            return
        metrics.inc("baton_adapter_loads", adapter=change.name, outcome=change.what)
        metrics.observe("baton_adapter_load_seconds", change.load_s)

    def _show_adapters(self) -> None:
        self._metrics.set_adapter_info(self._max_adapters, *self._engine.adapters_in_use())

    def _show_load(self) -> None:
        metrics = self._metrics
        step = self._engine.load
        metrics.set("baton_kv_blocks", step.blocks.total, state="total")
        metrics.set("baton_kv_blocks", step.blocks.free, state="free")
        metrics.set("baton_kv_blocks", step.blocks.cached, state="cached")
        metrics.set("baton_kv_blocks", step.blocks.in_use, state="leased")
        metrics.set("baton_kv_blocks", step.blocks.quarantined, state="quarantined")
        metrics.set("baton_kv_usage_ratio", step.blocks.in_use / max(step.blocks.total, 1))
        metrics.set("baton_running_requests", step.running)
        metrics.set("baton_waiting_requests", step.waiting)

    def _note_step(self, step: ev.StepDone) -> None:
        metrics = self._metrics
        metrics.count_up("baton_kv_evictions", step.evictions)
        self._show_tiers(step)
        metrics.count_up("baton_preemptions", step.preemptions)
        metrics.count_up("baton_spec_drafts", step.drafts)
        metrics.count_up("baton_spec_draft_tokens", step.draft_tokens)
        metrics.count_up("baton_spec_accepted_tokens", step.accepted_tokens)
        if not step.duration_ns:
            return
        kinds = {(True, True): "mixed", (True, False): "prefill", (False, True): "decode"}
        kind = kinds.get((step.prompt_tokens > 0, step.decode_rows > 0), "decode")
        metrics.observe("baton_step_seconds", step.duration_ns / 1e9, kind=kind)
        if step.mask_ns:
            metrics.observe("baton_grammar_mask_seconds", step.mask_ns / 1e9)
        metrics.observe("baton_batch_requests", step.running)
        metrics.observe("baton_step_tokens", step.prompt_tokens + step.decode_rows)
        metrics.observe("baton_batch_tokens", step.prompt_tokens, kind="prefill")
        metrics.observe("baton_batch_tokens", step.decode_rows, kind="decode")

    def _show_tiers(self, step: ev.StepDone) -> None:
        if step.tiers == self._tiers:
            return
        self._tiers = step.tiers
        metrics = self._metrics
        block_bytes = self._engine.client.ready.geometry.block_bytes
        for tier in step.tiers:
            name = tier.name
            counts = {"total": tier.places, "held": tier.held, "elsewhere": tier.elsewhere}
            for state, blocks in counts.items():
                metrics.set("baton_kv_tier_blocks", blocks, tier=name, state=state)
            for direction, blocks in (("saved", tier.saved), ("brought", tier.brought)):
                moved_bytes = blocks * block_bytes
                metrics.count_up(
                    "baton_kv_tier_moved_bytes", moved_bytes, tier=name, direction=direction
                )
            for reason in ("lost", "damaged", "gone", "failed", "late"):
                lost = getattr(tier, reason)
                metrics.count_up("baton_kv_tier_failures", lost, tier=name, reason=reason)
