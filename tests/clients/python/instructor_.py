"""Instructor, in its modes for OpenAI's API."""

import instructor
import openai
from pydantic import BaseModel
from scenarios import BASE, KEY, MODEL, QUESTION, run, scenario

USER = {"role": "user", "content": QUESTION}


class Place(BaseModel):
    """A place."""

    name: str
    people: int


def client(mode: instructor.Mode) -> instructor.Instructor:
    plain = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=30)
    return instructor.from_openai(plain, mode=mode)


@scenario("tools")
def tools():
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        found = client(mode).chat.completions.create(
            model=MODEL, messages=[USER], response_model=Place, max_retries=0
        )
        assert isinstance(found, Place)


@scenario("schema")
def schema():
    found = client(instructor.Mode.JSON_SCHEMA).chat.completions.create(
        model=MODEL, messages=[USER], response_model=Place, max_retries=0, max_tokens=200
    )
    assert isinstance(found, Place)


@scenario("stream")
def stream():
    parts = list(
        client(instructor.Mode.TOOLS).chat.completions.create_partial(
            model=MODEL, messages=[USER], response_model=Place
        )
    )
    assert parts[-1].people is not None


run()
