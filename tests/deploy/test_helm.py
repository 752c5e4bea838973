"""``deploy/helm``, rendered, linted, installed, upgraded and uninstalled by Helm itself.

Judges: Helm 4, Kubernetes' schemas, the models of KEDA and of Prometheus' operator, and Baton's own
check of the fleet file. No cluster ran.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml

from baton.config.fleet_file import FleetConfig
from baton.config.load import load_config
from baton.telemetry.metric_names import REQUEST_METRICS
from tests.deploy.kubernetes_api import IMMUTABLE, KubernetesApi
from tests.deploy.test_kubernetes import HTTP_ROUTE, INFERENCE_POOL, RAY_CLUSTER, as_pod, check
from tests.house.manifests import CHART, documents, fleet_file, helm, plain_files

JUDGED = {
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
    "ServiceMonitor": "cloudcoil.models.prometheus_operator.v1",
    "PodMonitor": "cloudcoil.models.prometheus_operator.v1",
    "ScrapeConfig": "cloudcoil.models.prometheus_operator.v1alpha1",
}  # modules that take seconds to import
SCHEMAS = {
    "RayCluster": RAY_CLUSTER,
    "InferencePool": INFERENCE_POOL,
    "HTTPRoute": HTTP_ROUTE,
}
INSECURE = {"clients": {"insecure": True}, "pools": {"insecure": True}}
BARE = {"redis": {"host": "redis.example"}, "fleet": INSECURE}
MONITORED = {
    "monitoring": {
        "serviceMonitor": True,
        "podMonitor": True,
        "scrapeConfig": True,
        "secret": "scrape",
        "labels": {"release": "prometheus"},
    }
}
TLS = {
    "redis": {"host": "redis.example", "port": 6380, "db": 2, "user": "baton", "tls": True},
    "keys": {"secret": "baton-keys"},
    "tls": {"clients": "baton-clients", "fleet": "baton-mesh"},
    "models": {"claim": "weights", "path": "/weights"},
    "roles": {"prefill": {"replicas": 1, "workers": 3}, "decode": {"replicas": 4}},
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "image": {"pullSecrets": ["registry"], "tag": "0.3.0"},
    "fleet": {"port": 9443, "max_context_tokens": 16_777_216},
    **MONITORED,
}
KEDA = BARE | {
    "keda": {"enabled": True, "min": 0, "max": 12},
    "fleet": {
        "clients": {"insecure": True},
        "pools": {"insecure": True, "auto": {"min": 0, "max": 12}},
        "slo": {"ttft_s": 2.0, "itl_s": 0.05},
    },
}
ATTACHED = {
    "mode": "attached",
    "attached": {"servers": ["http://gpu-1:8000", {"url": "http://gpu-2:8000", "role": "decode"}]},
    "fleet": {"model": "hub:a/b", "numerics": "fast", "clients": {"insecure": True}},
    **MONITORED,
}
LLAMA = ATTACHED | {"attached": {"kind": "llama-server", "servers": ["http://cpu-1:8080"]}}
GATEWAY = ATTACHED | {"mode": "gateway", "attached": {"dns": "http://vllm.default.svc:8000"}}
REVISIONS = BARE | {"revisions": {"a": None, "b": {"image": {"tag": "0.2.0"}}}, "live": "a"}
CASES = {
    "bare": BARE,
    "tls": TLS,
    "keda": KEDA,
    "attached": ATTACHED,
    "llama": LLAMA,
    "gateway": GATEWAY,
    "revisions": REVISIONS,
}


def pods_of(made: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod templates of an object."""
    spec = made.get("spec", {})
    groups = [spec.get("headGroupSpec", {}), *spec.get("workerGroupSpecs", [])]
    return [part["template"] for part in (spec, *groups) if "template" in part]


def fits(made: dict[str, Any]) -> None:
    """Check an object by the schema of its kind, which refuses unknown fields."""
    kind = made["kind"]
    if kind in SCHEMAS:
        jsonschema.validate(made, SCHEMAS[kind])
    elif kind in JUDGED:
        model = getattr(import_module(JUDGED[kind]), kind).model_validate(made)
        known = model.model_dump(by_alias=True, exclude_unset=True, mode="json")
        assert known == made, "a field that this kind does not have"
    else:
        check(made)
    for pod in pods_of(made):
        check(as_pod(pod))


@pytest.mark.costly
@pytest.mark.parametrize("name", CASES)
def test_what_is_rendered_fits_its_schemas_and_is_labelled(name: str, tmp_path: Path) -> None:
    values = CASES[name]
    report = helm().lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    made = documents(values, "prod")
    names = [(each["kind"], each["metadata"]["name"]) for each in made]
    assert len(set(names)) == len(names)
    for each in made:
        fits(each)
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "baton"
        assert labels["app.kubernetes.io/part-of"] == "prod"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        selector = each["spec"].get("selector", {}) if each["kind"] == "Deployment" else {}
        for pod in pods_of(each):
            assert selector.get("matchLabels", {}).items() <= pod["metadata"]["labels"].items()
            for container in pod["spec"]["containers"]:
                assert {"livenessProbe", "readinessProbe"} <= container.keys()
                mounted = {mount["name"] for mount in container["volumeMounts"]}
                assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    for each in made:
        if each["kind"] == "Secret":
            file = tmp_path / "fleet.yaml"
            file.write_text(each["stringData"]["fleet.yaml"])
            load_config(file)


def by_kind(values: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [each for each in documents(values, "prod") if each["kind"] == kind]


@pytest.mark.parametrize("port", [8009, 0])
@pytest.mark.parametrize("name", ["tls", "attached", "gateway"])
def test_scrapes_reach_a_port_that_the_pods_open(name: str, port: int) -> None:
    """They used the clients' port, whose connections and keys are those of clients."""
    values = CASES[name]
    values = values | {"monitoring": values["monitoring"] | {"port": port}}
    config = fleet_of(values)
    listens = config.clients.monitoring.port if config.clients.monitoring else config.port
    assert (config.clients.monitoring is not None) == bool(port)
    (server,) = by_kind(values, "Deployment")
    labels = server["spec"]["template"]["metadata"]["labels"]
    (container,) = server["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    (pods,) = by_kind(values, "PodMonitor")
    (services,) = by_kind(values, "ServiceMonitor")
    service = next(
        each for each in by_kind(values, "Service") if each["metadata"]["name"] == "prod-metrics"
    )
    wanted = services["spec"]["selector"]["matchLabels"].items()
    assert wanted <= service["metadata"]["labels"].items()
    (shown,) = service["spec"]["ports"]
    for selector, endpoint in (
        (pods["spec"]["selector"]["matchLabels"], pods["spec"]["podMetricsEndpoints"][0]),
        (service["spec"]["selector"], services["spec"]["endpoints"][0]),
    ):
        assert selector.items() <= labels.items()
        assert ("authorization" in endpoint) == (not port)
        assert ports[endpoint["port"]] == listens == shown["port"]
        assert shown["name"] == shown["targetPort"] == endpoint["port"]
    assert ports[container["livenessProbe"]["httpGet"]["port"]] == listens
    assert ports[container["readinessProbe"]["httpGet"]["port"]] == config.port
    policy = next(
        each["spec"]
        for each in by_kind(values, "NetworkPolicy")
        if each["spec"]["podSelector"].get("matchLabels", {}).items() <= labels.items()
        and "matchExpressions" not in each["spec"]["podSelector"]
    )
    rules = {p["port"]: "from" in rule for rule in policy["ingress"] for p in rule["ports"]}
    assert rules.pop(config.port) is False
    assert rules.pop(listens, False) == bool(port), "metrics name tenants"
    assert rules == ({9002: False} if name == "gateway" else {})


def test_workers_are_scraped_with_the_fleets_certificates() -> None:
    (scrape,) = by_kind(TLS, "ScrapeConfig")
    url = urlsplit(scrape["spec"]["httpSDConfigs"][0]["url"])
    names = [each["metadata"]["name"] for each in by_kind(TLS, "Service")]
    assert (url.hostname.partition(".")[0] in names, url.port) == (True, 8009)
    config = fleet_of(TLS)
    tls = scrape["spec"]["tlsConfig"]
    assert tls["serverName"] == config.pools.tls.files(config.fleet).name
    assert tls["cert"]["secret"]["name"] == tls["keySecret"]["name"] == "baton-mesh"


def roles_of(values: dict[str, Any]) -> dict[str, list[str]]:
    """Return the labels for the role of each kind of object that has pods with workers."""
    return {
        each["kind"]: [
            pod["metadata"]["labels"]["llm-d.ai/role"]
            for pod in pods_of(each)
            if "llm-d.ai/role" in pod["metadata"]["labels"]
        ]
        for each in documents(values)
        if each["kind"] in ("RayCluster", "Deployment")
    }


def test_pods_with_workers_have_the_label_of_their_role() -> None:
    assert roles_of(BARE) == {"RayCluster": ["prefill", "decode"], "Deployment": []}
    alone = BARE | {"roles": {"prefill": {"replicas": 0}}}
    assert roles_of(alone)["RayCluster"] == ["prefill-decode"]


def fleet_of(values: dict[str, Any]) -> FleetConfig:
    given = yaml.safe_load(fleet_file(documents(values, "prod")))
    return FleetConfig.model_validate(given)


def test_values_become_keys_of_the_fleet_file() -> None:
    config = fleet_of(TLS)
    assert config.redis.startswith("rediss://baton@redis.example:6380/2?password_file=")
    assert (config.pools.prefill, config.pools.decode, config.port) == (3, 4, 9443)
    assert config.max_context_tokens == 16_777_216
    assert config.clients.tls is not None and config.pools.tls is not None
    assert config.clients.api_keys_file == "/etc/baton-keys/api_keys.yaml"
    (cluster,) = (each for each in documents(TLS) if each["kind"] == "RayCluster")
    for pod in pods_of(cluster):
        paths = [mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]]
        used = (config.clients.api_keys_file, config.clients.tls.key, config.pools.tls.ca)
        assert {str(Path(file).parent) for file in used} | {"/weights"} <= set(paths)
    assert fleet_of(ATTACHED).is_attached and fleet_of(LLAMA).pools.engine.external
    assert fleet_of(KEDA).pools.bounds is not None


def test_keda_reads_the_planners_wish_and_scales_nodes_that_no_one_else_counts() -> None:
    made = {(each["kind"], each["metadata"]["name"]): each for each in documents(KEDA, "prod")}
    scaled = made["ScaledObject", "prod-node"]["spec"]
    node = made["Deployment", scaled["scaleTargetRef"]["name"]]
    assert "replicas" not in node["spec"], "an upgrade would undo KEDA's count"
    (trigger,) = scaled["triggers"]
    assert "baton_planner_wanted{" in trigger["metadata"]["query"]
    assert "baton_planner_wanted" in REQUEST_METRICS
    assert (
        f'pod=~"{made["Deployment", "prod-router"]["metadata"]["name"]}'
        in (trigger["metadata"]["query"])
    )
    assert made["RayCluster", "prod"]["spec"]["workerGroupSpecs"] == []
    (container,) = node["spec"]["template"]["spec"]["containers"]
    assert "prod-head-svc:6379" in container["args"][0]  # KubeRay's name of the head's Service


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "redis.host"),
        ({"redis": {"host": "r"}}, "tls.clients"),
        ({"redis": {"host": "r"}, "fleet": {"clients": {"insecure": True}}}, "tls.fleet"),
        (BARE | {"keda": {"enabled": True}}, "fleet.pools.auto"),
        (BARE | {"monitoring": {"port": 8000}}, "monitoring.port"),
        (BARE | {"fleet": INSECURE | {"clients": {"monitoring": {"port": 1}}}}, "fleet"),
        (BARE | {"revisions": {"a": {}}, "live": "b"}, "none of revisions"),
        (ATTACHED | {"attached": {"servers": []}}, "attached"),
        (BARE | {"fleet": INSECURE | {"redis": "redis://r"}}, "fleet"),
        (BARE | {"role": {}}, "role"),
        (BARE | {"routers": {"replicas": "2"}}, "replicas"),
    ],
)
def test_values_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm().HelmError, match=message):
        documents(values)


def test_prefill_and_decode_of_two_revisions_never_meet() -> None:
    made = documents(REVISIONS, "prod")
    files = [
        yaml.safe_load(each["stringData"]["fleet.yaml"])
        for each in made
        if each["kind"] == "Secret"
    ]
    assert {file["fleet"] for file in files} == {"prod-a", "prod-b"}  # names in Redis
    images: dict[str, set[str]] = {}
    for each in made:
        for pod in pods_of(each):
            instance = pod["metadata"]["labels"]["app.kubernetes.io/instance"]
            images.setdefault(instance, set()).add(pod["spec"]["containers"][0]["image"])
    assert images == {
        "prod-a": {"registry.example/baton:0.1.0"},
        "prod-b": {"registry.example/baton:0.2.0"},
    }
    (service,) = (each for each in made if each["kind"] == "Service")
    assert service["spec"]["selector"]["app.kubernetes.io/instance"] == "prod-a"
    for policy in (each for each in made if each["kind"] == "NetworkPolicy"):
        text = json.dumps(policy["spec"])
        assert ("prod-a" in text) != ("prod-b" in text)
    # The old revision goes, and nothing of the new one changes.
    later = documents(BARE | {"revisions": {"b": {"image": {"tag": "0.2.0"}}}, "live": "b"}, "prod")
    kept = [each for each in later if each["metadata"]["name"] != "prod"]
    assert kept and all(each in made for each in kept)


@pytest.fixture
def api():
    server = KubernetesApi()
    yield server
    server.close()


def connected(api: KubernetesApi) -> Any:
    place = {"cluster": "c", "user": "u", "namespace": "baton"}
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": api.url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": place}],
    }
    return helm().Config(
        kubeconfig_content=json.dumps(kubeconfig), namespace="baton", storage_driver="memory"
    )


@pytest.mark.costly
def test_helm_installs_upgrades_and_uninstalls(api: KubernetesApi) -> None:
    api.objects["/api/v1/namespaces/baton/secrets/baton"] = {"kind": "Secret"}  # the operator's
    before = set(api.objects)
    changed = TLS | {
        "routers": {"replicas": 5},
        "image": {"tag": "0.4.0"},
        "monitoring": {"port": 0},
    }
    with connected(api) as releases:
        releases.install(CHART, "prod", TLS)
        installed = dict(api.objects)
        assert len(installed) - len(before) == len(documents(TLS, "prod"))
        releases.upgrade(CHART, "prod", changed)
        removed = set(installed) - set(api.objects)
        assert all("monitor" in path or "scrape" in path or "metrics" in path for path in removed)
        assert len(removed) == 4
        (routers,) = (made for made in api.by_kind("Deployment"))
        assert routers["spec"]["replicas"] == 5
        releases.rollback("prod", version=1)
        assert set(api.objects) == set(installed)
        releases.uninstall("prod")
    assert set(api.objects) == before


def test_a_field_that_cannot_change_stops_an_upgrade(api: KubernetesApi) -> None:
    """The judge of the test above: had the chart changed such a field, Helm would have failed."""
    assert "Deployment" in IMMUTABLE
    with connected(api) as releases:
        releases.install(CHART, "prod", BARE)
        (routers,) = api.by_kind("Deployment")
        routers["spec"]["selector"] = {"matchLabels": {"app": "old"}}
        with pytest.raises(helm().HelmError, match="immutable"):
            releases.upgrade(CHART, "prod", BARE)


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    files = plain_files()
    assert len(files) == 12
    for path, text in files.items():
        assert path.read_text() == text, "run: python -m tests.house.manifests"
