"""What hosts of a rig need to be a cluster: ssh, a Redis, Ray, and this program's environment."""

import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from fleet.local.redis_server import server_binary
from tests.hosts.rig.namespaces import HOME, Host, RigError

ROOT = Path(__file__).parents[3]
RAY_PORT = 6379
REDIS_PORT = 6399
_SSH_LIMIT_S = 10.0
# A dead node is noticed within 5 s; a node waits ten minutes for a head that is away.
HEAD_SETTINGS = {
    "RAY_health_check_initial_delay_ms": "3000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
NODE_SETTINGS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # else workers stand back behind all that is not Ray's
    "RAY_AUTH_MODE": "token",
}


def share_program(hosts: Iterable[Host]) -> None:
    """Let hosts run this very program, with the Python that runs it here."""
    folder = str(Path(sys.executable).parent)
    for host in hosts:
        path = host.environment.get("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
        host.environment["PATH"] = f"{folder}:{path}"
        host.environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'proto'}"


def share_ray_token(hosts: Iterable[Host], token: str = "") -> str:
    """Give hosts one token for Ray, as a file that only their user reads."""
    token = token or secrets.token_hex(32)
    for host in hosts:
        host.write(f"{HOME}/.ray/auth_token", token)
    return token


def open_ssh(operator: Host, hosts: Iterable[Host]) -> None:
    """Run sshd on ``hosts``, and let ``operator`` in with a key of its own.

    Raises:
        RigError: There is no sshd (Debian's openssh-server), or it does not start.
    """
    operator.output(
        "for tool in ssh ssh-keygen sshd; do command -v $tool > /dev/null ||"
        " { echo no $tool here: openssh-client and openssh-server have them; exit 1; }; done"
    )
    operator.output(
        f"mkdir -p {HOME}/.ssh && ssh-keygen -q -t ed25519 -N '' -f {HOME}/.ssh/id_ed25519"
    )
    key = operator.output(f"cat {HOME}/.ssh/id_ed25519.pub")
    for host in hosts:
        host.write(f"{HOME}/.ssh/authorized_keys", key)
        host.output("ssh-keygen -q -t ed25519 -N '' -f /run/sshd_key")
        options = ("HostKey=/run/sshd_key", "UsePAM=no", "PermitRootLogin=prohibit-password")
        flags = " ".join(f"-o {shlex.quote(option)}" for option in options)
        host.output(f"$(command -v sshd) -f /dev/null {flags}")
    accept = f"ssh -o StrictHostKeyChecking=accept-new -o ConnectTimeout={_SSH_LIMIT_S:g}"
    for host in hosts:
        for known_as in (host.address, host.name):
            operator.output(f"{accept} root@{known_as} true")


def start_redis(host: Host, password: str, port: int = REDIS_PORT) -> str:
    """Run a Redis on a host; its URL, for the others."""
    lines = f"port {port}\nbind 0.0.0.0\nrequirepass {password}\nsave ''\ndir /tmp\n"
    host.write(f"/run/redis-{port}.conf", lines)
    host.start([str(server_binary()), f"/run/redis-{port}.conf"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + _SSH_LIMIT_S
    while "refused" in host.output(f"bash -c '</dev/tcp/127.0.0.1/{port}' 2>&1", ok=False):
        if time.monotonic() > deadline:
            raise RigError("Redis did not start")
        time.sleep(0.1)
    return f"redis://:{password}@{host.address}:{port}/0"


def start_ray(
    host: Host,
    head: Host,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> None:
    """Join a host to the Ray of ``head``, which has to be the first."""
    base = ["ray", "start", "--disable-usage-stats", f"--node-ip-address={host.address}"]
    base += ["--node-manager-port=6380", "--object-manager-port=6381"]
    base += ["--min-worker-port=11000", "--max-worker-port=11999", "--object-store-memory=80000000"]
    patient = {"RAY_raylet_start_wait_time_s": "110"}  # the hosts share the machine's cores
    settings = {**NODE_SETTINGS, **patient, **(environment or {})}
    if host is head:
        settings |= HEAD_SETTINGS
        base += ["--head", f"--port={RAY_PORT}", "--num-cpus=0", "--include-dashboard=false"]
    else:
        base += [f"--address={head.address}:{RAY_PORT}"]
    host.output([*base, *flags], timeout_s=timeout_s, environment=settings)


def run_unit(host: Host, unit: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Run a host's command as systemd would by a unit file: again two seconds after each end.

    Args:
        host: There is no systemd in it: a shell plays it.
        unit: The file; its ``Environment=`` and ``ExecStart=`` are taken as they stand.
        environment: What its ``EnvironmentFile=`` would say.
    """
    text = unit.read_text().replace("\\\n", " ")
    lines = [line.partition("=") for line in text.splitlines() if not line.startswith("#")]
    settings = dict(environment)
    for key, _, value in lines:
        if key == "Environment":
            settings |= dict(pair.split("=", 1) for pair in shlex.split(value))
    command = next(value for key, _, value in lines if key == "ExecStart")
    script = f"while :; do {command}; sleep 2; done >> {HOME}/unit.log 2>&1"
    return host.start(script, environment=settings)


def baton(host: Host, *arguments: str, timeout_s: float = 60.0, ok: bool = True) -> str:
    """Run a `baton` command on a host; what it prints."""
    command = [sys.executable, "-P", "-m", "fleet.cli.main", *arguments]
    settings = {"RAY_AUTH_MODE": "token", "COLUMNS": "160", "TERM": "dumb"}
    return host.output(command, timeout_s=timeout_s, environment=settings, ok=ok)


def install_base(host: Host) -> None:
    """What the hosts' image has before anything is set up: an environment with the dependencies.

    Packages come from this program's environment, as there is no index to fetch them from.
    """
    packages = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    host.output([sys.executable, "-m", "venv", "--without-pip", "/opt/baton"], timeout_s=60)
    host.output(f"echo {packages} > $(ls -d /opt/baton/lib/python*/site-packages)/image.pth")
    starter = "#!/opt/baton/bin/python\nfrom ray.scripts.scripts import main\n\nmain()\n"
    host.write("/opt/baton/bin/ray", starter, mode="755")
