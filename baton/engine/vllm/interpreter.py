"""Check of an interpreter's vLLM, without importing it, and of what its workers need."""

import importlib.util
import subprocess

from baton.engine.vllm.versions import untested

_TIMEOUT_S = 30.0
_PROGRAM = """
import importlib.metadata, importlib.util, pathlib, sys
spec = importlib.util.find_spec("vllm")
if spec is None:
    sys.exit("vLLM is not installed there")
folder = pathlib.Path(spec.submodule_search_locations[0])
version = importlib.metadata.version("vllm")
if not (folder / "entrypoints/scale_out/token_in_token_out").is_dir():
    sys.exit(f"its vLLM {version} has no /inference/v1/generate; 0.32 has")
for package in sys.argv[1:]:
    if importlib.util.find_spec(package) is None:
        sys.exit(f"hand_off: {package} needs the package {package} there: pip install {package}")
print(version)
"""


def vllm_version(python: str, hand_off: str | None = None) -> str:
    """Return the version of vLLM in an interpreter's environment.

    Raises:
        RuntimeError: The interpreter cannot run, has no vLLM with the endpoints that are used, or
            lacks the package of the ``hand_off``; or Baton's own environment lacks pyzmq.
    """
    if importlib.util.find_spec("zmq") is None:
        raise RuntimeError("vLLM workers need pyzmq: pip install 'baton-serve[vllm]'")
    packages = ["nixl"] if hand_off == "nixl" else []
    try:
        done = subprocess.run(
            [python, "-c", _PROGRAM, *packages], capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"pools.vllm.python: {python} cannot run: {error}") from None
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"pools.vllm.python: {python}: {reason}")
    version = done.stdout.strip()
    warning = untested(version)
    return f"{version} at {python}" + (f"; {warning}" if warning else "")
