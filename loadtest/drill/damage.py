"""`python -m loadtest.drill.damage MODEL.gguf OUT.gguf`: a copy of a model with damaged weights.

The drill `bad-canary` needs a fleet that serves such a copy beside the model. Size, names and
tokenizer are those of the model. The weights of one matrix are inverted within their scales.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader

MATRIX = "blk.0.ffn_down.weight"
_BLOCK_BYTES = 20
_SCALE_BYTES = 4  # scale and minimum of a block, which stay, so that no weight becomes NaN


def damage(source: Path, target: Path) -> None:
    """Write a damaged copy of a GGUF file.

    Raises:
        ValueError: The matrix is missing, or not in Q4_1.
    """
    shutil.copyfile(source, target)
    reader = GGUFReader(target, mode="r+")
    matrices = [tensor for tensor in reader.tensors if tensor.name == MATRIX]
    if not matrices or matrices[0].tensor_type != GGMLQuantizationType.Q4_1:
        target.unlink()
        raise ValueError(f"{source}: has no {MATRIX} in Q4_1")
    blocks = matrices[0].data.view(np.uint8).reshape(-1, _BLOCK_BYTES)
    blocks[:, _SCALE_BYTES:] ^= 0xFF
    reader.data.flush()


def main() -> int:
    """Write the copy that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="GGUF file with Q4_1 weights")
    parser.add_argument("out", type=Path, help="file of the copy")
    options = parser.parse_args()
    damage(options.model, options.out)
    print(f"wrote {options.out}: {MATRIX} is damaged")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
