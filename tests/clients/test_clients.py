"""Every client works: those with small wheels in `make test`, all in `make test-clients`."""

import pytest

from tests.clients.environments import CLIENTS, Client, NoEnvironmentError
from tests.clients.run import run
from tests.clients.server import serving

_CASES = [
    pytest.param(client, id=client.name, marks=() if client.small else pytest.mark.slow)
    for client in CLIENTS
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("client", _CASES)
async def test_the_client_works(client: Client) -> None:
    async with serving() as url:
        try:
            results = await run(client, url)
        except NoEnvironmentError as error:
            pytest.skip(f"no environment for {client.title}: {error}")
    assert [result for result in results if result.result != "works"] == []


async def test_a_scenario_that_fails_is_told(tmp_path) -> None:
    """The suite itself can fail: a client that asks for another model's answer."""
    openai = next(client for client in CLIENTS if client.name == "openai_python")
    async with serving() as url:
        results = await run(openai, f"{url}/elsewhere")
    assert {result.result for result in results} == {"fails"}
    assert all(result.why for result in results)
