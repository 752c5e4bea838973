"""How the tests are shared out between processes (`make test` runs them with xdist)."""

import functools
import gc
import hashlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# gRPC's fork handlers abort a process now and then that starts another one.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# Ray reads this when it is imported, and never again; a fleet's own Ray asks for a token.
os.environ["RAY_AUTH_MODE"] = "token"
import ray  # noqa: F401 - see above

del os.environ["RAY_AUTH_MODE"]

import httpx._transports.default as httpx_default
import httpx2._transports.default as httpx2_default
import pytest
from xdist.scheduler import LoadScopeScheduling

import tests.soak  # noqa: F401 - selects hypothesis' profile
from baton.text.template import _Environment as ChatEnvironment

# Modules and collected tests stay: a search for garbage among them takes a fifth of the collection.
gc.disable()

TOGETHER = ("tests/e2e/", "tests/hosts/", "tests/router/page/", "tests/engine/text/")
# Long, mostly waiting: at the end of a run one of them would be alone.
EARLY = (
    "tests/fleet/attached/test_changing.py",
    "tests/fleet/attached/test_faults.py",
    "tests/workers/test_handoff.py",
    "tests/workers/test_vllm_hand_off.py",
)
# A context reads all certificates of the system, which takes 25 ms; tests open hundreds of clients.
for transport in (httpx_default, httpx2_default):
    transport.create_ssl_context = functools.cache(transport.create_ssl_context)
# A chat template compiles in 20 ms, and tests build hundreds of routers and parsers with the same.
_compile = ChatEnvironment.compile
_code_of = functools.cache(lambda source: _compile(ChatEnvironment(), source))
ChatEnvironment.compile = lambda self, source: _code_of(source)

COSTLY_CPU_S = 3.0
"""Most CPU seconds of a quick test on an EPYC, unless it is marked."""
_TOLERANCE = 2.0  # CPU seconds differ by the neighbours, and by which children end in a test
_EPYC_LOOP_S = 0.04  # of `_loop_s` there

SLOW_LIMIT_S = 600.0  # where a test names none: its neighbours are as slow


class ByFile(LoadScopeScheduling):
    """A file stays together, for its fixtures; so does all of e2e, for the fleet that it shares.

    So do the tests of the page, for their browser, those of text, for a large tokenizer, and all
    that makes hosts of namespaces: five of them, loaded, are enough for one machine.

    xdist has ``loadgroup`` for this, which pytest 9.2 broke without a word: groups were scattered,
    and every fleet of a module was started in both processes.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((folder for folder in TOGETHER if file.startswith(folder)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """The scheduler, whatever ``--dist`` says; files in the order of the collected tests."""
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: _turn_of(item.nodeid.partition("::")[0]))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


@functools.cache
def _turn_of(file: str) -> tuple[int, bytes]:
    """Return the place of a file in the order of a run: what is long, then all mixed.

    Some folders compute (tests/engine), others wait (tests/workers). Side by side they use the
    CPUs; one after the other they compete for them, then leave them idle. Files of tests/vllm keep
    the order of the command line, which is that of their times.
    """
    if file.startswith("tests/vllm/"):
        return 0, b""
    turn = 0 if file.startswith(TOGETHER) else 1 if file in EARLY else 2
    return turn, hashlib.blake2b(file.encode(), digest_size=8).digest()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Exclude modules and tests from garbage collections, of which few are of all objects.

    With Python's thresholds they take a fifth of the CPU time of the tests of the router.
    """
    gc.freeze()
    gc.set_threshold(5000, 10, 8)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note the CPU seconds of a test: of this process, and of the children that end with it."""
    began_s = _cpu_s()
    item.user_properties.append(("began_cpu_s", began_s))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note the CPU seconds of the test itself, without its fixtures."""
    began_s = _cpu_s()
    try:
        return (yield)
    finally:
        item.user_properties.append(("call_cpu_s", _cpu_s() - began_s))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if call.when == "teardown":
        began_s = dict(item.user_properties)["began_cpu_s"]
        report.user_properties.append(("cpu_s", _cpu_s() - began_s))
    return report


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail a run that keeps CPU seconds if a test without the marker ``costly`` takes too many.

    That is printed last: of a long output often only the end is kept.
    """
    yield
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if "BATON_CPU_TIMES" not in os.environ or terminal is None:
        return
    limit_s = COSTLY_CPU_S * _TOLERANCE * max(min(_loop_s() for _ in range(5)) / _EPYC_LOOP_S, 1.0)
    for report in terminal.stats.get("passed", ()):
        taken_s = dict(report.user_properties).get("call_cpu_s", 0.0)
        if taken_s > limit_s and "costly" not in report.keywords:
            terminal.section(f"{report.nodeid} takes {taken_s:.1f} CPU seconds")
            terminal.line(f"make it cheaper than {COSTLY_CPU_S:g}, or mark it `costly` or `long`")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _loop_s() -> float:
    """Return the CPU seconds of a fixed loop."""
    began_s = time.process_time()
    total = 0
    for number in range(1_000_000):
        total += number * number % 7
    return time.process_time() - began_s


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests ran again: each is a defect, also if it passed then."""
    _write_cpu_times(terminalreporter)
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"first failure of {report.nodeid}")
        terminalreporter.line(report.longreprtext[-4000:])


def _write_cpu_times(terminalreporter: pytest.TerminalReporter) -> None:
    """Write CPU seconds and name of each test, the most expensive first, to BATON_CPU_TIMES."""
    if file := os.environ.get("BATON_CPU_TIMES"):
        reports = terminalreporter.stats.get("", ())  # successful setups and teardowns
        taken = [(dict(one.user_properties).get("cpu_s", 0.0), one.nodeid) for one in reports]
        lines = [f"{cpu_s:8.2f} {name}" for cpu_s, name in sorted(taken, reverse=True) if cpu_s]
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")
