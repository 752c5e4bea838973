"""OpenMetrics with exemplars, as Prometheus' own parser reads it."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from baton.telemetry.metrics import Metrics
from baton.telemetry.openmetrics import is_wanted, openmetrics

TRACE = "0af7651916cd43dd8448eb211c80319c"
# What Prometheus 3 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize("of_routers", [False, True])
def test_a_page_has_the_same_values_and_exemplars_at_their_buckets(of_routers: bool) -> None:
    """Also the page that is the sum of several."""
    metrics = Metrics("router", model='a "b" \\ c')
    odd = 't"\\x\n'
    metrics.inc("baton_prompt_tokens", 7, tenant=odd)
    metrics.observe("baton_e2e_seconds", 0.9, tenant=odd)
    metrics.observe("baton_e2e_seconds", 0.8, tenant=odd, trace_id="1" * 32)
    metrics.observe("baton_e2e_seconds", 0.85, tenant=odd, trace_id=TRACE)
    metrics.observe("baton_e2e_seconds", 9999.0, tenant="b", trace_id="2" * 32)
    page = metrics.render()
    if of_routers:
        converted = openmetrics(page, metrics.exemplars()).decode()
    else:
        converted = metrics.render(in_openmetrics=True).decode()
    families = {family.name: family for family in text_string_to_metric_families(converted)}
    classic = [s for family in text_families(page.decode()) for s in family.samples]
    modern = [s for family in families.values() for s in family.samples]

    def values(samples: list) -> dict:
        return {(s.name, *sorted(s.labels.items())): s.value for s in samples}

    ours, theirs = values(modern), values(classic)
    assert ours.keys() == theirs.keys()
    moves = [key for key in ours if ours[key] != theirs[key]]
    assert all(key[0].startswith("process_") for key in moves), moves
    exemplars = {
        (s.labels["tenant"], s.labels["le"]): s.exemplar
        for s in families["baton_e2e_seconds"].samples
        if s.exemplar is not None
    }
    assert exemplars.keys() == {(odd, "1.0"), ("b", "+Inf")}
    kept = exemplars[odd, "1.0"]
    assert (kept.labels, kept.value) == ({"trace_id": TRACE}, 0.85)
    assert float(kept.timestamp) > 1_700_000_000


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        (PROMETHEUS, True),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.9", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=x", False),
    ],
)
def test_the_client_chooses_by_accept(accept: str, wanted: bool) -> None:
    assert is_wanted(accept) == wanted
