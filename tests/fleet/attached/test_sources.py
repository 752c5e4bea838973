"""Sources of attached servers: what they read, and what they refuse."""

from pathlib import Path
from typing import Any

import pytest

from baton.config.attached import AttachedServers
from baton.config.load import ConfigError, load_config
from fleet.attached.sources import KnownAddresses, ServerEntry, ServerSource, read_servers

URL = "http://gpu-1:8000"


def servers_of(value: object) -> AttachedServers:
    return AttachedServers.model_validate(value)


async def entries(value: object) -> list[ServerEntry]:
    return list(await ServerSource(servers_of(value)).read())


async def test_a_list_has_urls_or_mappings(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    full = {
        "url": "https://gpu-2:8443/vllm",
        "role": "decode",
        "events": ["tcp://*:5557", "tcp://*:5558"],
        "key_file": str(key),
        "label": "rack-2",
    }
    first, second = await entries([URL, full])
    assert (first.url, first.events, first.label, first.key) == (URL, None, "gpu-1:8000", "")
    assert second.events == (("tcp://gpu-2:5557", ""), ("tcp://gpu-2:5558", ""))
    assert (second.key, second.label) == ("secret", "rack-2")


async def test_servers_behind_one_gateway_have_their_paths_in_their_labels(tmp_path: Path) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text("""
        servers:
          - &first {url: "https://gw/vllm-1", role: prefill}
          - {<<: *first, url: "https://gw/vllm-2/v1/"}
    """)
    found = await entries({"file": str(file)})
    assert [(one.label, one.role) for one in found] == [
        ("gw/vllm-1", "prefill"),
        ("gw/vllm-2", "prefill"),
    ]


@pytest.mark.parametrize("url", ["http://me:hidden@gpu-1:8000", "http://gpu-1:8000/?key=hidden"])
def test_a_secret_in_a_url_is_refused_and_not_shown(tmp_path: Path, url: str) -> None:
    file = tmp_path / "servers.yaml"
    for servers in (f"[{url!r}]", f"[{{url: {url!r}}}]"):
        file.write_text(f"servers: {servers}\n")
        with pytest.raises(ValueError, match="url") as refused:
            read_servers(str(file))
        assert "hidden" not in str(refused.value)
        file.write_text(
            f"model: /m\nnumerics: fast\npools: {{engine: vllm, vllm: {{servers: {servers}}}}}"
        )
        with pytest.raises(ConfigError) as refused_file:
            load_config(file)
        assert "hidden" not in str(refused_file.value)


async def test_a_name_stands_for_all_its_addresses() -> None:
    found = await entries({"dns": {"url": "http://localhost:8000", "events": ["tcp://*:5557"]}})
    by_address = {entry.address: entry for entry in found}
    assert by_address["127.0.0.1"].events == (("tcp://127.0.0.1:5557", ""),)
    assert by_address["127.0.0.1"].label == "127.0.0.1:8000"
    assert len({entry.name for entry in found}) == len(found)


async def test_a_name_without_addresses_has_no_servers() -> None:
    assert await entries({"dns": "http://no-such-service.invalid:8000"}) == []


async def test_a_changed_file_is_read_again_and_a_wrong_one_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text(f"servers: [{URL}]\n")
    source = ServerSource(servers_of({"file": str(file)}))
    assert [entry.url for entry in await source.read()] == [URL]
    file.write_text(f"servers: [{URL}, http://gpu-2:8000]\n")
    assert len(await source.read()) == 2
    for wrong in ("servers: {}\nothers: []\n", "", "servers:\n", f"servers: {URL}\n"):
        file.write_text(wrong)
        assert len(await source.read()) == 2
    file.unlink()
    assert len(await source.read()) == 2
    file.write_text("servers: []\n")
    assert list(await source.read()) == []


@pytest.mark.parametrize(
    ("before", "found", "present"),
    [
        (["10.0.0.2"], ["10.0.0.3", "10.0.0.2"], ["10.0.0.2", "10.0.0.3"]),
        (["10.0.0.2", "10.0.0.3"], ["10.0.0.3"], ["10.0.0.3"]),
        ([], ["fd00::2", "10.0.0.2"], ["10.0.0.2"]),  # one server with both families
        (["fd00::2"], ["fd00::3"], ["fd00::3"]),
        (["10.0.0.2"], [], ["10.0.0.2"]),  # the name server restarts
        (["10.0.0.2"], ["fd00::2"], ["10.0.0.2"]),  # only one of both lookups has failed
        (["fd00::2"], ["10.0.0.2"], ["fd00::2"]),
        (["fd00::2"], ["10.0.0.2", "fd00::2"], ["fd00::2"]),  # no server leaves
        ([], ["fd00::2"], ["fd00::2"]),
    ],
)
def test_addresses_are_those_of_a_lookup_that_is_whole(
    before: list[str], found: list[str], present: list[str]
) -> None:
    known = KnownAddresses()
    known.take(before)
    for _ in range(15):
        assert known.take(found) == present
    for _ in range(2):  # it lasts
        assert known.take(found) == (present if set(present) & set(found) else found)


async def test_a_key_that_is_missing_concerns_one_server_and_a_lost_one_stays(
    tmp_path: Path,
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("secret\n")
    bad.write_text("one\nhost: two\n")
    listed = [
        URL,
        {"url": "http://gpu-2:8000", "key_file": str(good)},
        {"url": "http://gpu-3:8000", "key_file": str(bad)},
        {"url": "http://gpu-4:8000", "key_file": str(tmp_path / "none")},
    ]
    source = ServerSource(servers_of(listed))
    first, second, third, fourth = await source.read()
    assert (first.problem, second.problem, second.key) == ("", "", "secret")
    assert "must be one line of ASCII" in third.problem and not third.key
    assert "cannot be read from" in fourth.problem
    good.write_text("")  # on the way to another one
    assert (await source.read())[1] == second
    good.write_text("schlüssel")
    assert (await source.read())[1] == second
    good.unlink()
    assert (await source.read())[1] == second
    good.write_text("another")
    assert (await source.read())[1].key == "another"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("servers: [gpu-1]\n", r"servers\[0\].*url"),
        (f"servers: [{URL}, {URL}]\n", "contains http://gpu-1:8000 twice"),
        (f"servers: [{URL}, {URL}/v1/]\n", "contains http://gpu-1:8000 twice"),
        ("servers: [http://v1, http://v1/v1]\n", "contains http://v1 twice"),
        (
            "servers: [http://GPU-1.:80, http://gpu-1]\n",
            "yaml: contains http://gpu-1 twice",
        ),
        ("servers: ['http://[::1]', 'http://[0:0::0:1]:80']\n", "contains .*0:1.* twice"),
        ("servers: [https://gpu-1, https://gpu-1:443]\n", "contains https://gpu-1:443 twice"),
        ("servers: [&one http://gpu-1, *one]\n", "contains http://gpu-1 twice"),
        ("hosts: []\n", "only the key `servers`"),
        ("servers: [\n", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_servers(str(file))


@pytest.mark.parametrize(
    ("vllm", "more", "problem"),
    [
        ({"servers": []}, {}, "must have at least 1|at least 1 item"),
        ({"servers": {"dns": URL, "file": "/f"}}, {}, "needs one of `list`, `dns` and `file`"),
        ({"servers": [URL], "python": "/p"}, {}, "one of them"),
        ({"servers": [URL], "gpus": 1}, {}, "gpus: not for `servers`"),
        ({"servers": [{"url": URL, "replay": ["tcp://*:1"]}]}, {}, "replay needs one endpoint"),
        ({"servers": [{"url": URL, "key_file": "k"}]}, {}, "absolute"),
        ({"servers": ["ftp://gpu-1"]}, {}, "must match"),
        ({"servers": ["http://::1:8000"]}, {}, r"IPv6 is as in http://\[::1\]:8000"),
        ({"servers": ["http://gpu..1:8000"]}, {}, "url: .*label empty"),
        ({"servers": ["http://:8000"]}, {}, "url: .*label empty"),
        ({"servers": [{"url": URL, "events": ["tcp://gpu-1"]}]}, {}, "must match"),
        ({"servers": [{"url": URL, "lable": "a"}]}, {}, "did you mean `label`"),
        ({"servers": [URL]}, {"decode": 2}, "each of which has a role"),
    ],
)
def test_a_wrong_fleet_file_is_refused(
    tmp_path: Path, vllm: dict[str, Any], more: dict[str, Any], problem: str
) -> None:
    file = tmp_path / "fleet.yaml"
    pools = {"engine": "vllm", "vllm": vllm, **more}
    file.write_text(f"model: /m\nnumerics: fast\npools: {pools!r}\n")
    with pytest.raises(ConfigError, match=problem):
        load_config(file)


def test_a_fleet_of_servers_needs_four_lines(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    servers = f"[{URL}, http://gpu-2:8000]"
    file.write_text(
        f"model: /m\nnumerics: fast\npools: {{engine: vllm, vllm: {{servers: {servers}}}}}"
    )
    config = load_config(file)
    again = type(config).model_validate_json(config.to_json())
    assert again.pools.servers == config.pools.servers
    assert config.is_attached


def test_a_file_has_no_more_servers_than_the_fleet_file_may_have(tmp_path: Path) -> None:
    """A thousand that refused connections took the good ones their time: requests got 503."""
    file = tmp_path / "servers.yaml"
    file.write_text("servers:\n" + "".join(f"- http://gpu-{n}:80\n" for n in range(513)))
    with pytest.raises(ValueError, match="at most 512"):
        read_servers(str(file))
