"""Files and batches by OpenAI's own client: answers, faults of lines, cancels, restarts, limits."""

import asyncio
import json
import time
from pathlib import Path

import openai
import pytest

from baton.config.clients import ApiKeyConfig, BatchConfig, ClientLimitsConfig
from router.frontend.batch.lines import LOWEST_PRIORITY, LineRequest, read_line
from router.frontend.batch.record import BatchRecord
from router.frontend.batch.store import BatchStore
from tests.router.conftest import MODEL, until
from tests.router.emulated_worker import Script

CHAT = "/v1/chat/completions"
KEYS = {
    "key-of-one": ApiKeyConfig(tenant="one"),
    "key-of-two": ApiKeyConfig(tenant="two"),
    "key-of-batch": ApiKeyConfig(tenant="three", min_priority=10),
}


def line(name: str, url: str = CHAT, **body) -> bytes:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "seed": 1}
    whole = {"model": MODEL, **(chat if url == CHAT else {}), **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": whole}).encode()


def lines(count: int, **body) -> bytes:
    return b"\n".join(line(f"line-{number}", **body) for number in range(count)) + b"\n"


@pytest.fixture
def start(make_fleet, tmp_path):
    """A fleet whose files lie in the test's folder: ``await start(Script(), at_once=2)``."""

    async def fleet_of(script: Script | None = None, keys=None, **limits):
        clients = ClientLimitsConfig(batch=BatchConfig(**limits))
        return await make_fleet(
            {"decode-0": script or Script(step_s=0.001)},
            state_dir=str(tmp_path),
            clients=clients,
            api_keys=keys,
        )

    return fleet_of


def client_of(fleet, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key=key, max_retries=0)


async def begin(client, content: bytes, endpoint: str = CHAT, **more):
    sent = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=sent.id, endpoint=endpoint, completion_window="24h", **more
    )


async def ended(client, batch, timeout_s: float = 20.0):
    limit_s = time.monotonic() + timeout_s
    while (batch := await client.batches.retrieve(batch.id)).status not in (
        *("completed", "failed", "expired", "cancelled"),
    ):
        assert time.monotonic() < limit_s, batch
        await asyncio.sleep(0.05)
    return batch


async def read(client, file_id: str | None) -> list[dict]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(text) for text in content.text.splitlines()]


async def test_a_batch_by_openais_client(start):
    fleet = await start()
    async with client_of(fleet) as client:
        begun = await begin(client, lines(5), metadata={"job": "nightly"})
        assert (begun.status, begun.endpoint) == ("validating", CHAT)
        done = await ended(client, begun)
        assert done.status == "completed"
        assert done.request_counts.model_dump() == {"total": 5, "completed": 5, "failed": 0}
        assert done.metadata == {"job": "nightly"}
        assert done.created_at <= done.in_progress_at <= done.completed_at < done.expires_at
        assert done.errors is None
        assert done.error_file_id is None
        answers = await read(client, done.output_file_id)
        assert {answer["custom_id"] for answer in answers} == {f"line-{n}" for n in range(5)}
        direct = (await fleet.chat(max_tokens=2)).json()["choices"]
        for answer in answers:
            assert answer["error"] is None
            assert answer["response"]["status_code"] == 200
            assert answer["response"]["body"]["choices"] == direct
            assert answer["response"]["request_id"] == answer["response"]["body"]["id"]
        listed = [batch.id async for batch in client.batches.list(limit=1)]
        assert listed == [done.id]
        purposes = {file.purpose async for file in client.files.list()}
        assert purposes == {"batch", "batch_output"}
    priorities = {sent.priority for sent in fleet.workers["decode-0"].submissions}
    assert priorities == {LOWEST_PRIORITY, 0}  # the direct one


async def test_other_calls_make_batches_too(start):
    fleet = await start()
    url = "/v1/embeddings"
    content = line("a", url, input="a cat") + b"\n" + line("b", url, input=["a", "b"])
    async with client_of(fleet) as client:
        done = await ended(client, await begin(client, content, url))
        answers = {a["custom_id"]: a for a in await read(client, done.output_file_id)}
        assert len(answers["b"]["response"]["body"]["data"]) == 2


async def test_responses_make_batches_too(start):
    fleet = await start()
    url = "/v1/responses"
    content = line("a", url, input="hi", max_output_tokens=2) + b"\n" + line("b", url, input=[])
    async with client_of(fleet) as client:
        done = await ended(client, await begin(client, content, url))
        (answer,) = await read(client, done.output_file_id)
        (refused,) = await read(client, done.error_file_id)
    assert answer["response"]["body"]["status"] == "incomplete"
    assert refused["custom_id"] == "b"
    assert fleet.workers["decode-0"].submissions[0].priority == LOWEST_PRIORITY


async def test_a_line_of_garbage_is_an_error_of_that_line(start):
    fleet = await start()
    content = b"\n".join(
        [
            b"\xef\xbb\xbf" + line("good"),
            b"garbage",
            b"",
            b"[1, 2]",
            line("good"),  # a second one of that name
            line("other", model="nobody"),
            line("elsewhere", "/v1/embeddings"),
            line("hot", temperature=-1),
            line("streamed", stream=True),
            line("last") + b"\r",
        ]
    )
    async with client_of(fleet) as client:
        done = await ended(client, await begin(client, content))
        assert done.status == "completed"
        assert done.request_counts.model_dump() == {"total": 9, "completed": 2, "failed": 7}
        answers = await read(client, done.output_file_id)
        assert sorted(answer["custom_id"] for answer in answers) == ["good", "last"]
        errors = await read(client, done.error_file_id)
        told = {}
        for error in errors:
            if error["error"] is not None:
                assert error["response"] is None
                told[error["error"]["message"].split(":")[0]] = error["error"]["code"]
        assert told == {
            "line 2": "invalid_json_line",
            "line 4": "invalid_json_line",
            "line 5": "duplicate_custom_id",
            "line 7": "mismatched_endpoint",
            "line 9": "invalid_body",
        }
        refused = {e["custom_id"]: e["response"] for e in errors if e["error"] is None}
        assert refused["other"]["status_code"] == 404
        assert refused["other"]["body"]["error"]["param"] == "model"
        assert refused["hot"]["status_code"] == 400


async def test_a_cancel_keeps_what_is_answered(start):
    fleet = await start(Script(step_s=0.001, prefill_s=0.05), at_once=1)
    worker = fleet.workers["decode-0"]
    async with client_of(fleet) as client:
        begun = await begin(client, lines(200))
        await until(lambda: len(worker.submissions) > 3)
        assert (await client.batches.cancel(begun.id)).status == "cancelling"
        done = await ended(client, begun)
        assert done.status == "cancelled"
        assert done.cancelled_at >= done.cancelling_at
        counts = done.request_counts
        assert 3 <= counts.completed < 50
        answers = await read(client, done.output_file_id)
        assert len(answers) == counts.completed
        asked = len(worker.submissions)
        await asyncio.sleep(0.3)
        assert len(worker.submissions) == asked
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await client.batches.cancel(begun.id)
    await until(lambda: fleet.lane.gateway.in_flight == 0)


async def test_a_cancel_ends_the_last_lines_too(start):
    """Also one whose line the fleet cannot run yet."""
    fleet = await start(Script(step_s=0.05))
    worker = fleet.workers["decode-0"]
    async with client_of(fleet) as client:
        begun = await begin(client, lines(3, max_tokens=4000))
        await until(lambda: len(worker.submissions) == 3)
        await client.batches.cancel(begun.id)
        done = await ended(client, begun)
        assert (done.status, done.request_counts.completed) == ("cancelled", 0)
        await until(lambda: fleet.lane.gateway.in_flight == 0)
        await worker.stop()
        await until(lambda: fleet.state("decode-0") != "ready")
        begun = await begin(client, lines(1))
        while (await client.batches.retrieve(begun.id)).status != "in_progress":
            await asyncio.sleep(0.05)
        await client.batches.cancel(begun.id)
        assert (await ended(client, begun)).status == "cancelled"


async def test_nothing_comes_back_of_a_batch_whose_record_is_gone(start, tmp_path):
    fleet = await start(Script(step_s=0.05))
    worker = fleet.workers["decode-0"]
    store = BatchStore(tmp_path / "batch", BatchConfig())
    content = line("short") + b"\n" + line("long", max_tokens=4000)
    async with client_of(fleet) as client:
        begun = await begin(client, content)
        await until(lambda: len(worker.submissions) == 2)
        record = store.batch("default", begun.id)
        with store.changing("default"):
            assert store.remove(record.tenant, "batches", record.id)
        await until(lambda: fleet.lane.gateway.in_flight == 0)
        await asyncio.sleep(0.5)
        assert [file.purpose async for file in client.files.list()] == ["batch"]
        assert (await client.batches.list()).data == []
    assert list((tmp_path / "batch" / "default" / "batches").iterdir()) == []


async def test_a_batch_goes_on_where_a_router_left_it(start, tmp_path):
    """No line twice in the answers, none left out, though the last line was torn."""
    first = await start(Script(step_s=0.001, prefill_s=0.03), at_once=2)
    async with client_of(first) as client:
        begun = await begin(client, lines(40))
        await until(lambda: len(first.workers["decode-0"].submissions) > 8)
    await first.close()
    await until(lambda: not first.server.started or first.server.should_exit)
    folder = tmp_path / "batch" / "default" / "batches"
    output = folder / f"{begun.id}.output"
    await until(lambda: _unlocked(tmp_path / "batch"))
    before = output.read_bytes()
    written = before.count(b"\n")
    assert 3 < written < 40
    with output.open("ab") as file:
        file.write(before.splitlines()[0][:50])  # as a crash leaves it
    second = await start()
    async with client_of(second) as client:
        done = await ended(client, begun)
        assert done.status == "completed"
        answers = await read(client, done.output_file_id)
    names = [answer["custom_id"] for answer in answers]
    assert sorted(names) == sorted(f"line-{number}" for number in range(40))
    assert len(second.workers["decode-0"].submissions) == 40 - written


def _unlocked(root: Path) -> bool:
    with BatchStore(root, BatchConfig()).lock() as free:
        return free


async def test_two_routers_of_one_folder_share_the_calls_and_one_runs_the_lines(start):
    fleets = [await start(), await start()]
    async with client_of(fleets[0]) as one, client_of(fleets[1]) as other:
        begun = [await begin(one, lines(6)), await begin(other, lines(6))]
        for client, batch in zip((other, one), begun, strict=True):
            assert (await ended(client, batch)).request_counts.completed == 6
    asked = [len(fleet.workers["decode-0"].submissions) for fleet in fleets]
    assert sorted(asked) == [0, 12]


async def test_a_tenant_sees_its_own_alone(start):
    fleet = await start(keys=KEYS)
    async with client_of(fleet, "key-of-one") as one, client_of(fleet, "key-of-two") as two:
        done = await ended(one, await begin(one, lines(2)))
        assert len((await one.files.list()).data) == 2
        assert (await two.files.list()).data == []
        assert (await two.batches.list()).data == []
        for call in (
            two.files.retrieve(done.input_file_id),
            two.files.content(done.output_file_id),
            two.files.delete(done.input_file_id),
            two.batches.retrieve(done.id),
            two.batches.cancel(done.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError, match="input_file_id"):
            await two.batches.create(
                input_file_id=done.input_file_id, endpoint=CHAT, completion_window="24h"
            )
        assert (await one.files.delete(done.input_file_id)).deleted
    tenants = {active.request.tenant for active in fleet.lane.gateway.kept._active.values()}
    assert tenants == {"one"}
    assert (await fleet.http.get("/v1/files")).status_code == 401
    async with client_of(fleet, "key-of-batch") as three:
        assert (await ended(three, await begin(three, lines(1)))).request_counts.completed == 1


async def test_names_lead_nowhere_else(start, tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    fleet = await start()
    for name in ("..", "../../secret", "..%2f..%2f..%2fsecret", "file-" + "a" * 31, "%00"):
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
            assert (await fleet.http.get(path)).status_code == 404


async def test_a_batch_that_cannot_be_is_refused_by_name(start):
    fleet = await start()
    body = {"input_file_id": "file-" + "a" * 32, "endpoint": CHAT, "completion_window": "24h"}
    for fields, param in (
        ({"endpoint": "/v1/audio"}, "endpoint"),
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "1 day"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": ""}, "input_file_id"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        # The records of 1000 batches would take 4 GB of the disk, and of the router's memory.
        ({"metadata": {"a" * 65: "x"}}, f"metadata.{'a' * 64}"),
    ):
        refused = await fleet.http.post("/v1/batches", json=body | fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_form_that_cannot_be_is_refused(start):
    fleet = await start(max_file_bytes=2000)
    post = fleet.http.post
    good, purpose = {"file": ("a.jsonl", b"x")}, {"purpose": "batch"}
    plain = await post("/v1/files", json={})
    assert (plain.status_code, plain.json()["error"]["param"]) == (415, "content-type")
    for files, data, param in (
        (good, {}, "purpose"),
        (good, {"purpose": "fine-tune"}, "purpose"),
        ({"other": ("a", b"x")}, purpose, "file"),
        *(
            (good, {**purpose, "expires_after[seconds]": seconds}, "expires_after[seconds]")
            for seconds in ("soon", "\u00b2", "\u2460", "1" * 10, "-1", "1.0", "")
        ),
    ):
        refused = await post("/v1/files", files=files, data=data)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    head = {"content-type": "multipart/form-data; boundary=x"}
    form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n\xff\r\n--x--\r\n'
    for charset in ("undefined", "idna", "punycode", "rot13", "base64", "utf-16", "\u00fc", "no"):
        named = {"content-type": f"multipart/form-data; boundary=x; charset={charset}".encode()}
        # The decoder of `idna` takes 20 s for 1 MB of a field.
        assert (await post("/v1/files", content=form, headers=named)).status_code == 415, charset
    for content in (b"garbage", b"--x\r\ngarbage", b""):
        assert (await post("/v1/files", content=content, headers=head)).status_code == 400
    named = {"content-type": 'multipart/form-data; boundary=x; charset="UTF-8"'}
    assert (await post("/v1/files", content=form, headers=named)).status_code == 400
    bare = {"content-type": "multipart/form-data"}
    assert (await post("/v1/files", content=b"", headers=bare)).status_code == 400
    for size in (2001, 500_000):
        refused = await post("/v1/files", files={"file": ("a", b"x" * size)}, data=purpose)
        assert (refused.status_code, refused.json()["error"]["param"]) == (413, "file")
    assert (await fleet.http.get("/v1/files")).json()["data"] == []


async def test_the_disk_is_bounded(start, tmp_path):
    fleet = await start(max_bytes_per_tenant=6000, max_bytes=9000)
    tenants = [{"x-baton-tenant": name} for name in ("one", "two")]

    async def put(size: int, tenant: int):
        return await fleet.http.post(
            "/v1/files",
            files={"file": ("a", b"x" * size)},
            data={"purpose": "batch"},
            headers=tenants[tenant],
        )

    first = await put(5000, 0)
    assert first.status_code == 200
    refused = await put(2000, 0)
    assert refused.status_code == 413
    assert "6000" in refused.json()["error"]["message"]
    assert (await put(5000, 1)).status_code == 413  # of all tenants
    await fleet.http.delete(f"/v1/files/{first.json()['id']}", headers=tenants[0])
    assert (await put(5000, 1)).status_code == 200


async def test_answers_beyond_the_limit_end_the_batch_and_say_so(start):
    content = lines(20)
    fleet = await start(max_bytes_per_tenant=len(content) + 3500)
    async with client_of(fleet) as client:
        done = await ended(client, await begin(client, content))
        assert done.status == "failed"
        assert done.errors.data[0].code == "storage_full"
        answers = await read(client, done.output_file_id)
        assert 0 < len(answers) == done.request_counts.completed < 20


async def test_a_lack_of_room_ends_the_lines_that_run(start):
    content = line("short") + b"\n" + line("long", max_tokens=4000)
    fleet = await start(Script(step_s=0.05), max_bytes_per_tenant=len(content) + 700)
    async with client_of(fleet) as client:
        done = await ended(client, await begin(client, content))
        assert (done.status, done.errors.data[0].code) == ("failed", "storage_full")
    await until(lambda: fleet.lane.gateway.in_flight == 0)


async def test_line_ends_are_limited_too(start):
    """Twenty million of them kept the router busy for seconds."""
    fleet = await start()
    async with client_of(fleet) as client:
        done = await ended(client, await begin(client, lines(1) + b"\n" * 200_001))
        assert (done.status, done.errors.data[0].code) == ("failed", "too_many_lines")


@pytest.mark.parametrize("content", [b"", b"\n\n\n"])
async def test_a_file_without_lines_fails_its_batch(start, content):
    fleet = await start()
    async with client_of(fleet) as client:
        done = await ended(client, await begin(client, content))
        assert (done.status, done.errors.data[0].code) == ("failed", "empty_file")


async def test_what_is_not_done_in_time_is_given_up(start, tmp_path):
    fleet = await start(Script(step_s=0.001, prefill_s=0.2), at_once=1)
    store = BatchStore(tmp_path / "batch", BatchConfig())
    async with client_of(fleet) as client:
        sent = await client.files.create(file=("in.jsonl", lines(50)), purpose="batch")
        now_s = int(time.time())
        record = BatchRecord(
            id="batch_" + "e" * 32,
            tenant="default",
            endpoint=CHAT,
            input_file_id=sent.id,
            completion_window="1h",
            created_s=now_s,
            expires_s=now_s + 3,
        )
        await asyncio.to_thread(store.save, record)
        done = await ended(client, await client.batches.retrieve(record.id))
        assert done.status == "expired"
        assert 0 < done.request_counts.completed < 50


async def test_a_line_waits_where_the_fleet_has_no_room(start):
    """503 is no answer to a line: it is asked again."""
    fleet = await start()
    await fleet.workers["decode-0"].stop()
    await until(lambda: fleet.state("decode-0") != "ready")
    async with client_of(fleet) as client:
        begun = await begin(client, lines(2))
        await asyncio.sleep(1.0)
        assert (await client.batches.retrieve(begun.id)).status == "in_progress"
        await fleet.add("decode-1", Script(step_s=0.001))
        done = await ended(client, begun)
        assert done.request_counts.completed == 2


async def test_a_file_in_use_stays_and_old_ones_go(start, tmp_path):
    fleet = await start(Script(step_s=0.001, prefill_s=0.3), at_once=1)
    store = BatchStore(tmp_path / "batch", BatchConfig(keep_days=1))
    async with client_of(fleet) as client:
        begun = await begin(client, lines(3))
        with pytest.raises(openai.BadRequestError, match="is in use by"):
            await client.files.delete(begun.input_file_id)
        done = await ended(client, begun)
        late_s = time.time() + 32 * 24 * 3600
        await asyncio.to_thread(store.sweep, late_s)
        assert (await client.files.list()).data == []
        assert (await client.batches.list()).data == []
        with pytest.raises(openai.NotFoundError):
            await client.files.content(done.output_file_id)
    left = [path for path in (tmp_path / "batch").rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["lock"]


async def test_without_a_folder_there_are_no_files(make_fleet):
    fleet = await make_fleet({"decode-0": None})
    refused = await fleet.http.get("/v1/files")
    assert refused.status_code == 503
    assert "state folder" in refused.json()["error"]["message"]


async def test_the_command_sends_a_file_and_fetches_its_answers(start, tmp_path):
    fleet = await start()
    file = tmp_path / "in.jsonl"
    file.write_bytes(lines(3) + b"garbage\n")
    code, out, told = await baton_batch(fleet.url, str(file))
    assert code == 1  # a line failed
    assert out.split() == [f"{file}.output.jsonl", f"{file}.errors.jsonl"]
    assert "3 of 4 done, 1 failed" in told
    answers = await asyncio.to_thread(Path(f"{file}.output.jsonl").read_text)
    assert len(answers.splitlines()) == 3
    code, out, _ = await baton_batch(fleet.url, str(file), "--no-wait")
    assert code == 0
    name = out.strip()
    assert (await fleet.http.get(f"/v1/batches/{name}")).json()["id"] == name
    for wrong in (str(tmp_path / "nothing"), "batch_" + "0" * 32):
        code, _, told = await baton_batch(fleet.url, wrong)
        assert code == 1
        assert "error" in told


async def baton_batch(url: str, *arguments: str) -> tuple[int, str, str]:
    import sys

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleet.cli.main", "batch", "--url", url, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, told = await process.communicate()
    return process.returncode, out.decode(), told.decode()


@pytest.mark.parametrize(
    ("stream", "url", "runs"),
    [
        ("false", CHAT, True),
        (None, CHAT, True),
        ({}, CHAT, True),  # the call has the error
        ("yes", CHAT, False),
        (True, "/v1/embeddings", True),  # which does not know the field
    ],
)
def test_a_line_reads_values_as_the_call_does(stream, url, runs):
    found = read_line(line("a", url, stream=stream), 1, url, set(), 10_000)
    assert isinstance(found, LineRequest) is runs
