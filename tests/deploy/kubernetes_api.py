"""Kubernetes API in memory, for Helm's client: discovery, create, read, apply, delete.

No package that can be had here has an API server. This one keeps objects by path, merges as an
apply of one manager does, and refuses changes of immutable fields.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import yaml

RESOURCES = {
    "v1": {"Secret": "secrets", "Service": "services", "Namespace": "namespaces"},
    "apps/v1": {"Deployment": "deployments"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "ray.io/v1": {"RayCluster": "rayclusters"},
    "keda.sh/v1alpha1": {"ScaledObject": "scaledobjects"},
    "monitoring.coreos.com/v1": {"ServiceMonitor": "servicemonitors", "PodMonitor": "podmonitors"},
    "monitoring.coreos.com/v1alpha1": {"ScrapeConfig": "scrapeconfigs"},
    "inference.networking.k8s.io/v1": {"InferencePool": "inferencepools"},
    "gateway.networking.k8s.io/v1": {"HTTPRoute": "httproutes"},
}
IMMUTABLE = {"Deployment": ("selector",), "Service": ("clusterIP",)}  # fields of `spec`


class KubernetesApi:
    """API server on a port of its own.

    Attributes:
        objects: Objects by path.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.changes = 0
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_call(self) -> None:
                size = int(self.headers.get("content-length", 0))
                body = yaml.safe_load(self.rfile.read(size)) if size else None
                status, answer = api.answer(self.command, self.path, body)
                raw = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def __getattr__(self, name: str) -> Any:
                if name.startswith("do_"):
                    return self.handle_call
                raise AttributeError(name)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def by_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the objects of these kinds."""
        return [found for found in self.objects.values() if found["kind"] in kinds]

    def answer(self, method: str, target: str, body: Any) -> tuple[int, dict[str, Any]]:
        path = urlsplit(target).path.rstrip("/")
        parts = path.split("/")
        if method == "GET" and (found := _discovery(path)) is not None:
            return 200, found
        is_list = parts[-1] in {name for kinds in RESOURCES.values() for name in kinds.values()}
        if method == "POST":
            return self._keep(f"{path}/{body['metadata']['name']}", body)
        if method in ("PATCH", "PUT"):
            old = self.objects.get(path, {})
            return self._keep(path, body if method == "PUT" else _merged(old, body))
        if is_list:
            items = [found for name, found in self.objects.items() if name.startswith(path + "/")]
            return 200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}
        found = self.objects.pop(path, None) if method == "DELETE" else self.objects.get(path)
        return (200, found) if found is not None else (404, _failure(404, "NotFound", path))

    def _keep(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        old = self.objects.get(path, {})
        for field in IMMUTABLE.get(body.get("kind", ""), ()):
            if old and old["spec"].get(field) != body["spec"].get(field):
                return 422, _failure(422, "Invalid", f"spec.{field}: field is immutable")
        self.changes += 1
        metadata = body["metadata"] | {"uid": path, "resourceVersion": str(self.changes)}
        self.objects[path] = body | {"metadata": metadata}
        return (200 if old else 201), self.objects[path]


def _merged(old: Any, new: Any) -> Any:
    """Apply by the only manager: its fields are those of ``new``; a null removes one."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    kept = {key: old[key] for key in ("uid", "resourceVersion") if key in old}
    both = {key: _merged(old.get(key), value) for key, value in new.items()}
    return kept | {key: value for key, value in both.items() if value is not None}


def _failure(code: int, reason: str, message: str) -> dict[str, Any]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return status | {"code": code, "reason": reason, "message": message}


def _open_api(version: str) -> dict[str, Any]:
    """Document of one version, by which Helm leaves the check of fields to the server."""
    group, _, name = version.rpartition("/")
    paths = {
        f"/{plural}": {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query"}],
                "x-kubernetes-group-version-kind": {"group": group, "version": name, "kind": kind},
            }
        }
        for kind, plural in RESOURCES[version].items()
    }
    return {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": paths}


def _discovery(path: str) -> dict[str, Any] | None:
    groups: dict[str, list[dict[str, str]]] = {}
    for version in RESOURCES:
        group, _, name = version.rpartition("/")
        groups.setdefault(group, []).append({"groupVersion": version, "version": name})
        if path == (f"/apis/{version}" if group else f"/api/{version}"):
            verbs = ["create", "delete", "get", "list", "patch", "update"]
            resources = [
                {"name": plural, "kind": kind, "namespaced": kind != "Namespace", "verbs": verbs}
                for kind, plural in RESOURCES[version].items()
            ]
            return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    if path == "/version":
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    if path == "/openapi/v3":
        places = [
            f"apis/{version}" if "/" in version else f"api/{version}" for version in RESOURCES
        ]
        return {"paths": {each: {"serverRelativeURL": f"/openapi/v3/{each}"} for each in places}}
    if path.startswith("/openapi/v3/"):
        return _open_api(path.split("/", 4)[4])
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        listed = [
            {"name": group, "versions": versions, "preferredVersion": versions[0]}
            for group, versions in groups.items()
            if group
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    return None
