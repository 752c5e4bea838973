"""Adapters at run time, by the names that vLLM gave to these calls."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from router.adapter_table import AdapterTable
from router.api.prepare import tenant_of
from router.api.schema import LoadAdapterBody, UnloadAdapterBody, parse
from router.settings import RouterSettings

ReadBody = Callable[[Request], Awaitable[bytes]]
Describe = Callable[[type[BaseModel]], dict[str, Any]]


def add_adapter_calls(
    app: FastAPI,
    table: AdapterTable,
    settings: RouterSettings,
    read_body: ReadBody,
    describe: Describe,
) -> None:
    """Add the two calls. Where the fleet has API keys they need one.

    Args:
        app: The application.
        table: What is changed.
        settings: For the API keys.
        read_body: Reads a body up to the limit.
        describe: OpenAPI's arguments for a body that the endpoint parses itself.
    """

    @app.post("/v1/load_lora_adapter", **describe(LoadAdapterBody))
    async def load_lora_adapter(request: Request) -> Response:
        """Serve the adapter in the directory ``lora_path`` as the model ``lora_name``."""
        tenant_of(request.headers, settings)
        body = parse(LoadAdapterBody, await read_body(request))
        entry = await table.load(body.lora_name, body.lora_path)
        said = f"Success: LoRA adapter '{entry.name}' added successfully."
        return Response(said, media_type="text/plain")

    @app.post("/v1/unload_lora_adapter", **describe(UnloadAdapterBody))
    async def unload_lora_adapter(request: Request) -> Response:
        """Take the model ``lora_name`` away; requests that run with it finish."""
        tenant_of(request.headers, settings)
        body = parse(UnloadAdapterBody, await read_body(request))
        await table.unload(body.lora_name)
        said = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        return Response(said, media_type="text/plain")
