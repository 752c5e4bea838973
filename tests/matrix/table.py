"""Write ``docs/design/exactness.md``: the ways, the cases, and what is refused."""

# ruff: noqa: E501 - rows of tables

from dataclasses import fields
from pathlib import Path

from tests.matrix.cases import REQUEST, WAYS, Case, every_pair, sample

PAGE = Path(__file__).parents[2] / "docs" / "design" / "exactness.md"

MEANING = {
    "path": "the prompt is computed by the decode worker, or by a prefill worker that transfers its KV",
    "prefix": "the prompt is in the prefix cache or not (a request that waits for a prefix is then a hit), or its first blocks are pulled from a worker that still computes a longer prompt",
    "chunk": "most tokens of one step",
    "preempted": "another request takes its blocks in the middle",
    "moved": "the response started on another worker, which is gone, and resumes here",
    "speculation": "source of draft tokens (the draft model here: the same model without adapters)",
    "ranks": "tensor parallelism of the decode worker (prefill has one rank)",
    "grammar": "a regular expression",
    "adapter": "a LoRA adapter on all seven targets",
    "sampling": "greedy; or temperature 1, top_p, a penalty and a seed",
    "kv": "storage of K and V",
}

HEAD = """# Exactness

In `numerics: exact` the same request gives the same tokens on every path. `tests/matrix` crosses
these ways. `python -m tests.matrix.table` generates this page.

"""

MIDDLE = """
Only properties of the request may change the tokens: {request}. Nothing else may: each case
below must give the tokens of the same request taken alone, in one chunk, uncached, on one rank
and without draft tokens.

| test command | cases |
|---|---|
| `make test` | the covering set on a tiny random model; its cases of one rank on SmolLM2-135M |
| `make test-all` | also the cases of two ranks on SmolLM2-135M, and {sampled} of the {product:,} combinations on the tiny model |

Blocks are recounted after every step. `tests/kvtransfer` and `tests/workers` test losses and
deaths, and `tests/e2e` sends the same requests over HTTP.

## How it works

- **Products.** On CPUs with AVX2, each output of a bf16 product is summed in one fixed order,
  whatever the batch, the chunk and the threads. Elsewhere torch computes, and only with row counts
  that are bit-equal on this machine.
- **Attention.** A query visits its keys in steps of 64 from position 0, so splits depend on
  positions only.
- **Sampling.** Noise is a function of (seed, choice, position). An emitted token is never sampled
  again.
- **Proof.** Each worker verifies this at start, and refuses `exact` where it does not hold. Its
  numerics id, a digest of computed bits, is part of the handshake and of every block hash.

## Covering set

Every pair of values of two different ways is in at least one of these {count} cases.

"""

TAIL = """
## What is refused instead

| combination | refused at | reason |
|---|---|---|
| `tensor_parallel` and int4 weights | worker start | the 4-bit kernel is not proven by columns |
| `tensor_parallel` and a width whose proof fails | worker start | bits would differ |
| int4 weights and `dtype: fp32` | worker start | the kernel needs bf16 |
| `numerics: exact` and kernels that fail the self-test | worker start | bits would differ |
| workers with different KV formats, numerics or weights | handshake, before routing | bits would differ |
| one worker with native kernels, one without (no compiler, `BATON_NATIVE=0`) | handshake | bits would differ |
| one worker that sums as AMX, one as VDPBF16PS | handshake | set `numerics: {native: tile}` on both |
| CUDA with a mixture of experts, int8 or int4 weights, a quantised KV cache, a draft model or several ranks | worker start | not implemented |

`numerics: fast` promises none of this; with speculation, tokens may differ there.
"""


def page() -> str:
    """The whole page."""
    product = 1
    for values in WAYS.values():
        product *= len(values)
    cases = every_pair()
    ways = [("way", "values", "meaning")]
    ways += [(k, ", ".join(map(str, v)), MEANING[k]) for k, v in WAYS.items()]
    names = [field.name for field in fields(Case)]
    rows = [tuple(names)] + [tuple(str(getattr(c, n)) for n in names) for c in cases]
    middle = MIDDLE.format(
        request=", ".join(REQUEST), product=product, sampled=len(sample()), count=len(cases)
    )
    return HEAD + _table(ways) + middle + _table(rows) + TAIL


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
