"""pydantic-ai, by its model for OpenAI's chats."""

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from scenarios import BASE, KEY, MODEL, QUESTION, SENTENCE, run, scenario

provider = OpenAIProvider(base_url=BASE, api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider)


class Place(BaseModel):
    """A place."""

    name: str
    people: int


def weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


@scenario("chat")
def chat():
    assert Agent(model).run_sync(QUESTION).output == SENTENCE


@scenario("stream")
async def stream():
    async with Agent(model).run_stream(QUESTION) as answer:
        assert await answer.get_output() == SENTENCE


@scenario("second turn")
def second_turn():
    agent = Agent(model, system_prompt="Be brief.")
    first = agent.run_sync(QUESTION)
    again = agent.run_sync("And?", message_history=first.all_messages())
    assert again.output == SENTENCE


@scenario("tools")
def tools():
    assert Agent(model, tools=[weather]).run_sync(QUESTION).output == SENTENCE


@scenario("schema")
def schema():
    for wanted in (Place, NativeOutput(Place)):
        assert isinstance(Agent(model, output_type=wanted).run_sync(QUESTION).output, Place)


@scenario("tools and schema")
def tools_and_schema():
    agent = Agent(model, tools=[weather], output_type=NativeOutput(Place))
    assert isinstance(agent.run_sync(QUESTION).output, Place)


@scenario("responses")
def responses():
    from pydantic_ai.models.openai import OpenAIResponsesModel

    assert Agent(OpenAIResponsesModel(MODEL, provider=provider)).run_sync(QUESTION).output


run()
