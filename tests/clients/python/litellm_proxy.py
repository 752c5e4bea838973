"""LiteLLM's proxy in front of the router, asked by OpenAI's client."""

import atexit
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import openai
from scenarios import BASE, KEY, MODEL, QUESTION, SENTENCE, run, scenario

USER = {"role": "user", "content": QUESTION}
PROXY_KEY = f"sk-{secrets.token_hex(32)}"


def proxy() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = Path(tempfile.mkdtemp()) / "config.yaml"
    config.write_text(
        "model_list:\n"
        f"  - model_name: {MODEL}\n"
        f"    litellm_params: {{model: hosted_vllm/{MODEL}, api_base: {BASE}, api_key: {KEY}}}\n"
    )
    process = subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("litellm")), "--config", str(config)),
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        stdout=sys.stderr,
        env={**os.environ, "LITELLM_MASTER_KEY": PROXY_KEY},
    )
    atexit.register(process.wait)
    atexit.register(process.terminate)
    for _ in range(600):
        if process.poll() is not None:
            break
        try:
            httpx.get(f"http://127.0.0.1:{port}/health/liveliness", timeout=2)
            return f"http://127.0.0.1:{port}"
        except httpx.HTTPError:
            time.sleep(0.2)
    raise TimeoutError("the proxy does not answer")


client = openai.OpenAI(base_url=proxy(), api_key=PROXY_KEY, max_retries=0, timeout=60)


@scenario("chat")
def chat():
    answer = client.chat.completions.create(model=MODEL, messages=[USER])
    assert answer.choices[0].message.content == SENTENCE


@scenario("stream")
def stream():
    chunks = client.chat.completions.create(model=MODEL, messages=[USER], stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == SENTENCE


@scenario("second turn")
def second_turn():
    first = client.chat.completions.create(model=MODEL, messages=[USER]).choices[0].message
    for message in (first, first.model_dump()):
        again = client.chat.completions.create(model=MODEL, messages=[USER, message, USER])
        assert again.choices[0].message.content == SENTENCE


run()
