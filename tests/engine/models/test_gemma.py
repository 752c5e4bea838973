"""Gemma 3 270M with real weights: it writes sense, keeps `exact`, and agrees with transformers."""

from typing import Any

import pytest
import torch

from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.llm import LLM
from baton.engine.loading.open import load_weights
from baton.engine.models.families import weight_table
from baton.engine.models.rope import unpair_rows
from baton.engine.selfcheck import ReadBound
from baton.model.artifact import ModelArtifact
from tests.engine.conftest import GEMMA

STORY = " a little girl named Lily. She was"  # greedy, in bf16 and in fp32


def test_the_package_is_described_in_full(gemma: ModelArtifact) -> None:
    assert gemma.architecture == "gemma3"
    assert gemma.revision == "1.0.0"
    assert gemma.license == "gemma"
    assert gemma.chat_template is None  # it is a base model
    c = gemma.config
    assert (c.family, c.num_layers, c.num_heads, c.num_kv_heads) == ("gemma3", 18, 4, 1)
    assert (c.hidden_size, c.head_dim, c.vocab_size) == (640, 256, 262_144)
    assert c.layer_windows == ((512,) * 5 + (None,)) * 3
    assert (c.rope_theta, c.local_rope_theta) == (1_000_000.0, 10_000.0)
    assert c.tie_word_embeddings
    assert c.eos_token_ids == (1, 106)


@pytest.fixture(scope="module")
def llm(gemma: ModelArtifact) -> LLM:
    return LLM(GEMMA, kv_blocks=160)  # exact, bf16: proves itself on the loaded weights


@pytest.mark.long
def test_it_continues_text_and_begins_with_bos(llm: LLM) -> None:
    story, france = llm.generate(
        ["Once upon a time, there was", "Paris is the capital of"], max_tokens=8
    )
    assert story.prompt_tokens == 8  # BOS and seven words
    assert story.text.startswith(STORY)
    assert france.text.startswith(" France")


@pytest.mark.slow
def test_answers_beyond_the_window_do_not_depend_on_the_path(llm: LLM) -> None:
    long = [2, *((7919 * i + 13) % 200_000 for i in range(620))]
    alone = llm.generate([long], max_tokens=6)[0]
    assert alone.cached_tokens == 0
    again, other, _ = llm.generate([long, long[:300], [2, 5, 7]], max_tokens=6)
    assert again.cached_tokens > 0
    assert again.token_ids == alone.token_ids
    llm.core = EngineCore(llm.runner, SchedulerConfig(32, 100))  # nothing cached, small chunks
    short, long_again = llm.generate([long[:300], long], max_tokens=6)
    assert short.token_ids == other.token_ids
    assert long_again.token_ids == alone.token_ids


@pytest.mark.slow
def test_fp32_keeps_exact_too(gemma: ModelArtifact) -> None:
    llm = LLM(GEMMA, dtype="fp32", kv_blocks=32)
    assert llm.generate("Once upon a time, there was", max_tokens=8)[0].text == STORY


@pytest.mark.slow
def test_logits_are_those_of_transformers(gemma: ModelArtifact) -> None:
    from tests.engine.models.test_families import logits_of

    transformers: Any = pytest.importorskip("transformers")
    c = gemma.config
    config = transformers.Gemma3TextConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        sliding_window=512,
        query_pre_attn_scalar=256,
        max_position_embeddings=c.max_context_tokens,
    )
    weights = load_weights(gemma, "fp32")
    state = {}
    for entry in weight_table(c, "safetensors"):
        weight = weights[entry.name]
        weight = unpair_rows(weight, c.head_dim) if entry.pairs else weight
        state[entry.source] = weight - 1.0 if entry.add_one else weight
    theirs = transformers.Gemma3ForCausalLM(config).eval()
    assert theirs.load_state_dict(state, strict=False).missing_keys == ["lm_head.weight"]  # tied
    theirs.tie_weights()
    del weights, state
    tokens = [2, *((7919 * i + 13) % 200_000 for i in range(400))]
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    del theirs
    error = (logits_of(str(gemma.path), tokens) - expected).abs().max()
    assert error < 1e-5 * expected.abs().max()


def test_the_read_bound_of_a_long_context_has_the_keys_in_windows_alone(gemma):
    bound = ReadBound({}, gemma.config, "bf16")
    short_s, long_s = (bound.step_s(1.0, 1, tokens) for tokens in (512, 5120))
    full = gemma.config.layer_windows.count(None) / gemma.config.num_layers
    assert long_s / short_s == pytest.approx(1 + 9 * full)
