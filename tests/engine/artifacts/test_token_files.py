"""Tokenizers of Hugging Face directories beside those of transformers, and refused keys."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig

from baton.model.artifact import ModelError, resolve_model
from baton.model.token_keys import GENERATION_CONFIG
from baton.text.tokenizer import byte_alphabet, load_tokenizer
from tests.engine.loading.test_loading import write_directory

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
MARKED = {"__type": "AddedToken", **FLAGS, "content": "<|three|>", "rstrip": True, "special": False}
TEXT = "a<|one|> <|two|> <|three|>b<s>HelloWorld 12<|four|>5"
TEMPLATES = [{"name": name, "template": name} for name in ("default", "tool_use", "rag")]


def folder(path: Path, **files: object) -> Path:
    """A directory whose tokenizer has `<|one|>` (ordinary) and `<|two|>` (special)."""
    write_directory(path, shards=1, vocab_size=260)
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(byte_alphabet()))}, []))
    split = pre_tokenizers.Split(Regex(r"\p{N}+|\P{N}+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<|one|>", normalized=False)])
    backend.add_special_tokens(["<|two|>"])
    (path / "tokenizer.json").write_text(backend.to_str())
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {}},
        {"tokenizer_config": {"eos_token": "<|one|>"}},
        {"tokenizer_config": {"bos_token": "<s>", "pad_token": MARKED}},
        {"tokenizer_config": {"image_token": "<|three|>", "add_bos_token": True}},
        {"tokenizer_config": {"additional_special_tokens": ["<|one|>", "<|three|>"]}},
        {"tokenizer_config": {"extra_special_tokens": {"image_token": "<|three|>"}}},
        {
            "tokenizer_config": {
                "eos_token": "<|three|>",
                "added_tokens_decoder": {
                    "258": {**FLAGS, "content": "<|three|>", "special": False, "lstrip": True},
                    "257": {**FLAGS, "content": "<|two|>", "special": True, "rstrip": True},
                },
            },
            "special_tokens_map": {"eos_token": "<|one|>"},
        },
        {"special_tokens_map": {"eos_token": {**FLAGS, "content": "<|three|>", "lstrip": True}}},
        {"tokenizer_config": {"eos_token": "<s>"}, "special_tokens_map": {"eos_token": "<|one|>"}},
        {"added_tokens": {"<|three|>": 258, "<|one|>": 256}},
        {"tokenizer_config": {"pad_token": "<|three|>", "unk_token": "<s>", "x_token": "<|four|>"}},
        {"tokenizer_config": {"unk_token": MARKED, "extra_special_tokens": ["<|three|>"]}},
        {
            "tokenizer_config": {
                "added_tokens_decoder": {"257": {**FLAGS, "content": "<|two|>", "special": False}}
            }
        },
    ],
    ids=str,
)
def test_ids_and_shown_texts_are_those_of_transformers(tmp_path: Path, files: dict) -> None:
    path = folder(tmp_path, **files)
    theirs = AutoTokenizer.from_pretrained(path)
    artifact = resolve_model(str(path))
    ours = load_tokenizer(artifact.tokenizer)
    ids = theirs(TEXT).input_ids
    assert ours.encode(TEXT, add_special_tokens=True) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert artifact.special_tokens.get("eos_token") == theirs.eos_token
    assert theirs.eos_token is None or theirs.eos_token_id in artifact.config.eos_token_ids


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "GPT2TokenizerFast", "TokenizersBackend"])
def test_a_space_goes_before_texts_if_the_class_reads_the_key(tmp_path: Path, kind: str) -> None:
    path = folder(tmp_path, tokenizer_config={"tokenizer_class": kind, "add_prefix_space": True})
    ours = load_tokenizer(resolve_model(str(path)).tokenizer)
    theirs = AutoTokenizer.from_pretrained(path)
    for text in ("Hello you", " a<|two|>b", "<|one|> c"):
        assert ours.encode(text) == theirs(text).input_ids


def test_the_right_words_of_mistral_are_used_if_the_files_say_so(tmp_path: Path) -> None:
    for flag, pieces in ((True, ["Hello", "World", "1", "2"]), (False, ["HelloWorld", "12"])):
        path = folder(tmp_path / str(flag), tokenizer_config={"fix_mistral_regex": flag})
        backend = load_tokenizer(resolve_model(str(path)).tokenizer).backend
        words = backend.pre_tokenizer.pre_tokenize_str("HelloWorld12")
        assert [word for word, _ in words] == pieces


def test_templates_have_names_and_files(tmp_path: Path) -> None:
    path = folder(tmp_path, chat_template={"chat_template": "of the processor"})
    assert resolve_model(str(path)).chat_template == "of the processor"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATES}))
    named = resolve_model(str(path))
    assert (named.chat_template, named.tool_template) == ("default", "tool_use")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("of a file")
    (path / "chat_template.jinja").write_text("first")
    (path / "additional_chat_templates" / "tool_use.jinja").rename(path / "kept")
    assert resolve_model(str(path)).tool_template is None  # files replace those of the JSON
    (path / "kept").rename(path / "additional_chat_templates" / "tool_use.jinja")
    files = resolve_model(str(path))
    assert (files.chat_template, files.tool_template) == ("first", "of a file")
    assert files.template_digest != named.template_digest


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("tokenizer_config", {"split_special_tokens": True}),
        ("generation_config", {"suppress_tokens": [3]}),
        ("generation_config", {"no_repeat_ngram_size": 3}),
        ("generation_config", {"stop_strings": ["x"]}),
        ("generation_config", {"typical_p": 0.9}),
        ("generation_config", {"encoder_repetition_penalty": 1.2}),
        ("generation_config", {"num_beams": 4}),
        ("generation_config", {"max_time": 3.0}),
    ],
)
def test_what_changes_answers_and_is_not_supported_is_refused(
    tmp_path: Path, file: str, keys: dict
) -> None:
    path = folder(tmp_path, **{file: keys})
    with pytest.raises(ModelError, match=rf"{file}.json: {next(iter(keys))} = .*remove the key"):
        resolve_model(str(path))
    assert resolve_model(str(path), allow_unsupported=True)


def test_every_key_of_transformers_has_a_rule_and_its_defaults_pass(tmp_path: Path) -> None:
    keys = {key for key in vars(GenerationConfig()) if not key.startswith("_")}
    assert keys <= GENERATION_CONFIG.keys()
    old = {"typical_p": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "max_new_tokens": 7}
    old |= {"num_beams": 1, "temperature": 0.0, "top_k": 0}
    path = folder(tmp_path, generation_config={**dict.fromkeys(keys), **old})
    assert resolve_model(str(path)).generation_defaults == {"max_tokens": 7, "temperature": 0.0}
    path = folder(tmp_path, generation_config={"min_p": 1.5})
    with pytest.raises(ModelError, match=r"min_p = 1\.5"):
        resolve_model(str(path))
