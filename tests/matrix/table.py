"""Writes ``docs/exactness.md``: which ways, which cases, and what is refused."""

# ruff: noqa: E501 - rows of tables

from dataclasses import fields
from pathlib import Path

from tests.matrix.cases import REQUEST, WAYS, Case, every_pair, sample

MEANING = {
    "path": "where the prompt is computed: by the decoding worker, or by another that hands over",
    "prefix": "whether the prompt is in the cache already",
    "chunk": "tokens of a step at most",
    "preempted": "whether another request takes its blocks away in the middle",
    "moved": "whether the answer began at another worker, which is gone, and goes on here",
    "speculation": "where draft tokens come from (the draft model here: the same model without adapters)",
    "ranks": "width of the decoding worker's tensor parallelism (prefill has one rank)",
    "grammar": "a regular expression",
    "adapter": "a LoRA adapter on all seven targets",
    "sampling": "greedy; or temperature 1, top_p, a penalty and a seed",
    "kv": "how K and V are stored",
}

HEAD = """# What is exact, and how that is known

In `numerics: exact` the same request gives the same tokens, whichever way it takes. These are the
ways, and the values that are crossed in `tests/matrix`:

"""

MIDDLE = """
What of it belongs to the request may show in the tokens: {request}. Nothing else may: each case
below must give the tokens of the same request taken alone, whole, cold, on one rank and without
draft tokens. On a tiny random model all cases of the covering set run in `make test`, and on
SmolLM2-135M those on one rank; `make test-all` runs those on two ranks too, and on the tiny model {sampled} cases spread over the full product of {product:,} (all of it takes more than an hour).

Blocks are recounted after every step. The hand-off takes the bytes in wire order, with digests;
what streams, losses and deaths may do to it is tested in `tests/kvtransfer` and `tests/workers`,
and the same requests over HTTP in `tests/e2e`.

## The covering set

Every pair of values of two different ways is in at least one of these {count} cases.

"""

TAIL = """
## What is refused by name instead

| pair | where | why |
|---|---|---|
| `tensor_parallel` and a mixture of experts | start of the worker | experts are not split |
| `tensor_parallel` and int4 weights | start of the worker | the 4-bit kernel is not proved by columns |
| `tensor_parallel` and a width at which the proof fails | start of the worker | bits would differ |
| int4 weights and `dtype: fp32` | start of the worker | the kernel takes bf16 |
| `numerics: exact` on a machine whose kernels fail the self-test | start of the worker | |
| workers with different KV formats, numerics or weights | handshake, before routing | |
| a worker with the native kernels and one without (no compiler, `BATON_NATIVE=0`) | handshake | their bits differ |
| a worker whose kernels sum as AMX does and one whose sum as VDPBF16PS ([cpu.md](cpu.md)) | handshake | their bits differ; `numerics: {native: tile}` makes them one |
| CUDA with a mixture of experts, int8 or int4 weights, a quantised KV cache, a draft model, several ranks | start of the worker | not built yet |

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
    target = Path(__file__).parents[2] / "docs" / "exactness.md"
    target.write_text(page(), encoding="utf-8")
