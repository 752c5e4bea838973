"""Summary of a run: distributions, rates, ends, goodput, and the quality of the measurement."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadtest.client.records import CallRecord, ClientReport
from loadtest.metrics import request_figures as figures

MAX_ERROR_S = 0.010
"""Delay of a client above which figures are distorted; or 5 % of the TTFT, if that is more."""

_MAX_ERROR_SHARE = 0.05
_MAX_CPU_SHARE = 0.9


class LatencyGoals(msgspec.Struct, frozen=True, kw_only=True):
    """Service level objective: limits per request, and the share of requests within them.

    Attributes:
        from_second: Whether a response is also good that would be if its first token came
            with its second, as from servers that transfer the KV cache before the first.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    quantile: float = 0.9
    from_second: bool = False

    def label(self) -> str:
        """Return a label such as ``goodput@90(ttft 1 s, tpot 0.1 s)``."""
        limits = (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("e2e", self.e2e_s))
        shown = ", ".join(f"{name} {limit:g} s" for name, limit in limits if limit is not None)
        return f"goodput@{100 * self.quantile:g}({shown or 'any response'})"

    def met_by(self, record: CallRecord) -> bool:
        """Return whether the response is complete and within every limit.

        A response of one token has no time per token, so it meets that limit.
        """
        if record.end != "ok":
            return False
        if not (
            _within(figures.ttft_s(record), self.ttft_s)
            and _within(figures.e2e_s(record), self.e2e_s)
        ):
            return False
        if _within(figures.tpot_s(record), self.tpot_s):
            return True
        return (
            self.from_second
            and _within(figures.second_token_s(record), self.ttft_s)
            and _within(figures.tpot_from_second_s(record), self.tpot_s)
        )


def _within(took_s: float | None, limit_s: float | None) -> bool:
    return limit_s is None or took_s is None or took_s <= limit_s


def parse_slo(text: str, quantile: float = 0.9) -> LatencyGoals:
    """Parse an SLO from the command line: ``ttft_s=1,tpot_s=0.1``."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in ("ttft_s", "tpot_s", "e2e_s"):
            raise ValueError(f"unknown limit {key!r}: use ttft_s, tpot_s or e2e_s")
        try:
            limits[key] = float(value)
        except ValueError:
            limits[key] = 0.0
        if not limits[key] > 0:
            raise ValueError(f"{part}: a limit must be a positive number of seconds")
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile {quantile:g} must be in (0, 1]")
    return msgspec.structs.replace(LatencyGoals(quantile=quantile), **limits)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles, interpolated linearly between ranks, of ``count`` values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float] | NDArray[np.float64]) -> "Distribution | None":
        """Return the distribution of some values; None without values."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return None
        p50, p90, p95, p99, top = map(float, np.percentile(array, [50, 90, 95, 99, 100]))
        # A mean of equal values may differ from them in the last digit.
        mean = min(max(float(array.mean()), float(array.min())), top)
        return cls(count=array.size, mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=top)


class ClientVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Quality of the clients' timing.

    With ``reasons`` the figures depend on the client, not only on the server.
    """

    late_send_p99_s: float
    lag_p99_s: float
    cpu_share: float
    reasons: list[str]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run, excluding the warm-up."""

    warmup_s: float
    duration_s: float  # from the end of the warm-up to the last end
    sent: int  # requests planned in that time
    ends: dict[str, int]
    errors: dict[str, int]  # counts by name, such as "429 queue_full"
    distributions: dict[str, Distribution]  # by the names in FORMULAS
    by_group: dict[str, dict[str, Distribution]] = {}  # ttft_s and tpot_s
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int
    uncounted: int  # responses without `usage`
    requests_per_s: float  # complete ones
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    tokens_per_chunk: float  # above 1, times between chunks are not times between tokens
    slo: LatencyGoals
    good: int
    attainment: float  # good ÷ sent, both without aborted requests
    good_per_s: float
    slo_met: bool  # attainment ≥ quantile; then good_per_s is goodput@quantile
    client: ClientVerdict
    prefix_tokens_by_source: dict[str, float] = {}  # Baton's count over the whole run


def summarise(
    records: Sequence[CallRecord],
    clients: Sequence[ClientReport],
    *,
    slo: LatencyGoals,
    warmup_s: float = 0.0,
    prefix_tokens_by_source: dict[str, float] | None = None,
) -> Summary:
    """Summarise a run.

    Requests planned in the first ``warmup_s`` seconds are excluded from all figures.
    ``prefix_tokens_by_source`` comes from Baton's metrics.
    """
    counted = [record for record in records if record.intended_s >= warmup_s]
    end_s = max((record.ended_s for record in counted), default=warmup_s)
    duration_s = max(end_s - warmup_s, 1e-9)
    judged = [record for record in counted if record.end != "aborted"]
    good = sum(slo.met_by(record) for record in judged)
    attainment = good / len(judged) if judged else 0.0
    chunks = sum(len(record.chunk_s) for record in counted)
    answer_tokens = sum(figures.answer_tokens(record) for record in counted)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in counted)
    answered = [record for record in counted if record.end == "ok"]
    distributions = _distributions(counted)
    return Summary(
        warmup_s=warmup_s,
        duration_s=duration_s,
        sent=len(counted),
        ends=dict(Counter(record.end for record in counted)),
        errors=dict(Counter(error_name(r) for r in counted if r.end not in ("ok", "aborted"))),
        distributions=distributions,
        by_group=_by_group(counted),
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        cached_tokens=sum(record.cached_tokens or 0 for record in counted),
        uncounted=sum(record.answer_tokens is None for record in answered),
        requests_per_s=len(answered) / duration_s,
        prompt_tokens_per_s=prompt_tokens / duration_s,
        answer_tokens_per_s=answer_tokens / duration_s,
        tokens_per_chunk=answer_tokens / chunks if chunks else 0.0,
        slo=slo,
        good=good,
        attainment=attainment,
        good_per_s=good / duration_s,
        slo_met=bool(judged) and attainment >= slo.quantile,
        client=judge_clients(counted, clients, distributions.get("ttft_from_send_s")),
        prefix_tokens_by_source=prefix_tokens_by_source or {},
    )


def judge_clients(
    records: Sequence[CallRecord], clients: Sequence[ClientReport], ttft: Distribution | None
) -> ClientVerdict:
    """Return whether the clients' own delay is small compared with what they measured."""
    late = Distribution.of(map(figures.late_s, records))
    late_p99_s = late.p99 if late else 0.0
    lag_p99_s = max((client.lag_p99_s for client in clients), default=0.0)
    cpu_share = max((client.cpu_share for client in clients), default=0.0)
    limit_s = max(MAX_ERROR_S, _MAX_ERROR_SHARE * ttft.p50 if ttft else 0.0)
    limit = f"limit {1e3 * limit_s:.0f} ms"
    reasons = []
    if late_p99_s > limit_s:
        reasons.append(f"1 % of requests were sent over {1e3 * late_p99_s:.0f} ms late ({limit})")
    if lag_p99_s > limit_s:
        reasons.append(f"a client's event loop lagged {1e3 * lag_p99_s:.0f} ms at p99 ({limit})")
    if cpu_share > _MAX_CPU_SHARE:
        reasons.append(f"a client used {100 * cpu_share:.0f} % of a core: increase --clients")
    return ClientVerdict(
        late_send_p99_s=late_p99_s, lag_p99_s=lag_p99_s, cpu_share=cpu_share, reasons=reasons
    )


def _distributions(records: Sequence[CallRecord]) -> dict[str, Distribution]:
    distributions: dict[str, Distribution | None] = {}
    for name, figure in figures.PER_REQUEST.items():
        distributions[name] = Distribution.of(v for v in map(figure, records) if v is not None)
        if name == "second_token_s":  # in the table, itl_s comes before itl_mean_s
            gaps = [figures.gaps_s(record) for record in records]
            distributions["itl_s"] = Distribution.of(np.concatenate(gaps)) if gaps else None
    return {name: distribution for name, distribution in distributions.items() if distribution}


def _by_group(records: Sequence[CallRecord]) -> dict[str, dict[str, Distribution]]:
    names = {name for record in records for name in (record.group, record.tenant)} - {""}
    groups = {}
    for name in sorted(names):
        own = [record for record in records if name in (record.group, record.tenant)]
        whole = _distributions(own)
        groups[name] = {key: d for key, d in whole.items() if key in ("ttft_s", "tpot_s")}
    return groups


def error_name(record: CallRecord) -> str:
    """Return a name to count failures by: end, status, and the code before the colon."""
    if record.end == "http_error":
        code = record.detail.partition(":")[0]
        return f"{record.status} {code}".strip() if " " not in code else str(record.status)
    if record.end == "stream_error":
        return f"stream_error {record.detail.partition(':')[0]}"
    return record.end
