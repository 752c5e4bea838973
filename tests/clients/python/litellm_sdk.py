"""LiteLLM's SDK, as `openai/` and as `hosted_vllm/`."""

import json

import litellm
from scenarios import BASE, KEY, MODEL, QUESTION, SENTENCE, URL, run, scenario

USER = {"role": "user", "content": QUESTION}
PROVIDERS = ("openai", "hosted_vllm")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def ask(provider: str, messages: list, **more):
    return litellm.completion(
        model=f"{provider}/{MODEL}",
        messages=messages,
        api_base=BASE,
        api_key=KEY,
        num_retries=0,
        **more,
    )


@scenario("chat")
def chat():
    for provider in PROVIDERS:
        assert ask(provider, [USER]).choices[0].message.content == SENTENCE


@scenario("stream")
def stream():
    for provider in PROVIDERS:
        chunks = list(ask(provider, [USER], stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == SENTENCE


@scenario("second turn")
def second_turn():
    for provider in PROVIDERS:
        first = ask(provider, [USER]).choices[0].message
        assert ask(provider, [USER, first, USER]).choices[0].message.content == SENTENCE
        plain = ask(provider, [USER, first.model_dump(), USER])
        assert plain.choices[0].message.content == SENTENCE


@scenario("tools")
def tools():
    for provider in PROVIDERS:
        first = ask(provider, [USER], tools=[WEATHER]).choices[0].message
        call = first.tool_calls[0]
        assert "city" in json.loads(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        told = ask(provider, [USER, first.model_dump(), result], tools=[WEATHER])
        assert told.choices[0].message.content == SENTENCE


@scenario("errors")
def errors():
    """LiteLLM's router repeats and falls back by these kinds."""
    long = {"role": "user", "content": "hello world " * 9000}
    cases = (
        ({"messages": [long]}, litellm.ContextWindowExceededError),
        ({"model": "no"}, litellm.NotFoundError),
        ({"api_key": "no"}, litellm.AuthenticationError),
        ({"temperature": -1}, litellm.BadRequestError),
        ({"extra_headers": {"x-baton-mode": "disaggregated"}}, litellm.ServiceUnavailableError),
        ({"extra_headers": {"x-baton-timeout-ms": "1"}}, litellm.Timeout),
    )
    overloaded = {litellm.ServiceUnavailableError: litellm.InternalServerError}  # of Anthropic: 529
    for provider, url in (*((name, BASE) for name in PROVIDERS), ("anthropic", URL)):
        for more, kind in cases:
            call = {"model": MODEL, "messages": [USER], "max_tokens": 4, "api_key": KEY, **more}
            call["model"] = f"{provider}/{call['model']}"
            expected = overloaded.get(kind, kind) if provider == "anthropic" else kind
            try:
                litellm.completion(api_base=url, num_retries=0, max_retries=0, **call)
            except Exception as error:
                assert type(error) is expected, f"{provider}, {more}: {error!r}"[-300:]
            else:
                raise AssertionError(f"{provider}: no {expected.__name__}")


@scenario("embeddings")
def embeddings():
    answer = litellm.embedding(
        model=f"openai/{MODEL}",
        input=["a cat"],
        api_base=BASE,
        api_key=KEY,
        encoding_format="float",
    )
    assert len(answer.data) == 1


@scenario("rerank")
def rerank():
    answer = litellm.rerank(
        model=f"hosted_vllm/{MODEL}",
        query="a cat",
        documents=["a lorry", "a cat"],
        api_base=BASE,
        api_key=KEY,
    )
    assert len(answer.results) == 2


run()
