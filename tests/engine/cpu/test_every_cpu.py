"""Bits of the native kernels, the same with AVX-512 and with AVX2 alone.

The digests were computed by AVX2 on a Zen 3. Inputs are integers over powers of two, as torch's
random floats differ between CPUs.
"""

import hashlib
from collections.abc import Callable

import pytest
import torch

from baton.engine.cpu.attention import QuerySpan
from baton.engine.cpu.native import attention, products
from baton.engine.cpu.native.library import load
from baton.engine.cpu.native.products import NativeWeight
from baton.engine.cpu.native.rows import native_rows
from baton.engine.cpu.quantised import Int4Linear, Int8Linear
from tests.engine.cpu.native_ways import WAYS
from tests.engine.cpu.test_native_attention import make, tables

pytestmark = pytest.mark.skipif(
    load() is None, reason="no native kernels here: they need a compiler and AVX2"
)


def drawn(*shape: int) -> torch.Tensor:
    """Draw fp32 of 8 digits and many sizes, so that sums are rounded."""
    return torch.ldexp(torch.randint(-128, 129, shape).float(), torch.randint(-14, -3, shape))


def digest(*found: torch.Tensor) -> str:
    whole = b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in found)
    return hashlib.blake2b(whole, digest_size=4).hexdigest()


def product() -> torch.Tensor:
    """Halves of a sum cancel: what is left is what was rounded."""
    weight, x = drawn(70, 160).bfloat16(), drawn(29, 160).bfloat16()
    return NativeWeight(weight.repeat(1, 2))(torch.cat((x, -x), dim=1))


def attended() -> torch.Tensor:
    native, pool = make(6, 2, 64, None)
    pool.copy_(drawn(*pool.shape))
    q = (drawn(300, 6, 64) / 8).bfloat16()
    spans = [QuerySpan(0, 0, 298, tables()[0]), QuerySpan(298, 400, 2, tables()[1])]
    return native.run(0, native.plan([], spans), q)


def of_int8() -> torch.Tensor:
    return Int8Linear(drawn(70, 320), digits=2)(drawn(29, 320).bfloat16())


def of_int4() -> torch.Tensor:
    return Int4Linear(drawn(80, 320))(drawn(29, 320).bfloat16())


def rows() -> torch.Tensor:
    ops = native_rows(torch.bfloat16, 1e-5, (32, 96))
    assert ops is not None
    x, part = drawn(9, 96), drawn(9, 96).bfloat16()
    normed = ops.add_norm(x, part, drawn(96), drawn(96))
    qkv = drawn(9, 160).bfloat16()
    turn = torch.complex(drawn(9, 1, 16), drawn(9, 1, 16))
    ops.heads(qkv, 4, 32, None, drawn(4, 32), turn)
    gates = [ops.gate(drawn(9, 190).bfloat16(), name) for name in ("silu", "gelu_tanh")]
    return torch.cat([normed.flatten(), qkv.flatten(), *(gate.flatten() for gate in gates)])


@pytest.mark.parametrize(
    ("way", "compute", "expected"),
    [
        ("vdp", product, "6888894c"),
        ("vdp", attended, "b3cc3f20"),
        ("emulate", product, "edc598b2"),
        ("emulate", attended, "48a10b59"),
        ("vdp", of_int8, "772f742b"),
        ("vdp", of_int4, "13ce7496"),
        ("vdp", rows, "5d559ed2"),
    ],
)
def test_bits_are_those_of_every_cpu(
    way: str, compute: Callable[[], torch.Tensor], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attention, products):
        monkeypatch.setattr(module, "sums", lambda: WAYS[way])
    torch.manual_seed(5)
    assert digest(compute()) == expected
