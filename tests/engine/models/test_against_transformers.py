"""The same model in transformers, fp32: equal greedy tokens, and how far the logits differ."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.core.plan import PlanRow, StepPlan
from baton.engine.cpu.decoder import Decoder
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cpu.selftest import fast_tiling
from baton.engine.loading.memory import kv_geometry
from baton.engine.loading.open import load_weights
from baton.engine.models.families import weight_table
from baton.engine.models.rope import unpair_rows
from baton.model.artifact import ModelArtifact
from baton.text.tokenizer import load_tokenizer
from baton.types.params import SamplingParams
from baton.types.prompt_outputs import PromptOutputs
from tests.engine.conftest import Driver

MAX_LOGIT_ERROR = 1e-3  # of logits up to about 35; measured: 1.2e-4

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village,",
    "1, 2, 3, 4,",
    "Wer im Glashaus sitzt,",
    "SELECT name FROM users WHERE",
    "Q: What is photosynthesis?\nA:",
    "<html>\n<head>\n<title>",
    "Dear Sir or Madam,\n\n",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "La vie est",
    "import numpy as np\n",
    "x",
    "To be, or not to be, that is",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n",
    "In 1969,",
    "The derivative of x^2 is",
    "🙂 🙃",
    "A list of planets: Mercury, Venus,",
    "She said: “I will not go.” He",
)


def logits_of(model: Decoder, artifact: ModelArtifact, tokens: list[int]) -> torch.Tensor:
    """``[T, V]`` logits of one sequence."""
    geometry = kv_geometry(artifact.config, "fp32", 32)
    group = artifact.config.num_heads // artifact.config.num_kv_heads
    pool = bytearray(geometry.pool_bytes)
    runner = CpuRunner(model, pool, geometry, fast_tiling(group))
    blocks = list(range(-(-len(tokens) // 16)))
    hidden = runner.hidden(
        StepPlan((PlanRow(sequence_id=0, tokens=tokens, start=0, block_ids=blocks),))
    )[0]
    return model.logits(hidden).raw_SV


@pytest.fixture(scope="module")
def theirs(artifact: ModelArtifact) -> Any:
    transformers = pytest.importorskip("transformers")
    c = artifact.config
    config = transformers.LlamaConfig(
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.intermediate_size,
        vocab_size=c.vocab_size,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        max_position_embeddings=c.max_context_tokens,
        tie_word_embeddings=True,
    )
    weights = load_weights(artifact, "fp32")
    state = {}
    for entry in weight_table(c, "safetensors"):
        weight = weights[entry.name]
        if entry.name.endswith((".q", ".k")):
            weight = unpair_rows(weight, c.head_dim)
        state[entry.source] = weight
    model = transformers.LlamaForCausalLM(config).eval()
    missing = model.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]  # tied
    assert missing.unexpected_keys == []
    model.tie_weights()
    return model


def greedy(theirs: Any, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        out = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    result: list[int] = out[0, len(prompt) :].tolist()
    return result


@pytest.mark.costly
def test_logits_agree(
    artifact: ModelArtifact,
    load: Callable[[str, str], Decoder],
    theirs: Any,
    record_property: Callable[[str, object], None],
) -> None:
    tokens = [(7919 * i + 13) % artifact.config.vocab_size for i in range(300)]
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
        error = float((logits_of(load("fp32", "exact"), artifact, tokens) - expected).abs().max())
    record_property("max_logit_error", error)
    print(f"maximal logit error: {error:.2e} of {float(expected.abs().max()):.1f}")
    assert error < MAX_LOGIT_ERROR


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        pytest.param(PROMPTS[:1], 6, id="1x6"),
        *(
            pytest.param(PROMPTS[at : at + 4], 64, id=f"{at}-{at + 3}x64", marks=pytest.mark.slow)
            for at in range(0, len(PROMPTS), 4)
        ),
    ],
)
def test_greedy_tokens_are_equal(
    artifact: ModelArtifact,
    make_driver: Callable[..., Driver],
    theirs: Any,
    prompts: tuple[str, ...],
    count: int,
) -> None:
    tokenizer = load_tokenizer(artifact.tokenizer)
    driver = make_driver("fp32", "exact", 400)
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    for text in prompts:
        ids = tokenizer.encode(text)
        assert driver.answer(ids, params) == greedy(theirs, ids, count), text


def test_prompt_scores_and_vectors_agree(
    artifact: ModelArtifact, make_driver: Callable[..., Driver], theirs: Any
) -> None:
    tokens = load_tokenizer(artifact.tokenizer).encode(PROMPTS[7] * 9 + PROMPTS[13])
    with torch.inference_mode():
        found = theirs(torch.tensor([tokens]), output_hidden_states=True)
    logprobs = torch.log_softmax(found.logits[0, :-1], dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])
    rows = found.hidden_states[-1][0]  # behind the final norm
    driver = make_driver("fp32", "exact", 40)
    wanted_outputs = [PromptOutputs(tokens, 0, "mean"), PromptOutputs(tokens, None, "last")]
    for prompt_outputs in wanted_outputs:
        table = driver.blocks(len(tokens))
        driver.runner.execute(
            StepPlan(
                (
                    PlanRow(
                        sequence_id=0,
                        tokens=tokens,
                        start=0,
                        block_ids=table,
                        samples=(),
                        prompt_outputs=prompt_outputs,
                    ),
                )
            )
        )
    scores = wanted_outputs[0].scores()
    assert scores is not None
    error = np.abs(np.frombuffer(scores.logprobs, "<f4") - own[:, 0].numpy()).max()
    assert error < 1e-4
    ranks = (logprobs > own).sum(dim=-1) + 1
    assert np.frombuffer(scores.ranks, "<u4").tolist() == ranks.tolist()
    for prompt_outputs, vector in zip(wanted_outputs, (rows.mean(dim=0), rows[-1]), strict=True):
        ours = torch.frombuffer(bytearray(prompt_outputs.vector()), dtype=torch.float32)
        difference = ours / ours.norm() - vector / vector.norm()
        assert float(difference.abs().max()) < 1e-4
