"""LangChain, by its packages for OpenAI and, for errors, Anthropic."""

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelAuthenticationError,
    ModelInvalidRequestError,
    ModelNotFoundError,
)
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from scenarios import BASE, KEY, MODEL, QUESTION, SENTENCE, URL, run, scenario

model = ChatOpenAI(base_url=BASE, api_key=KEY, model=MODEL, max_retries=0, timeout=30)


class Place(BaseModel):
    """A place."""

    name: str
    people: int


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


@scenario("chat")
def chat():
    answer = model.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert answer.content == SENTENCE
    assert answer.usage_metadata["output_tokens"] > 0


@scenario("stream")
def stream():
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == SENTENCE


@scenario("second turn")
def second_turn():
    first = model.invoke(QUESTION)
    turns = [HumanMessage(QUESTION, name="Ada"), first, AIMessage("More."), HumanMessage("And?")]
    assert model.invoke(turns).content == SENTENCE


@scenario("tools")
def tools():
    agent = create_agent(model, [weather])
    told = agent.invoke({"messages": [HumanMessage(QUESTION)]})["messages"]
    assert [message.type for message in told] == ["human", "ai", "tool", "ai"]
    assert told[-1].content == SENTENCE


@scenario("errors")
def errors():
    """Agents summarise at `ContextOverflowError`, and repeat or fall back by the other kinds."""
    long = "hello world " * 9000
    of_openai = {"base_url": BASE, "timeout": 30}
    of_anthropic = {"base_url": URL, "max_tokens": 4}
    for maker, more in ((ChatOpenAI, of_openai), (ChatAnthropic, of_anthropic)):
        cases = (
            ({}, long, ContextOverflowError),
            ({"model": "no"}, "hi", ModelNotFoundError),
            ({"api_key": "no"}, "hi", ModelAuthenticationError),
            ({"default_headers": {"x-baton-mode": "disaggregated"}}, "hi", ModelAPIError),
            ({"temperature": -1.0}, "hi", ModelInvalidRequestError),
        )
        for changed, text, kind in cases:
            made = maker(**{"model": MODEL, "api_key": KEY, "max_retries": 0, **more, **changed})
            try:
                made.invoke(text)
            except kind:
                continue
            raise AssertionError(f"{maker.__name__}: no {kind.__name__}")


@scenario("schema")
def schema():
    assert isinstance(model.with_structured_output(Place).invoke(QUESTION), Place)


@scenario("tools and schema")
def tools_and_schema():
    agent = create_agent(model, [weather], response_format=ProviderStrategy(Place))
    told = agent.invoke({"messages": [HumanMessage(QUESTION)]})
    assert isinstance(told["structured_response"], Place)


@scenario("embeddings")
def embeddings():
    vectors = OpenAIEmbeddings(
        base_url=BASE, api_key=KEY, model=MODEL, check_embedding_ctx_length=False
    )
    assert len(vectors.embed_documents(["a cat", "a kitten"])) == 2


@scenario("responses")
def responses():
    answers = ChatOpenAI(base_url=BASE, api_key=KEY, model=MODEL, use_responses_api=True)
    assert answers.invoke(QUESTION).text == SENTENCE


run()
