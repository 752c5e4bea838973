"""Whether this machine's CPU has the integer products that int8 weights need."""

import functools

import pytest

from baton.engine.cpu.quantised import IntegerKernelError, check_integer_kernel


@functools.cache
def overflows() -> bool:
    """CPUs without VNNI add pairs of 8-bit products in 16 bits: int8 weights are refused there."""
    try:
        check_integer_kernel()
    except IntegerKernelError:
        return True
    return False


needs_integer_products = pytest.mark.skipif(
    overflows(), reason="no VNNI: this CPU's integer products overflow, int8 weights are refused"
)
