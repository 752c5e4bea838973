"""LangChain, by its package for OpenAI."""

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from scenarios import BASE, KEY, MODEL, QUESTION, SENTENCE, run, scenario

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
