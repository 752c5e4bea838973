"""A client that openapi-python-client generates from ``/openapi.json``, unchanged."""

import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

from scenarios import KEY, MODEL, QUESTION, SENTENCE, URL, run, scenario

FOLDER = Path(tempfile.mkdtemp()) / "made"


@scenario("generated")
def generated():
    told = subprocess.run(
        [
            *(sys.executable, "-m", "openapi_python_client", "generate"),
            *("--url", f"{URL}/openapi.json", "--output-path", str(FOLDER), "--meta", "none"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    sys.path.insert(0, str(FOLDER.parent))


@scenario("chat")
def chat():
    made = importlib.import_module("made")
    models = importlib.import_module("made.models")
    body = models.ChatBody.from_dict(
        {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    )
    client = made.AuthenticatedClient(base_url=URL, token=KEY)
    [call] = [path.stem for path in (FOLDER / "api").rglob("chat_completions*.py")]
    module = importlib.import_module(f"made.api.default.{call}")
    answer = module.sync(client=client, body=body)
    assert isinstance(answer, models.ChatCompletion), answer
    assert answer.choices[0].message.content == SENTENCE


@scenario("errors")
def errors():
    made = importlib.import_module("made")
    models = importlib.import_module("made.models")
    listed = importlib.import_module("made.api.default.models_v1_models_get")
    answer = listed.sync(client=made.AuthenticatedClient(base_url=URL, token="wrong"))
    assert isinstance(answer, models.Error), answer
    assert answer.error.code == "invalid_api_key"


@scenario("models")
def models_():
    made = importlib.import_module("made")
    listed = importlib.import_module("made.api.default.models_v1_models_get")
    answer = listed.sync(client=made.AuthenticatedClient(base_url=URL, token=KEY))
    assert MODEL in [card.id for card in answer.data]


run()
