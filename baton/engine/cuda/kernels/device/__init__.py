"""Code that runs on the GPU, or, with ``TRITON_INTERPRET=1``, in Triton's interpreter.

The variable must be set before triton is imported (``transformers`` imports it): set it for the
whole process.
"""

from triton import knobs

from baton.engine.cuda.kernels import interpreter

if knobs.runtime.interpret:
    interpreter.repair()
