"""LlamaIndex, by its package for servers like OpenAI's."""

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from scenarios import BASE, KEY, MODEL, QUESTION, SENTENCE, run, scenario

model = OpenAILike(
    api_base=BASE,
    api_key=KEY,
    model=MODEL,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=8192,
    max_retries=0,
)


class Place(BaseModel):
    """A place."""

    name: str
    people: int


def weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


@scenario("chat")
def chat():
    assert model.chat([ChatMessage(role="user", content=QUESTION)]).message.content == SENTENCE


@scenario("stream")
def stream():
    chunks = list(model.stream_chat([ChatMessage(role="user", content=QUESTION)]))
    assert chunks[-1].message.content == SENTENCE


@scenario("second turn")
def second_turn():
    user = ChatMessage(role="user", content=QUESTION)
    first = model.chat([user]).message
    assert model.chat([user, first, user]).message.content == SENTENCE


@scenario("tools")
async def tools():
    agent = FunctionAgent(tools=[weather], llm=model, streaming=True)
    assert SENTENCE in str(await agent.run(QUESTION))


@scenario("schema")
def schema():
    from llama_index.core.prompts import PromptTemplate

    found = model.structured_predict(Place, PromptTemplate(QUESTION))
    assert isinstance(found, Place)


@scenario("embeddings")
def embeddings():
    vectors = OpenAILikeEmbedding(api_base=BASE, api_key=KEY, model_name=MODEL)
    assert len(vectors.get_text_embedding_batch(["a cat", "a kitten"])) == 2


run()
