"""LiteLLM's SDK, as `openai/` and as `hosted_vllm/`."""

import json

import litellm
from scenarios import BASE, KEY, MODEL, QUESTION, SENTENCE, run, scenario

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
    try:
        litellm.completion(
            model="openai/no", messages=[USER], api_base=BASE, api_key=KEY, num_retries=0
        )
    except litellm.NotFoundError:
        return
    raise AssertionError("no NotFoundError")


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
