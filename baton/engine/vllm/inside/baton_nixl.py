"""vLLM's NixlConnector with a progress thread that sleeps while there is nothing to do.

NIXL's progress thread waits for events of UCX in ``poll()``, at most ``pthrDelay`` microseconds.
NIXL's Python API sets 0, so that the thread keeps one core busy. vLLM has no option for it.
"""

from typing import Any

from nixl import _bindings
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

__all__ = ["NixlConnector"]

_PROGRESS_US = 1_000  # events wake the thread at once; UCX may miss one


class _AgentConfig(_bindings.nixlAgentConfig):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _PROGRESS_US if name == "pthrDelay" else value)


_bindings.nixlAgentConfig = _AgentConfig
