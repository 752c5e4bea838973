"""The recipe in ``deploy/nginx.conf``, tried: HTTP/2, and streams that nobody holds back."""

import asyncio
import itertools
import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from tests.router.conftest import MODEL, free_port, until
from tests.router.emulated_worker import Script

RECIPE = Path(__file__).parents[3] / "deploy" / "nginx.conf"
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
TOKENS, STEP_S = 8, 0.15

pytestmark = [
    pytest.mark.skipif(NGINX is None, reason="there is no nginx here (apt-get install nginx)"),
    pytest.mark.skipif(
        shutil.which("curl") is None or shutil.which("openssl") is None,
        reason="curl asks by HTTP/2, openssl makes a certificate",
    ),
]


@pytest.fixture
async def proxy(make_fleet, tmp_path):
    """The recipe, with other ports and paths, in front of a fleet that writes slowly."""
    fleet = await make_fleet({"decode-0": Script(step_s=STEP_S)})
    port, key, cert = free_port(), tmp_path / "key.pem", tmp_path / "cert.pem"
    made = await asyncio.create_subprocess_exec(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
        *("-subj", "/CN=localhost", "-keyout", str(key), "-out", str(cert)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert await made.wait() == 0
    text = RECIPE.read_text()
    for before, after in {
        "server 127.0.0.1:8000;": f"server {fleet.url.removeprefix('http://')};",
        "listen 8443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/baton/cert.pem": str(cert),
        "/etc/baton/key.pem": str(key),
        "http {\n": "http {\n  access_log off;\n"
        + "".join(
            f"  {name}_temp_path {tmp_path / name};\n"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        ),
    }.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    conf = tmp_path / "nginx.conf"
    conf.write_text(f"daemon off;\npid {tmp_path / 'pid'};\nerror_log {tmp_path / 'log'};\n{text}")
    process = await asyncio.create_subprocess_exec(NGINX, "-p", str(tmp_path), "-c", str(conf))
    try:
        await until(lambda: listens(port) or process.returncode is not None)
        assert process.returncode is None, (tmp_path / "log").read_text()
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def curl(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *("curl", "-sk", "--http2", "--no-buffer", "--max-time", "20", *arguments),
        stdout=asyncio.subprocess.PIPE,
    )


async def test_an_answer_comes_by_http2(proxy):
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2})
    process = await curl(
        *("-d", body, "-H", "content-type: application/json", "-w", "\n%{http_version}"),
        f"{proxy}/v1/completions",
    )
    out, _ = await process.communicate()
    answer, version = out.decode().rsplit("\n", 1)
    assert version == "2"
    assert json.loads(answer)["usage"]["completion_tokens"] == 2


async def test_every_token_of_a_stream_passes_at_once(proxy):
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": TOKENS,
        "stream": True,
    }
    process = await curl("-d", json.dumps(chat), f"{proxy}/v1/chat/completions")
    loop = asyncio.get_running_loop()
    at_s = [loop.time() async for line in process.stdout if line.startswith(b"data: {")]
    assert await process.wait() == 0
    # Held back, all would come at the end.
    assert at_s[-1] - at_s[0] > (TOKENS - 2) * STEP_S * 0.8
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(at_s)]
    assert sum(gap_s > STEP_S / 2 for gap_s in gaps_s) >= TOKENS - 3


async def test_a_client_that_leaves_is_noticed_behind_the_proxy(proxy):
    """nginx must pass the hang-up on: the worker stops."""
    chat = {"model": MODEL, "prompt": "hi", "max_tokens": 500, "stream": True}
    process = await curl("-d", json.dumps(chat), f"{proxy}/v1/completions")
    await process.stdout.readline()
    process.kill()
    await process.wait()
    metrics = await curl(f"{proxy}/metrics")
    out, _ = await metrics.communicate()
    assert b"baton_cancellations_total" in out
    for _ in range(50):
        out, _ = await (await curl(f"{proxy}/metrics")).communicate()
        if b'baton_cancellations_total{phase="decode"} 1.0' in out:
            return
        await asyncio.sleep(0.1)
    pytest.fail("the router still writes for a client that has gone")
