"""Tokens that end answers or stand in templates, named by a tokenizer's own files."""

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter

from baton.model.artifact import resolve_model
from baton.model.gguf_tokens import end_tokens, token_id
from baton.text.template import ChatTemplate, special_tokens_of
from tests.engine.loading.test_loading import VOCAB, write_directory, write_gguf

ADDED = {"<|endoftext|>": 2, "<|im_start|>": 7, "<|im_end|>": 8, "<far>": 200}
USER = [{"role": "user", "content": "hi"}]


def folder(path: Path, *, generation: object = None, **files: object) -> Path:
    write_directory(path, shards=1, eos_token_id=2, bos_token_id=2)
    added = [{"id": i, "content": text, "special": True} for text, i in ADDED.items()]
    tokenizer = {"added_tokens": added, "model": {"vocab": {"a": 5}, "merges": []}}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "generation_config.json").write_text(json.dumps(generation or {}))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("eos", "generation", "ends"),
    [
        ("<|im_end|>", None, (2, 8)),
        ({"__type": "AddedToken", "content": "<|im_end|>"}, {"eos_token_id": [2, 3]}, (2, 3, 8)),
        ("<|im_end|>", {"eos_token_id": None}, (8,)),
        ("<|endoftext|>", None, (2,)),
        ("a", None, (2, 5)),
        ("<far>", None, (2,)),
        ("unknown", None, (2,)),
        (None, None, (2,)),
    ],
)
def test_the_end_token_of_the_tokenizer_ends_answers_too(
    tmp_path: Path, eos: object, generation: object, ends: tuple[int, ...]
) -> None:
    path = folder(tmp_path, generation=generation, tokenizer_config={"eos_token": eos})
    assert resolve_model(str(path)).config.eos_token_ids == ends


def test_an_older_file_names_the_end_token_as_well(tmp_path: Path) -> None:
    path = folder(tmp_path, special_tokens_map={"eos_token": {"content": "<|im_end|>"}})
    assert resolve_model(str(path)).config.eos_token_ids == (2, 8)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, "<|im_start|>,<|im_end|>,"),
        ({"bos_token": {"content": "<|im_start|>"}, "pad_token": "p"}, "<|im_start|>,id 2,p"),
        ({"bos_token": None, "eos_token": None, "add_bos_token": True}, ",,"),
        ({}, "id 2,id 2,"),
    ],
)
def test_templates_show_the_special_tokens_of_the_tokenizer(
    tmp_path: Path, given: dict[str, object], shown: str
) -> None:
    artifact = resolve_model(str(folder(tmp_path, tokenizer_config=given)))
    special = special_tokens_of(artifact, lambda token_id: f"id {token_id}")
    template = ChatTemplate("{{ bos_token }},{{ eos_token }},{{ pad_token }}", special)
    assert template.render(USER) == shown


@pytest.mark.parametrize(
    ("texts", "kind", "ends"),
    [
        (["<end_of_turn>"], 3, (2, 5)),
        (["<|im_end|>", "<|endoftext|>"], 3, (2, 5, 6)),
        (["<|eot_id|>", "<|eom_id|>"], 3, (2, 5, 6)),
        (["<|im_end|>"], 4, (2, 5)),  # the type of an added token in many files
        (["<|im_end|>"], 1, (2, 5)),
        (["</s>"], 3, (2, 5)),
        (["</s>"], 4, (2,)),  # HTML in Gemma's vocabulary
        (["<|return|>", "<|call|>", "<|end|>"], 3, (2, 5, 6)),
        (["<|calls|>", "<|flush|>", "<|end|>"], 3, (2, 5, 6)),
        (["<|end|>"], 3, (2, 5)),
        (["[PAD]", "<REPO>"], 1, (2, 5, 6)),
        (["<|im_start|>"], 3, (2,)),
    ],
)
def test_the_end_of_a_turn_in_a_gguf_file_is_found_by_its_text(
    tmp_path: Path, texts: list[str], kind: int, ends: tuple[int, ...]
) -> None:
    def change(writer: GGUFWriter) -> None:
        tokens = [f"t{i}" for i in range(VOCAB)]
        tokens[5 : 5 + len(texts)] = texts
        writer.kv_data[0]["tokenizer.ggml.tokens"].value = tokens
        writer.add_token_types([kind if text in texts else 1 for text in tokens])

    write_gguf(tmp_path / "m.gguf", change=change)
    assert resolve_model(str(tmp_path / "m.gguf")).config.eos_token_ids == ends


def test_a_sentencepiece_file_without_ids_has_those_of_llama_cpp() -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "e"]}
    assert token_id(metadata, "bos") == 1
    assert end_tokens(metadata, 3) == (2,)
    assert token_id({**metadata, "tokenizer.ggml.model": "gpt2"}, "bos") is None
