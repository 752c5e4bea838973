"""Values on the page of a component's metrics."""

from prometheus_client.parser import text_string_to_metric_families

from baton.telemetry.metrics import Metrics


def value_of(metrics: Metrics, name: str, **labels: str) -> float:
    """Return a counter or gauge, or the sum of a histogram; 0 if there is no such series."""
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families for sample in family.samples]
    names = (name, f"{name}_total", f"{name}_sum")
    return sum(s.value for s in samples if s.name in names and s.labels == labels)
