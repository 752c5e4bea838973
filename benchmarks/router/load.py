"""Clients of the benchmark in one process: each sends a request, reads its stream, and repeats.

    python -m benchmarks.router.load --port 8000 --model smollm2 --clients 64 …

With ``--rate``, requests arrive at random moments, however slow the responses are, and wait from
then on. So sides with the same rate have the same load.

It parses no more of HTTP than necessary, so that the router is the bottleneck. It prints ``begin``
after the warm-up, and one line of JSON at the end.
"""

import asyncio
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, cast

import msgspec
import typer
import uvloop

_END = b"\r\n0\r\n\r\n"
_EVENT = b"data: "
VOCABULARY = """
the of and to in is that for it was on are as with his they be at one have this from or had by hot
but some what there we can out other were all your when up use word how said an each she which do
their time if will way about many then them would write like so these her long make thing see him
two has look more day could go come did my sound no most number who over know water than call
first people may down side been now find any new work part take get place made live where after
back little only round man year came show every good me give our under name very through just form
much great think say help low line before turn cause same mean differ move right boy old too does
tell sentence set three want air well also play small government information development
understanding particular experience education community university research international
management important different available following however because another between through against
without business children national economic political interest position question together although
possible problem history company service machine
""".split()  # noqa: SIM905 - a list would take two hundred lines


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the clients.

    Attributes:
        events: Server-sent events; several tokens in one are one event.
        busy: Share of one core that this process took.
    """

    seconds: float
    requests: int
    failed: int
    events: int
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    busy: float


def _turns(*texts: str) -> bytes:
    return msgspec.json.encode([{"role": "user", "content": text} for text in texts])


class LongTexts:
    """Conversations of one kind with long texts, as JSON.

    ``fresh``: texts that no cache has seen. ``new``: eight texts behind a number, so that prefixes
    are new, and pieces of the text are not. ``growing``: only the last turn is new. ``messages``:
    thousands of small ones. ``escapes``: each letter is escaped. ``deep``: nested arrays, which
    are refused. ``giant``: one word.
    """

    KINDS = ("fresh", "new", "growing", "messages", "escapes", "deep", "giant")
    _TEXTS = 8
    _SENTENCE_WORDS = 20

    def __init__(self, kind: str, count: int) -> None:
        draw = random.Random(1)
        self._kind = kind
        self._texts = [" ".join(draw.choices(VOCABULARY, k=count)) for _ in range(self._TEXTS)]
        self._draw = draw
        if kind == "fresh":  # sentences in a random order: one piece of a text has dozens
            words = self._SENTENCE_WORDS
            self._made = [" ".join(draw.choices(VOCABULARY, k=words)) for _ in range(10_000)]
            self._count = count // words
        elif kind == "escapes":
            escape = "".join(f"\\u{ord(letter):04x}" for letter in self._texts[0])
            self._made = [escape]
        elif kind == "new":
            self._made = [msgspec.json.encode(text).decode()[1:-1] for text in self._texts]

    def messages(self, number: int) -> bytes:
        """Return the messages of a request."""
        text = self._texts[number % self._TEXTS]
        match self._kind:
            case "fresh":
                text = " ".join(self._draw.choices(self._made, k=self._count))
                return b'[{"role":"user","content":"%d %s"}]' % (number, text.encode())
            case "growing":
                size = len(text) // 10
                parts = [text[begin : begin + size] for begin in range(0, len(text), size)]
                return _turns(*parts, f"question {number}")
            case "messages":
                parts = [text[begin : begin + 40] for begin in range(0, len(text), 40)]
                return _turns(*(f"{number} {part}" for part in parts[:8000]))
            case "deep":
                return b"[" * 30_000 + b"]" * 30_000
            case "giant":
                return _turns(f"{number}" + "a" * len(text))
        made = self._made[number % len(self._made)]
        return b'[{"role":"user","content":"%d %s"}]' % (number, made.encode())


class Load:
    """Request generator and counters of all clients."""

    def __init__(
        self,
        model: str,
        words: int,
        answer_tokens: int,
        key: str = "",
        body: str = "",
        headers: Sequence[str] = (),
    ) -> None:
        self._long = LongTexts(body, words) if body else None
        self._model = model
        self._words = words
        self._answer_tokens = answer_tokens
        lines = [f"authorization: Bearer {key}"] if key else []
        self._headers = "".join(f"{line}\r\n" for line in (*lines, *headers))
        self._draw = random.Random(1)
        self._asked = 0
        self.failures: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Reset the counters."""
        self.requests = self.events = 0
        self.ttft_s = array("d")
        self.gaps_s = array("d")
        self.failures.clear()

    def request(self) -> bytes:
        """Return the next request: no two prompts have a common prefix."""
        self._asked += 1
        if self._long is not None:
            messages = self._long.messages(self._asked)
        else:
            words = self._draw.choices(VOCABULARY, k=self._words - 1)
            messages = _turns(" ".join((str(self._asked), *words)))
        head = {"model": self._model, "max_tokens": self._answer_tokens}
        head |= {"stream": True, "ignore_eos": True}
        body = msgspec.json.encode(head)[:-1] + b',"messages":' + messages + b"}"
        lines = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n{self._headers}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return lines.encode() + body


class Client(asyncio.Protocol):
    """A connection; ``free`` is called when it can send a request."""

    def __init__(self, load: Load, free: "Callable[[Client], None]") -> None:
        self._load = load
        self._free = free
        self._transport: asyncio.WriteTransport | None = None
        self._asked_s = self._last_s = 0.0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Report the connection as free."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's has no such base
        self._free(self)

    def ask(self, due_s: float) -> None:
        """Send the next request, which has waited since ``due_s``."""
        if self._transport is not None:
            self._tail = b""
            self._last_s = 0.0
            self._asked_s = due_s
            self._transport.write(self._load.request())

    def data_received(self, data: bytes) -> None:
        """Count events of a response."""
        load = self._load
        now_s = time.perf_counter()
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            load.failures.append(data[:400].decode(errors="replace"))
            self.close()
            return
        events = data.count(_EVENT)
        if events:
            load.events += events
            if self._last_s:
                load.gaps_s.append(now_s - self._last_s)
            else:
                load.ttft_s.append(now_s - self._asked_s)
            self._last_s = now_s
        self._tail = (self._tail + data[-len(_END) :])[-len(_END) :]
        if self._tail == _END:
            load.requests += 1
            self._free(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Record a lost connection, which is a failure before the end."""
        if self._transport is not None:
            self._load.failures.append(f"the connection was lost: {exc}")
            self._transport = None

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self._transport is not None:
            transport = self._transport
            self._transport = None
            transport.close()


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, or 0 of too few values."""
    if len(values) < 2:
        return 0.0
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


class Clients:
    """All connections to one port."""

    def __init__(self, load: Load, port: int) -> None:
        self._load = load
        self._port = port
        self._made: list[Client] = []
        self._idle: list[Client] = []

    async def _connect(self, free: Callable[[Client], None]) -> None:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(
            lambda: Client(self._load, free), "127.0.0.1", self._port
        )
        self._made.append(client)

    async def start_closed_loop(self, count: int) -> None:
        """Give each of ``count`` clients one request at a time."""
        for place in range(count):
            await self._connect(lambda client: client.ask(time.perf_counter()))
            await asyncio.sleep(0.3 / count if place else 0)  # spreads the clients over a step

    async def run_open_loop(self, rate_per_s: float) -> None:
        """Send requests at a rate until cancelled, on free connections or new ones."""
        draw = random.Random(2)
        due_s = time.perf_counter()
        while True:
            due_s += draw.expovariate(rate_per_s)
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            if not self._idle:
                await self._connect(self._idle.append)
            self._idle.pop().ask(due_s)

    def close(self) -> None:
        """Close all connections."""
        for client in self._made:
            client.close()


async def run(
    load: Load, port: int, clients: int, rate_per_s: float, warm_s: float, seconds: float
) -> Result:
    """Send requests for ``warm_s``, then measure for ``seconds``."""
    made = Clients(load, port)
    async with asyncio.TaskGroup() as group:
        work = made.run_open_loop(rate_per_s) if rate_per_s else made.start_closed_loop(clients)
        asking = group.create_task(work)
        if not rate_per_s:
            await asking
        result = await _measured(load, warm_s, seconds)
        asking.cancel()
    made.close()
    return result


async def _measured(load: Load, warm_s: float, seconds: float) -> Result:
    await asyncio.sleep(warm_s)
    load.reset()
    print("begin", flush=True)
    began_s = time.perf_counter()
    spent_s = time.process_time()
    await asyncio.sleep(seconds)
    took_s = time.perf_counter() - began_s
    spent_s = time.process_time() - spent_s
    result = Result(
        seconds=took_s,
        requests=load.requests,
        failed=len(load.failures),
        events=load.events,
        ttft_p50_s=percentile(load.ttft_s, 0.5),
        ttft_p99_s=percentile(load.ttft_s, 0.99),
        gap_p50_s=percentile(load.gaps_s, 0.5),
        gap_p99_s=percentile(load.gaps_s, 0.99),
        busy=spent_s / took_s,
    )
    for reason in load.failures[:3]:
        print(f"failed: {reason!r}", flush=True)
    return result


def main(
    port: Annotated[int, typer.Option(help="Port of the router.")],
    model: Annotated[str, typer.Option(help="Name of the model.")],
    clients: Annotated[int, typer.Option(help="Number of connections.")] = 64,
    rate: Annotated[float, typer.Option(help="Requests per second instead; 0: none.")] = 0.0,
    words: Annotated[int, typer.Option(help="Words of each prompt.")] = 20,
    answer_tokens: Annotated[int, typer.Option(help="Output tokens of each response.")] = 64,
    warm_s: Annotated[float, typer.Option("--warm-s", help="Seconds of warm-up.")] = 2.0,
    seconds: Annotated[float, typer.Option(help="Measured seconds.")] = 8.0,
    key: Annotated[str, typer.Option(help="API key.")] = "",
    body: Annotated[str, typer.Option(help="Kind of long texts, see `LongTexts`.")] = "",
    header: Annotated[list[str] | None, typer.Option(help="Further header lines.")] = None,
) -> None:
    """Run the clients, and print their measurements."""
    load = Load(model, words, answer_tokens, key, body, header or ())
    result = uvloop.run(run(load, port, clients, rate, warm_s, seconds))
    print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    typer.run(main)
