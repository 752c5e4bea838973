"""Router CPU of what other stacks send: JWTs, trace headers, llm-d's and session headers.

    python -m benchmarks.words [--rounds 8] [--seconds 6]

One router, one load; the kinds of requests take turns. CPU time is that of the router's process.
The goal is 1 % of a request for each.
"""

import contextlib
import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

import httpx
import typer
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

from baton.tenants.key_record import issue, new_key
from benchmarks.router.__main__ import Demand, Shape, Side, measure
from benchmarks.router.processes import TOKEN, redis, router, workers

_TREE = Path(__file__).parents[1]
_WORKERS = 4
_STEP_S = 0.006
_SHAPE = Shape(20, 16)
_CLIENTS = Demand(clients=64)
_TRACE = (
    "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate: vendor=00f067aa0ba902b7",
    "baggage: user=7,region=eu",
)
_LLM_D = (
    "x-llm-d-slo-ttft-ms: 10000",
    "x-llm-d-slo-tpot-ms: 1000",
    "x-llm-d-inference-fairness-id: team",
    "x-llm-d-inference-objective: chat",
)
_OPERATOR = {"authorization": f"Bearer {TOKEN}"}
_SESSION = ("x-session-id: 7f1c2a3b-4d5e-6f70-8192-a3b4c5d6e7f8",)


class _Issuer(BaseHTTPRequestHandler):
    """OpenID provider with one key."""

    key = RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})
    url = ""

    def do_GET(self) -> None:
        """Send the discovery document or the keys."""
        document: object = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        if not self.path.endswith("/openid-configuration"):
            document = KeySet([self.key]).as_dict()
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not log the request."""


@contextlib.contextmanager
def _issuer() -> Iterator[type[_Issuer]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Issuer)
    _Issuer.url = f"http://127.0.0.1:{server.server_address[1]}/realm"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield _Issuer
    server.shutdown()


def _token(issuer: type[_Issuer]) -> str:
    now = int(time.time())
    claims: dict[str, object] = {
        "iss": issuer.url,
        "aud": "baton",
        "sub": "user-7",
        "tenant": "team",
    }
    claims |= {"iat": now, "exp": now + 3600}
    return jwt.encode({"alg": "RS256", "kid": "one"}, claims, issuer.key, ["RS256"])


def _give_key(port: int) -> str:
    """Issue a key of a tenant with limits that its calls do not reach."""
    key = new_key()
    record = issue(key, {"tenant": "team"})
    sent = {"id": record.id, "sha256": record.sha256, "rights": record.rights}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=_OPERATOR) as http:
        http.post("/fleet/keys", json={"keys": [sent]}).raise_for_status()
        limits = {"rpm": 10**7, "tpm": 10**9, "tpd": 10**12, "concurrent": 10_000}
        http.put("/fleet/tenants/team", json=limits).raise_for_status()
    return key


def main(
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 8,
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement.")] = 6.0,
) -> None:
    """Print the CPU time of each kind of request as a multiple of a request with a key alone."""
    with contextlib.ExitStack() as stack:
        issuer = stack.enter_context(_issuer())
        clients = {"api_keys_file": "redis", "oidc": {"issuer": issuer.url, "audience": ["baton"]}}
        url = stack.enter_context(redis())
        workers_pid = stack.enter_context(workers(url, _WORKERS, _STEP_S))
        more = {"clients": clients}
        pids, port = stack.enter_context(router(_TREE, url, _WORKERS, more))
        time.sleep(2)
        key = _give_key(port)
        kinds: dict[str, tuple[str, tuple[str, ...]]] = {
            "key": (key, ()),
            "JWT": (_token(issuer), ()),
            "trace headers": (key, _TRACE),
            "llm-d's headers": (key, _LLM_D),
            "session header": (key, _SESSION),
            "the same key again": (key, ()),
        }
        spent_ms = defaultdict(list)
        for number in range(rounds):
            for name in list(kinds)[:: 1 if number % 2 else -1]:
                side = Side(port, pids, workers_pid, *kinds[name])
                figures = measure(name, side, _SHAPE, _CLIENTS, seconds)
                spent_ms[name].append(1e3 / figures.requests_per_cpu_s)
    for name, values in spent_ms.items():
        ratios = [mine / base for mine, base in zip(values, spent_ms["key"], strict=True)]
        low, *_, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 2
        print(
            f"{name:20} {statistics.median(values):.3f} ms of CPU, "
            f"{statistics.median(ratios):.4f} x a key's (quartiles {low:.4f} to {high:.4f})"
        )


if __name__ == "__main__":
    typer.run(main)
