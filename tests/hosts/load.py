"""Load with golden answers, run on a host of the rig: ``python -m tests.hosts.load URL SECONDS``.

First each prompt is asked alone; then several clients ask in turn and compare. Ends when standard
input is closed, or after the time. The last line is a JSON object: ok, wrong, hung, failed by code.
"""

import asyncio
import json
import sys
import time
from collections import Counter

import httpx

CLIENTS = 3
PROMPTS = [f"{number}. Tell me of the number {number}, at some length. " * 6 for number in range(6)]
TOKENS = 40
HUNG_S = 45.0


async def ask(client: httpx.AsyncClient, prompt: str) -> str:
    """The text of one streamed answer; raises what went wrong, by code."""
    body = {"model": "default", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    text, ended = "", False
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raw = json.loads(await answer.aread())
            raise RuntimeError(f"{answer.status_code} {raw['error']['code']}")
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["code"])
                text += "".join(choice["text"] for choice in event["choices"])
    if not ended:
        raise RuntimeError("the stream broke off")
    return text


async def main(url: str, seconds: float) -> dict[str, object]:
    result: Counter[str] = Counter()
    limit = httpx.Timeout(HUNG_S, connect=5.0)
    headers = {"authorization": "Bearer key-of-the-load"}
    async with httpx.AsyncClient(base_url=url, timeout=limit, headers=headers) as client:
        golden = {prompt: await ask(client, prompt) for prompt in PROMPTS}
        print("golden", flush=True)
        until = time.monotonic() + seconds

        async def keep_asking(turn: int) -> None:
            while time.monotonic() < until:
                prompt = PROMPTS[turn % len(PROMPTS)]
                turn += 1
                try:
                    async with asyncio.timeout(HUNG_S):
                        text = await ask(client, prompt)
                except TimeoutError:
                    result["hung"] += 1
                except RuntimeError as error:
                    result[f"failed: {error}"] += 1
                    await asyncio.sleep(0.2)
                except httpx.HTTPError as error:
                    late = isinstance(error, httpx.ReadTimeout)
                    result["hung" if late else f"failed: {type(error).__name__}"] += 1
                    await asyncio.sleep(0.2)
                else:
                    result["ok" if text == golden[prompt] else "wrong"] += 1

        await asyncio.gather(*(keep_asking(turn) for turn in range(CLIENTS)))
    return dict(result)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], float(sys.argv[2])))), flush=True)
