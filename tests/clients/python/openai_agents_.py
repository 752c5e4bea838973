"""OpenAI's agents, by chats and by responses."""

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from scenarios import BASE, KEY, MODEL, QUESTION, SENTENCE, run, scenario

set_tracing_disabled(True)


def chats() -> OpenAIChatCompletionsModel:
    client = AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=30)
    return OpenAIChatCompletionsModel(MODEL, client)


class Place(BaseModel):
    """A place."""

    name: str
    people: int


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


@scenario("chat")
async def chat():
    agent = Agent(name="a", instructions="Be brief.", model=chats())
    assert (await Runner.run(agent, QUESTION)).final_output == SENTENCE


@scenario("stream")
async def stream():
    found = Runner.run_streamed(Agent(name="a", model=chats()), QUESTION)
    assert [event async for event in found.stream_events()]
    assert found.final_output == SENTENCE


@scenario("tools")
async def tools():
    agent = Agent(name="a", model=chats(), tools=[weather])
    assert (await Runner.run(agent, QUESTION)).final_output == SENTENCE


@scenario("schema")
async def schema():
    agent = Agent(name="a", model=chats(), output_type=Place)
    assert isinstance((await Runner.run(agent, QUESTION)).final_output, Place)


@scenario("tools and schema")
async def tools_and_schema():
    agent = Agent(name="a", model=chats(), tools=[weather], output_type=Place)
    assert isinstance((await Runner.run(agent, QUESTION)).final_output, Place)


@scenario("hand-off")
async def hand_off():
    second = Agent(name="second", model=chats())
    first = Agent(name="first", model=chats(), handoffs=[second])
    found = await Runner.run(first, QUESTION)
    assert (found.last_agent.name, found.final_output) == ("second", SENTENCE)


@scenario("responses")
async def responses():
    client = AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=30)
    agent = Agent(name="a", model=OpenAIResponsesModel(MODEL, client), tools=[weather])
    assert (await Runner.run(agent, QUESTION)).final_output == SENTENCE


run()
