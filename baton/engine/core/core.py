"""Engine without a process around it: scheduler and model runner, stepped by the caller."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from baton.engine.core.blocks import BlockPool
from baton.engine.core.model_runner import ModelRunner
from baton.engine.core.plan import PlanRow, StepPlan
from baton.engine.core.scheduler import Scheduler, SchedulerConfig
from baton.engine.core.sequence import Kind
from baton.engine.core.speculative.proposers import Speculation
from baton.engine.core.tiers.places import TierPlaces
from baton.engine.core.tiers.tiers import KvTiers, TierCopy
from baton.telemetry.running_mean import RunningMean
from baton.types import events as ev
from baton.types.errors import NumericsError, TransferError
from baton.types.geometry import context_tokens
from baton.types.params import SampledToken

# Steps with decodes: this long, or twice the time of the decodes, up to the second limit.
CHUNK_TIME_NS = 100_000_000
_LONGEST_CHUNK_TIME_NS = 250_000_000
LONE_CHUNK_TIME_NS = 1_000_000_000  # steps without decodes; delays only cancellation
_MIN_CHUNK_TOKENS = 64
_SAMPLE_WEIGHT = 0.3  # of one step in the running means


class EngineCore:
    """Scheduler, model runner and optional speculation of one engine.

    Submit requests to ``scheduler``, then plan, execute and apply steps.

    Args:
        group_layers_bytes: Approximate size of the layer groups in which a PREFILL request's KV is
            published.
        speculation: Adds draft tokens; None for no speculation.
        tiers: Tiers below the pool, the fastest first; the caller makes their copies.
        check_every_step: Recount all blocks after every step and every failure (tests).
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: SchedulerConfig,
        group_layers_bytes: int = 1 << 20,
        *,
        speculation: Speculation | None = None,
        tiers: Sequence[TierPlaces] = (),
        check_every_step: bool = False,
    ) -> None:
        self.runner = runner
        self.geometry = runner.geometry
        self.pool = BlockPool(runner.geometry.num_blocks, runner.geometry.block_tokens)
        self.tiers = KvTiers(self.pool, tiers)
        self.scheduler = Scheduler(self.pool, config, runner.eos_token_ids, self.tiers)
        self.batch = self.scheduler.batch
        self.steps = 0
        self.numerics_failures = 0
        self.speculation = speculation
        self._group_layers_bytes = group_layers_bytes
        self._check_every_step = check_every_step
        self._checked_at = 0  # step of the last recount
        self._token_ns = RunningMean(_SAMPLE_WEIGHT)  # per prompt token
        self._decode_ns = RunningMean(_SAMPLE_WEIGHT)  # per step without prompt tokens

    def plan(self, now_ns: int) -> StepPlan:
        """Return the next step; a plan without rows means there is nothing to compute."""
        self.scheduler.max_step_tokens = self._token_budget()
        self.tiers.token_ns = self._token_ns.value
        plan = self.scheduler.plan(now_ns)
        if self.speculation is None:
            return plan
        return self.speculation.extend(
            plan,
            self.batch.running_by_id(),
            self.runner.admissible,
            self.batch.spare.lend,
            self.scheduler.max_step_tokens,
        )

    def take_copies(self, now_ns: int) -> list[TierCopy]:
        """Return block copies to make; the caller reports each result to ``tiers.copied``."""
        self.tiers.give_up(now_ns)
        self.tiers.save(now_ns)
        return self.tiers.take_copies()

    def forget(self, tags: frozenset[bytes]) -> tuple[int, int]:
        """Forget the blocks with these tags, in the pool and the tiers.

        Returns:
            The number of blocks in the pool, and the number of the erasure for the tier copier.
        """
        number = self.tiers.forget(tags)  # before the pool, whose blocks count as saved there
        return self.pool.forget(tags), number

    def drop_cached(self) -> int:
        """Drop all cached blocks; return the number of blocks that still hold data."""
        self.pool.drop_cached()
        counts = self.pool.counts()
        return counts.total - counts.free

    def publications(self, plan: StepPlan) -> list["Publication"]:
        """Return publications of the plan's PREFILL rows, each in groups of layers."""
        publications = []
        running = self.batch.running_by_id()
        for row in plan.rows:
            request = running[row.sequence_id].request
            if request.kind is not Kind.PREFILL or request.spec.pooling:
                continue
            block_tokens = self.geometry.block_tokens
            end = row.start + len(row.tokens)
            last = bool(row.samples)
            begin_block = max(row.start // block_tokens, request.spec.skip_blocks)
            end_block = -(-end // block_tokens) if last else end // block_tokens
            if end_block > begin_block:
                valid = min(end, end_block * block_tokens) - begin_block * block_tokens
                per_layer = self.geometry.block_bytes // self.geometry.num_layers
                bytes_per_layer = per_layer * (end_block - begin_block)
                layers = max(1, self._group_layers_bytes // bytes_per_layer)
                publications.append(
                    Publication(
                        request_id=request.request_id,
                        block_begin=begin_block,
                        block_count=end_block - begin_block,
                        valid_tokens=valid,
                        layers_per_group=layers,
                    )
                )
        return publications

    def apply(
        self,
        plan: StepPlan,
        results: list[list[SampledToken]],
        now_ns: int,
        duration_ns: int,
        steps: int = 1,
    ) -> list[ev.Event]:
        """Record a finished step and return all events since the last call.

        ``duration_ns`` is the time since before ``plan``, where a draft model computes. With
        ``steps`` equal steps in virtual time (``BatchState.equal_steps``) each row has one result
        per step, and ``duration_ns`` is the mean of one.
        """
        self._charge(plan, duration_ns * steps)
        self._withdraw(plan)
        self._end_refused(plan)
        if self.speculation is not None:
            self.speculation.observe(plan, results, duration_ns)
        self.scheduler.apply(plan, results, now_ns)
        self.steps += steps
        self._fit_times(plan, duration_ns)
        return self.take_events(plan, duration_ns, steps)

    def _charge(self, plan: StepPlan, duration_ns: int) -> None:
        """Add to each request its part of a step."""
        running = self.batch.running_by_id()
        parts_ns = divided(plan.rows, duration_ns, self._token_ns.value, self._decode_ns.value)
        for row, part_ns in zip(plan.rows, parts_ns, strict=True):
            sequence = running.get(row.sequence_id)
            if sequence is None:
                continue  # it ended during the step
            if row.decodes:
                sequence.request.output_ns += part_ns
            else:
                sequence.request.input_ns += part_ns

    def fail(self, plan: StepPlan, error: NumericsError) -> list[ev.Event]:
        """End the requests whose rows have NaN or Inf, and leave the others unchanged.

        A row with draft tokens is not failed: it is computed again without them.
        """
        self.numerics_failures += 1
        running = self.batch.running_by_id()
        rows = error.rows or range(len(plan.rows))
        ids = [plan.rows[i].sequence_id for i in rows if not plan.rows[i].num_draft_tokens]
        for row in (plan.rows[i] for i in rows if plan.rows[i].num_draft_tokens):
            if self.speculation is not None:
                self.speculation.ban(row.sequence_id)
        for request_id in {running[i].request.request_id for i in ids if i in running}:
            self.scheduler.fail(request_id, error)
        self._withdraw(plan)
        return self.take_events()

    def _withdraw(self, plan: StepPlan) -> None:
        """Fail transfers whose KV was published and then recomputed.

        A row with NaN from a neighbour is recomputed alone. A peer may have pulled its published KV
        while it was incomplete.
        """
        running = self.batch.running_by_id()
        for index in self.runner.rewritten_rows:
            sequence = running.get(plan.rows[index].sequence_id)
            if sequence is not None and sequence.request.kind is Kind.PREFILL:
                error = TransferError("KV was recomputed after it was published")
                self.scheduler.fail(sequence.request.request_id, error)

    def check_when_idle(self) -> None:
        """Recount all blocks once after each busy period, so that leaks show in production too."""
        if self._checked_at != self.steps and not self.batch.has_work():
            self._checked_at = self.steps
            self.batch.check_integrity()

    def _end_refused(self, plan: StepPlan) -> None:
        running = self.batch.running_by_id()
        for index, error in self.runner.refused_rows.items():
            sequence = running.get(plan.rows[index].sequence_id)
            if sequence is not None:
                self.scheduler.fail(sequence.request.request_id, error)

    def take_events(
        self, plan: StepPlan | None = None, duration_ns: int = 0, steps: int = 1
    ) -> list[ev.Event]:
        """Return all events, followed by cache changes and the load."""
        if self._check_every_step:
            self.batch.check_integrity()
        events = self.batch.take_events()
        stored, removed = self.pool.take_events()
        below = self.tiers.take_changes([*stored, *removed])
        if stored or removed or below:
            events.append(ev.CacheChanged(tuple(stored), tuple(removed), below))
        events.append(self._load(plan, duration_ns, steps))
        return events

    def _load(self, plan: StepPlan | None, duration_ns: int, steps: int) -> ev.StepDone:
        rows = plan.rows if plan else ()
        decode_rows = decode_context = prompt_tokens = prompt_context = 0
        for row in rows:
            if row.decodes:
                decode_rows += 1
                decode_context += row.start
            else:
                count = len(row.tokens)
                prompt_tokens += count
                prompt_context += context_tokens(row.start, row.start + count)
        speculation = self.speculation
        return msgspec.structs.replace(
            self.batch.load(),
            step=self.steps,
            duration_ns=duration_ns,
            prompt_tokens=prompt_tokens,
            prompt_context=prompt_context,
            decode_rows=decode_rows,
            decode_context=decode_context + decode_rows * (steps - 1) // 2,
            blocks=self.pool.counts(),
            oldest_quarantine=self.batch.reservations.oldest_draining,
            evictions=self.pool.evictions,
            preemptions=self.batch.preemptions,
            mask_ns=self.runner.mask_ns if rows else 0,
            drafts=speculation.drafts if speculation else 0,
            draft_tokens=speculation.draft_tokens if speculation else 0,
            accepted_tokens=speculation.accepted_tokens if speculation else 0,
            tiers=self.tiers.counts(),
        )

    def _token_budget(self) -> int:
        """Return the token limit that keeps the next step within its time."""
        limit = self.scheduler.config.max_step_tokens
        if not self._token_ns.value:
            return limit
        decodes = self.batch.count_decodes()
        time_ns: float = LONE_CHUNK_TIME_NS
        if decodes:
            decode_ns = self._decode_ns.value
            fair_ns = max(CHUNK_TIME_NS - decode_ns, decode_ns)
            time_ns = min(fair_ns, _LONGEST_CHUNK_TIME_NS - decode_ns)
        prompt_tokens = max(_MIN_CHUNK_TOKENS, int(time_ns / self._token_ns.value))
        return min(limit, decodes + prompt_tokens)

    def _fit_times(self, plan: StepPlan, duration_ns: int) -> None:
        if any(row.prompt_outputs and row.cost_tokens > len(row.tokens) for row in plan.rows):
            return  # prompt scores take extra time
        prompts = [row for row in plan.rows if not row.decodes]
        decodes = len(plan.rows) - len(prompts)
        prompt_tokens = sum(len(row.tokens) for row in prompts)
        if not prompt_tokens:
            self._decode_ns.add(duration_ns)
        elif prompt_tokens >= _MIN_CHUNK_TOKENS:
            spent_ns = duration_ns - (self._decode_ns.value if decodes else 0.0)
            if spent_ns > 0:
                self._token_ns.add(spent_ns / prompt_tokens)


@dataclass(slots=True, kw_only=True)
class Publication:
    """Publication of one PREFILL row of a running step, group by group.

    A group has ``layers_per_group`` layers. The last group has at most half of that, so that
    little is left to send after the step.
    """

    request_id: str
    block_begin: int
    block_count: int
    valid_tokens: int
    layers_per_group: int
    _sent: int = field(default=0, init=False)

    def on_layers_done(self, done: int, total: int) -> ev.Published | None:
        """Return the next group if ``done`` of ``total`` layers complete one."""
        count = done - self._sent
        tail = max(1, self.layers_per_group // 2)
        full = count >= self.layers_per_group or (total - done == tail and count > 0)
        if not count or not (full or done == total):
            return None
        published = ev.Published(
            request_id=self.request_id,
            layer_begin=self._sent,
            layer_count=count,
            block_begin=self.block_begin,
            block_count=self.block_count,
            valid_tokens=self.valid_tokens,
        )
        self._sent = done
        return published


def divided(
    rows: Sequence[PlanRow], duration_ns: int, token_ns: float, decode_ns: float
) -> list[int]:
    """Return the part of each row in ns, for the cost of requests; the sum is ``duration_ns``.

    A step with prompts and decodes takes as long as a step of the decodes alone, plus the time of
    the prompts' tokens. Their parts are in this proportion, or, before both were measured, in that
    of their tokens. Each decode has the same part, and each prompt one by its tokens.

    Args:
        rows: Rows of the step.
        duration_ns: Duration of the step.
        token_ns: Usual time of a prompt token; 0: unknown.
        decode_ns: Usual time of a step of decodes alone; 0: unknown.
    """
    decoding = [row.decodes for row in rows]
    decodes = sum(decoding)
    prompt_tokens = 0
    if decodes < len(rows):
        prompts = zip(rows, decoding, strict=True)
        prompt_tokens = sum(row.cost_tokens for row, decodes_now in prompts if not decodes_now)
    per_token = 1.0
    per_decode = 1.0
    if decodes and prompt_tokens and token_ns and decode_ns:
        per_token = token_ns
        per_decode = decode_ns / decodes
    whole = decodes * per_decode + prompt_tokens * per_token
    weights = [
        per_decode if decodes_now else row.cost_tokens * per_token
        for row, decodes_now in zip(rows, decoding, strict=True)
    ]
    return list(_parts(weights, whole, duration_ns))


def _parts(weights: Sequence[float], whole: float, duration_ns: int) -> Iterator[int]:
    """Round parts so that their sum is exact."""
    passed = 0.0
    given_ns = 0
    for weight in weights[:-1]:
        passed += weight
        upto_ns = int(duration_ns * passed / whole)
        yield upto_ns - given_ns
        given_ns = upto_ns
    if weights:
        yield duration_ns - given_ns
