"""A rig of hosts: each is a set of Linux namespaces with an address on a switch of its own.

    with Rig() as rig:
        one, two = rig.add("one"), rig.add("two")
        one.output(["python", "-c", "..."])
        rig.cut("two"), rig.join("two"), rig.power_off("two")

A host has its own network, processes, mounts, name, System V IPC, ``/tmp``, ``/dev/shm``, ``/run``,
``/opt`` and home. It shares the kernel, the clock, the cores and, unless hidden, the files of this
machine, so that the program need not be installed anew. The switch lives in a network namespace
too: nothing here touches the machine's own network.

Nothing is left behind, however the rig ends: it writes no file and gives nothing a name outside.
Each host hangs on a process that the kernel ends with the rig's, and with a host's first process
go the others, its mounts, and its end of the cable.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from fleet.local.subprocesses import die_with_parent

HOME = "/home/operator"
_SUBNET = "10.77.0"
_START_LIMIT_S = 20.0
_TOOLS = ("unshare", "nsenter", "ip", "mount", "bash")
_NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc")
_LAYER_VARIABLE = "BATON_HOSTS_LAYER"

# What a host does when it starts, as its first process. $1 is its name, $2 its address, $3 the
# folders below /tmp that it shares, $4 the hosts file, $5 a folder whose usr/ lies over /usr.
# The last line stays to bury orphans, as a first process must: bash waits for whatever ends.
_FIRST_PROCESS = rf"""
set -e
mount --make-rprivate /
hostname "$1"
mount -t tmpfs -o size=2g tmpfs /mnt
mkdir -p /mnt/tmp /mnt/etc
for folder in $3; do mkdir -p "/mnt$folder"; mount --bind "$folder" "/mnt$folder"; done
printf '%s' "$4" > /mnt/etc/hosts
sed 's|^root:\([^:]*:[^:]*:[^:]*:[^:]*\):[^:]*:|root:\1:{HOME}:|' /etc/passwd > /mnt/etc/passwd
grep -q ^sshd: /mnt/etc/passwd || echo 'sshd:x:100:65534::/run/sshd:/bin/false' >> /mnt/etc/passwd
echo "$1" > /mnt/etc/hostname
mount --bind /mnt/etc/hosts /etc/hosts
mount --bind /mnt/etc/hostname /etc/hostname
mount --bind /mnt/etc/passwd /etc/passwd
[ -z "$5" ] || mount -t overlay overlay -o "lowerdir=$5/usr:/usr" /usr
for folder in /dev/shm /run /opt /home; do mount -t tmpfs tmpfs "$folder"; done
mount --rbind /mnt/tmp /tmp
mkdir -m 755 -p {HOME} /run/sshd
chmod 1777 /tmp
mount -t proc proc /proc
ip link set lo up
ip address add "$2/24" dev eth0
ip link set eth0 up
echo up
exec > /dev/null < /dev/null
while :; do sleep infinity & wait; done
"""
# A host gets its cable before it starts: it waits for a line on its standard input.
_WAIT_FOR_CABLE = "read -r _ && "


class RigError(RuntimeError):
    """There can be no rig here; the message says why."""


def unavailable() -> str:
    """Why this machine can have no rig; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts as namespaces need root on Linux"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts as namespaces need {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces with bridges here: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class Host:
    """One host. Commands run in it as root, with its own home and environment.

    Attributes:
        name: Its host name, which all others resolve.
        address: On the rig's switch.
        environment: Of commands, over a small default one.
    """

    name: str
    address: str
    environment: dict[str, str] = field(default_factory=dict)
    _holder: "subprocess.Popen[bytes] | None" = None
    _first_pid: int = 0
    _started: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    @property
    def running(self) -> bool:
        """Whether it has power."""
        return self._holder is not None and self._holder.poll() is None

    def start(
        self,
        command: Sequence[str] | str,
        *,
        environment: Mapping[str, str] | None = None,
        folder: str = HOME,
        **options: Any,
    ) -> "subprocess.Popen[bytes]":
        """Start a command; a text is one for the shell.

        Args:
            command: What to run.
            environment: More of it, for this command.
            folder: Where to run it.
            **options: Of `subprocess.Popen`.
        """
        if not self.running:
            raise RigError(f"{self.name} is off")
        words = ["bash", "-c", command] if isinstance(command, str) else list(command)
        inside = ["env", "-i", *(f"{k}={v}" for k, v in self._variables(environment).items())]
        self._started = [process for process in self._started if process.poll() is None]
        process: subprocess.Popen[bytes] = subprocess.Popen(
            [*_enter(self._first_pid), *_NAMESPACES, f"--wdns={folder}", *inside, *words],
            preexec_fn=die_with_parent(),
            **options,
        )
        self._started.append(process)
        return process

    def output(
        self,
        command: Sequence[str] | str,
        *,
        timeout_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
        ok: bool = True,
    ) -> str:
        """Run a command and return what it prints, errors included.

        Raises:
            RigError: It failed (unless ``ok`` is false) or took longer than ``timeout_s``.
        """
        process = self.start(
            command,
            environment=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            raw, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as late:
            process.kill()
            raise RigError(f"{self.name}: {_shown(command)} took over {timeout_s:g} s") from late
        text = raw.decode(errors="replace")
        if ok and process.returncode:
            raise RigError(
                f"{self.name}: {_shown(command)} ended with {process.returncode}:\n{text}"
            )
        return text

    def write(self, file: str, text: str, mode: str = "600") -> None:
        """Write a file in it."""
        place = shlex.quote(file)
        script = f"mkdir -p $(dirname {place}) && cat > {place} && chmod {mode} {place}"
        process = self.start(script, stdin=subprocess.PIPE)
        process.communicate(text.encode(), timeout=20)
        if process.returncode:
            raise RigError(f"{self.name}: cannot write {file}")

    def kill_everything(self) -> None:
        """SIGKILL to all of its processes; the host itself stays up."""
        process = self.start("kill -9 -1")  # reaches neither the first process nor other hosts
        process.wait(20)

    def _variables(self, more: Mapping[str, str] | None) -> dict[str, str]:
        return {
            "HOME": HOME,
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "OMP_WAIT_POLICY": "passive",
            **self.environment,
            **(more or {}),
        }

    def _power_on(self, hosts_file: str, shared: Sequence[str], layer: str) -> IO[bytes]:
        """Begin its first process, which waits for its cable; its standard input."""
        script = _WAIT_FOR_CABLE + "{ " + _FIRST_PROCESS + "\n}"
        arguments = [self.name, self.address, " ".join(shared), hosts_file, layer]
        self._holder = subprocess.Popen(
            [
                *["unshare", *_NAMESPACES, "--fork", "--kill-child=SIGKILL"],
                *["bash", "-c", script, self.name, *arguments],
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        holder = self._holder.pid
        children = Path(f"/proc/{holder}/task/{holder}/children")
        while not (found := children.read_text().split()):  # a moment, until unshare has forked
            if self._holder.poll() is not None:
                raise RigError(f"{self.name}: unshare ended with {self._holder.returncode}")
        self._first_pid = int(found[0])
        if self._holder.stdin is None:
            raise RigError("no way to tell a host to start")
        return self._holder.stdin

    def _wait_until_up(self) -> None:
        holder = self._holder
        if holder is None or holder.stdout is None or holder.stderr is None:
            raise RigError(f"{self.name} was not started")
        if holder.stdout.readline() != b"up\n":
            raise RigError(f"{self.name} did not start: {holder.stderr.read().decode()}")

    def _power_off(self) -> None:
        if self._holder is None:
            return
        if self.running:  # else the number may be another process's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first_pid, signal.SIGKILL)
        for process in (*self._started, self._holder):  # the kernel ends what was in it
            process.wait(_START_LIMIT_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._holder = None


class Rig:
    """The hosts and the switch between them.

    Args:
        shared: Folders below ``/tmp`` that every host sees as they are here.
        layer: A folder whose ``usr/`` lies over every host's ``/usr``: programs that this machine
            lacks. Default: the environment's ``BATON_HOSTS_LAYER``.
        environment: Of every host's commands.

    Raises:
        RigError: This machine can have none.
    """

    def __init__(
        self,
        shared: Sequence[Path] = (),
        layer: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if why := unavailable():
            raise RigError(why)
        below = [str(folder.resolve()) for folder in shared]
        self._shared = [folder for folder in below if folder.startswith("/tmp/")]
        self._layer = os.environ.get(_LAYER_VARIABLE, "") if layer is None else layer
        self._environment = dict(environment or {})
        self._switch: subprocess.Popen[bytes] | None = None
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Self:
        script = (
            "ip link add br0 type bridge && ip link set br0 up && echo up && exec sleep infinity"
        )
        self._switch = subprocess.Popen(
            ["unshare", "--net", "bash", "-c", script],
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        if self._switch.stdout is None or self._switch.stdout.readline() != b"up\n":
            raise RigError("the switch did not start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in self.hosts.values():
            host._power_off()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
            if self._switch.stdout is not None:
                self._switch.stdout.close()

    def add(self, *names: str) -> list[Host]:
        """Add hosts and start them. Add all that shall know each other by name in one call."""
        for name in names:
            address = f"{_SUBNET}.{len(self.hosts) + 1}"
            self.hosts[name] = Host(name, address, dict(self._environment))
        return [self.power_on(name) for name in names]

    def power_on(self, name: str) -> Host:
        """Start a host that has no power: with its name and address, and nothing on its disks."""
        host = self.hosts[name]
        known = "".join(f"{h.address} {h.name}\n" for h in self.hosts.values())
        go = host._power_on(f"127.0.0.1 localhost\n{known}", self._shared, self._layer)
        port, number = _port(name), int(host.address.rpartition(".")[2])
        card = f"eth0 address 02:00:00:00:00:{number:02x} netns {host._first_pid}"
        self._in_switch(
            f"ip link delete {port} 2> /dev/null; "  # of an earlier life: the kernel is slow
            f"ip link add {port} type veth peer name {card} && "
            f"ip link set {port} master br0 up"
        )
        go.write(b"\n")
        go.flush()
        host._wait_until_up()
        return host

    def power_off(self, name: str) -> None:
        """End a host as a pulled plug does: nobody on the network hears of it."""
        if self.hosts[name].running:
            self.cut(name)
            self.hosts[name]._power_off()

    def cut(self, name: str) -> None:
        """Pull a host's network cable."""
        self._in_switch(f"ip link set {_port(name)} down")

    def join(self, name: str) -> None:
        """Put it back in."""
        self._in_switch(f"ip link set {_port(name)} up")

    def mute(self, name: str) -> None:
        """Let nothing out of a host; what is sent to it arrives."""
        self.hosts[name].output("tc qdisc replace dev eth0 root pfifo limit 0")

    def slow_down(self, name: str, rate: str) -> None:
        """Let out of a host no more than a rate as `tc` writes it: ``5mbit``."""
        self.hosts[name].output(
            f"tc qdisc replace dev eth0 root tbf rate {rate} burst 32kbit latency 400ms"
        )

    def unhinder(self, name: str) -> None:
        """End `mute` or `slow_down`."""
        self.hosts[name].output("tc qdisc delete dev eth0 root")

    def _in_switch(self, script: str) -> None:
        if self._switch is None:
            raise RigError("the rig has no switch: use it in a `with` statement")
        done = subprocess.run(
            [*_enter(self._switch.pid), "--net", "bash", "-c", script],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RigError(f"{script}: {done.stderr.strip()}")


def _enter(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}"]


def _port(name: str) -> str:
    """Name of the switch's end of a cable: interfaces have 15 characters."""
    return f"p-{name}"[:15]


def _shown(command: Sequence[str] | str) -> str:
    return command if isinstance(command, str) else shlex.join(command)
