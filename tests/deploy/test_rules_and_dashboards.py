"""What lies in ``deploy/`` for Prometheus and Grafana is valid, tried, and as the table has it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from baton.telemetry.metric_names import METRICS_BY_COMPONENT
from baton.telemetry.metrics import Metrics
from deploy.grafana.dashboard_panels import DASHBOARDS
from deploy.grafana.dashboards import FOLDER, text_of

DEPLOY = FOLDER.parent
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool here: apt-get install prometheus"
)


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "--lint=all", "--lint-fatal", "prometheus/rules.yml"),
        ("test", "rules", "prometheus/rules_test.yml"),
    ],
    ids=["config", "rules", "tests of the rules"],
)
def test_promtool_finds_nothing_wrong(arguments: tuple[str, ...]) -> None:
    told = subprocess.run(
        [str(PROMTOOL), *arguments], cwd=DEPLOY, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr


@needs_promtool
def test_the_head_of_the_file_has_the_command_for_another_port(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    lines = (DEPLOY / "prometheus.yml").read_text().splitlines()
    (command,) = [line.removeprefix("#").strip() for line in lines if line.startswith("#   sed")]
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    made = tmp_path / "deploy" / "prometheus-9000.yml"
    assert "url: http://127.0.0.1:9000/fleet/targets" in made.read_text()
    subprocess.run([str(PROMTOOL), "check", "config", str(made)], check=True)


def test_workers_series_that_routers_have_for_all_are_not_scraped() -> None:
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    [rule] = job["metric_relabel_configs"]
    pages = {name: Metrics(name, model="m").families() for name in METRICS_BY_COMPONENT}
    names = {
        component: {f.name for f in families if f.name.startswith("vllm:")}
        for component, families in pages.items()
    }
    dropped = {n for n in names["worker"] if re.fullmatch(rule["regex"], f"worker;{n}")}
    assert dropped == names["worker"] & names["router"]
    chart = (DEPLOY / "helm" / "templates" / "monitoring.yaml").read_text()
    assert f"regex: {rule['regex'].removeprefix('worker;')}" in chart


@needs_promtool
@pytest.mark.parametrize("component", METRICS_BY_COMPONENT)
def test_our_names_follow_the_conventions(component: str) -> None:
    page = Metrics(component).render().decode()
    own = "\n".join(line for line in page.splitlines() if "vllm:" not in line) + "\n"
    told = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=own, capture_output=True, text=True, check=False
    )
    assert told.stdout + told.stderr == ""


def test_every_alert_is_tried() -> None:
    rules = (DEPLOY / "prometheus" / "rules.yml").read_text()
    tried = (DEPLOY / "prometheus" / "rules_test.yml").read_text()
    alerts = re.findall(r"alert: (\w+)", rules)
    assert len(alerts) > 10
    assert [name for name in alerts if f"alertname: {name}" not in tried] == []


def test_every_alert_leads_to_its_section_of_the_runbook() -> None:
    rules = (DEPLOY / "prometheus" / "rules.yml").read_text()
    page = DEPLOY.parent / "docs" / "guide" / "troubleshooting.md"
    sections = re.findall(r"^### (\w+)$", page.read_text(), flags=re.MULTILINE)
    assert sections == re.findall(r"alert: (\w+)", rules)
    path = page.relative_to(DEPLOY.parent)
    links = re.findall(r'runbook_url: "(.+)"', rules)
    assert links == [f"{path}#{name.lower()}" for name in sections]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_files_are_written_from_the_table(name: str) -> None:
    written = (FOLDER / f"{name}.json").read_text()
    assert written == text_of(name), "run: python -m deploy.grafana.dashboards"
    assert json.loads(written)["uid"] == f"baton-{name}"


def test_rules_and_dashboards_name_only_metrics_that_exist() -> None:
    declared = {
        f"{name}{suffix}"
        for specs in METRICS_BY_COMPONENT.values()
        for name, spec in specs.items()
        for suffix in {
            "counter": ("_total",),
            "gauge": ("",),
            "histogram": ("_sum", "_count", "_bucket"),
        }[spec.kind]
    }
    texts = [text_of(name) for name in DASHBOARDS]
    texts.append((DEPLOY / "prometheus" / "rules.yml").read_text())
    named = {name for text in texts for name in re.findall(r"\bbaton_\w+", text)}
    assert len(named) > 30
    assert sorted(named - declared) == []
