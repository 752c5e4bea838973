"""vLLM's NixlConnector, whose threads sleep while there is nothing to do.

NIXL's progress thread waits for events of UCX in ``poll()``, at most ``pthrDelay`` microseconds.
NIXL's Python API sets 0, so that the thread keeps one core busy. vLLM has no option for it.

While a transfer is pending vLLM runs one engine step after another, also if they compute nothing.
They would take the cores that the transfer needs.
"""

import time
from typing import Any

from nixl import _bindings
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl

_PROGRESS_US = 1_000  # events wake the thread at once; UCX may miss one
_IDLE_S = 0.001  # of a step that computes nothing


class _AgentConfig(_bindings.nixlAgentConfig):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _PROGRESS_US if name == "pthrDelay" else value)


_bindings.nixlAgentConfig = _AgentConfig


class NixlConnector(nixl.NixlConnector):
    """vLLM's connector, with a pause in steps that compute nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of the step."""
        super().start_load_kv(forward_context, **kwargs)
        if forward_context.attn_metadata is None:
            time.sleep(_IDLE_S)
