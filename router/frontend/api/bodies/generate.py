"""Request body of vLLM's call for token ids."""

from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from router.frontend.api.bodies.common import FIRST_FAULT, INT32, ModelBody, TokenId
from router.frontend.api.bodies.completion import CompletionBody
from router.frontend.api.bodies.fields import Refused
from router.frontend.api.bodies.generation import GenerationBody, SamplingFields, StreamOptions
from router.frontend.api.bodies.opening import opening_text

_VLLM = "an option of one vLLM engine, which does not change the answer"
_REFUSED = Refused((None, 0, False, [], {}), "leave it out")
_TEXT_ONLY = "this model takes text only"


class GenerateSampling(SamplingFields):
    """``sampling_params`` of ``POST /inference/v1/generate``."""

    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """0 to 20 alternatives, the sampled token included; the token that ends an answer has -9999"""

    accepted: ClassVar[dict[str, str]] = {
        "detokenize": "text is built only to find stop strings",
        **dict.fromkeys(("output_kind", "skip_clone", "skip_reading_prefix_cache"), _VLLM),
    }
    refused: ClassVar[dict[str, Refused]] = {
        "logprob_token_ids": Refused((None, []), "use logprobs"),
        "thinking_token_budget": Refused((None,), "use /v1/chat/completions"),
        **dict.fromkeys(("prompt_logprob_token_ids", "prompt_logprob_start"), _REFUSED),
        **dict.fromkeys(("extra_args", "repetition_detection", "watermarking"), _REFUSED),
    }


class TokensBody(CompletionBody):
    """Completion of token ids whose answer consists of token ids, with the one that ends it."""

    default_tokens: ClassVar[int] = INT32
    id_prefix: ClassVar[str] = "generate-tokens"
    shows_stop_token: ClassVar[bool] = True


class GenerateBody(ModelBody):
    """Request body of ``POST /inference/v1/generate``."""

    token_ids: Annotated[list[TokenId], Field(min_length=1), FIRST_FAULT]
    """prompt"""
    sampling_params: GenerateSampling
    """see below"""
    request_id: Annotated[str, StringConstraints(max_length=512)] | None = None
    """same as the header X-Request-Id, which precedes it"""
    stream: bool | None = None
    """server-sent events"""
    stream_options: StreamOptions | None = None
    """requires `stream: true`"""
    return_token_ids: bool | None = None
    """true: add prompt_token_ids to the response"""
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """only requests with the same salt share cached prefixes"""
    priority: Annotated[int, Field(ge=-INT32, lt=INT32)] | None = None
    """requests with lower values run first"""

    accepted: ClassVar[dict[str, str]] = {
        "token_offsets": "places in a text, which is not sent",
        "reasoning_parser_kwargs": "token ids are not parsed",
    }
    refused: ClassVar[dict[str, Refused]] = {
        "features": Refused((None,), _TEXT_ONLY),
        "content_parts": Refused((None, []), _TEXT_ONLY),
        "kv_transfer_params": GenerationBody.refused["kv_transfer_params"],
        "ec_transfer_params": Refused((None, {}), _TEXT_ONLY),
        "output_mode": Refused((None, "tokens"), "use /v1/completions with return_token_ids"),
        "reasoning_ended": Refused((None, True), "a grammar applies from the first token"),
    }

    def opening(self) -> str:
        """Return the beginning of the prompt."""
        return opening_text(self.token_ids)

    def completion(self) -> TokensBody:
        """Return the completion that is the same request; all its fields are checked already."""
        own = ("model", "stream", "stream_options", "cache_salt", "priority")
        fields = {name: getattr(self, name) for name in own} | dict(self.sampling_params)
        return TokensBody.model_construct(prompt=self.token_ids, return_token_ids=True, **fields)
