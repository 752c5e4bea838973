"""Load and speed of a vLLM, from a page of its metrics."""

from baton.engine.remote.http import HttpOrigin
from baton.engine.remote.others import ServerLoad
from baton.types.errors import UnavailableError
from baton.types.events import StepDone
from baton.types.geometry import context_tokens

_ANSWER_S = 5.0
_PROMPTS = ("request_prefill_kv_computed_tokens_count", "request_prefill_kv_computed_tokens_sum")
_MOST = 10_000_000  # of anything that is counted here
_LEAST_PROMPTS = 4
_LEAST_MEAN_TOKENS = 128


async def read_metrics(origin: HttpOrigin) -> str:
    """Return the page of a vLLM.

    Raises:
        UnavailableError: It does not respond.
    """
    return (await origin.fetch("GET", "/metrics", _ANSWER_S)).decode(errors="replace")


def past_step(page: str) -> StepDone | None:
    """Return a step at the mean speed of all computed prompts, by a page of vLLM's metrics.

    None for few or short prompts, whose time is mostly overhead, and for odd values.
    """
    try:
        count, computed = (_sum(page, name) for name in _PROMPTS)
        mean = int(computed / max(count, 1.0))
        mean_ns = round(_sum(page, "request_prefill_time_seconds_sum") / max(count, 1.0) * 1e9)
    except (ValueError, OverflowError):
        return None
    if count < _LEAST_PROMPTS or mean < _LEAST_MEAN_TOKENS or mean_ns <= 0:
        return None
    return StepDone(prompt_tokens=mean, prompt_context=context_tokens(0, mean), duration_ns=mean_ns)


def server_load(page: str) -> ServerLoad:
    """Return the load that a page of vLLM's metrics reports, of all ranks.

    Raises:
        UnavailableError: It has odd values.
    """
    try:
        count, computed = (_sum(page, name) for name in _PROMPTS)
        computed_tokens = _whole(computed / max(count, 1.0))
        prompts = _sum(page, "request_prompt_tokens_sum")
        prompt_tokens = _whole(prompts / max(_sum(page, "request_prompt_tokens_count"), 1.0))
        return ServerLoad(
            running=_whole(_sum(page, "num_requests_running")),
            waiting=_whole(_sum(page, "num_requests_waiting")),
            prompt_tokens=max(prompt_tokens, computed_tokens),
            computed_tokens=computed_tokens,
            work=computed + _sum(page, "generation_tokens_total"),
        )
    except ValueError as error:
        raise UnavailableError(f"vLLM's metrics have odd values: {error}") from None


def _sum(page: str, name: str) -> float:
    """Return the sum of a metric over its series. Pages are long: only their lines are looked at.

    Raises:
        ValueError: A value is no number.
    """
    total = 0.0
    mark = f"vllm:{name}{{"
    end = -1
    while (at := page.find(mark, end + 1)) >= 0:
        end = page.find("\n", at)
        if end < 0:
            end = len(page)
        if at == 0 or page[at - 1] == "\n":
            total += float(page[at:end].rpartition(" ")[2])
    return total


def _whole(value: float) -> int:
    return int(min(max(value, 0.0), _MOST))


async def read_load(origin: HttpOrigin, one_step: bool = True) -> ServerLoad:
    """Return the load that a vLLM reports; ``one_step``: its only rank has steps.

    Raises:
        UnavailableError: It does not respond, or has odd values.
    """
    return server_load(await read_metrics(origin))._replace(is_whole=one_step)
