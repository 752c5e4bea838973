"""Endpoints of models, LoRA adapters and tokens. The calls for adapters are vLLM's."""

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Request, Response

from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.adapters import LoadAdapterBody, UnloadAdapterBody
from router.frontend.api.bodies.fields import Ignored
from router.frontend.api.bodies.parse import parse
from router.frontend.api.bodies.rendering import rendering
from router.frontend.api.bodies.tokens import DetokenizeBody, TokenizeBody
from router.frontend.api.call_headers import ignored_of
from router.frontend.api.endpoints import Endpoints, read_body
from router.frontend.api.tool_use.offered import messages_of, offered
from router.frontend.audited import audited
from router.frontend.off_loop import TENANT, off_loop
from router.lane import Lane
from router.lanes.routes import leads_to
from router.process import Process
from router.served_model import ServedModel
from router.tenants.access import Access


def routes(router: Process) -> Endpoints:
    """Return ``/v1/models``, calls for LoRA adapters, ``/tokenize`` and ``/detokenize``."""
    api = Endpoints()
    _add_models(api, router)
    _add_adapters(api, router)

    @api.post_body("/tokenize", TokenizeBody)
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt, or of a rendered conversation."""
        return await _answer_off_loop(router, request, _tokenized)

    @api.post_body("/detokenize", DetokenizeBody)
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids, including special tokens."""
        return await _answer_off_loop(router, request, _detokenized)

    return api


def _add_models(api: Endpoints, router: Process) -> None:
    lanes = router.lanes

    @api.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """List the names of the served models and of their adapters."""
        access = router.access.of(request.headers)
        records = [
            _record(lane, name)
            for lane in lanes
            for name in lane.model.served_names(access.sees, access.models)
        ]
        known = {record["id"] for record in records}
        aliases = [
            _alias_record(router, name, access)
            for name in dict.fromkeys((*router.routes.table.names, *lanes.stems()))
            if name not in known and (access.models is None or name in access.models)
        ]
        return {"object": "list", "data": [*records, *filter(None, aliases)]}

    @api.get("/v1/models/{model_id:path}")
    async def model(request: Request, model_id: str) -> dict[str, Any]:
        """Return the artifact record of a model or an adapter."""
        access = router.access.of(request.headers)
        allowed = access.models is None or model_id in access.models
        if allowed and (record := _alias_record(router, model_id, access)):
            return record
        return _record(lanes.of(model_id, access.sees, access.models), model_id)


def _add_adapters(api: Endpoints, router: Process) -> None:
    lanes = router.lanes

    @api.post_body("/v1/load_lora_adapter", LoadAdapterBody)
    async def load_lora_adapter(request: Request) -> Response:
        """Serve the adapter in the directory ``lora_path`` as the model ``lora_name``."""
        owner = router.access.adapter_owner(request.headers)
        raw = await read_body(request, router)
        ignored = ignored_of(request)
        body = await off_loop(len(raw), lambda: parse(LoadAdapterBody, raw, ignored))
        served = lanes.base(body.base_model, "base_model").model
        entry = await served.adapters.load(body.lora_name, body.lora_path, owner)
        after = {"path": body.lora_path, "digest": entry.digest, "owner": owner}
        await audited(router, request, "adapters load", entry.name, after=after)
        message = f"Success: LoRA adapter '{entry.name}' added successfully."
        return Response(message, media_type="text/plain")

    @api.post_body("/v1/unload_lora_adapter", UnloadAdapterBody)
    async def unload_lora_adapter(request: Request) -> Response:
        """Stop serving the adapter ``lora_name``. Running requests finish."""
        owner = router.access.adapter_owner(request.headers)
        raw = await read_body(request, router)
        ignored = ignored_of(request)
        body = await off_loop(len(raw), lambda: parse(UnloadAdapterBody, raw, ignored))
        served = next(
            (lane for lane in lanes if lane.model.adapters.find(body.lora_name)), lanes.first
        ).model
        for name, entry in router.routes.table.names.items():
            if served.adapters.find(body.lora_name, owner or None) and (
                body.lora_name in leads_to(entry)
            ):
                raise InvalidRequestError.at(
                    "lora_name",
                    f"{name} leads to {body.lora_name}: use `baton models alias`, `rollback` or "
                    "`remove` first",
                )
        await served.adapters.unload(body.lora_name, owner)
        await audited(router, request, "adapters unload", body.lora_name, after={"owner": owner})
        message = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        return Response(message, media_type="text/plain")


def _alias_record(router: Process, name: str, access: Access) -> dict[str, Any] | None:
    """Return the record of a name that leads to another model; None if it does not."""
    entry = router.lanes.entry(router.routes.table, name)
    if entry is None:
        return None
    serving = (lane for lane in router.lanes if lane.model.serves(entry.target, access.sees))
    lane = next(serving, None)
    if lane is None:
        return None
    routed = {"canary": entry.canary, "share": entry.share} if entry.canary else {}
    record = _record(lane, entry.target)
    return {**record, "id": name, "root": entry.target, "rollback_to": entry.previous, **routed}


def _record(lane: Lane, name: str) -> dict[str, Any]:
    dtypes = {
        group.dtype
        for slot in lane.gateway.workers.usable
        if slot.link is not None
        for group in slot.link.capabilities.kv_groups
    }
    record = lane.model.record(name, lane.created, ",".join(sorted(dtypes)))
    return {**record, "emulated": lane.settings.emulated or None}


async def _answer_off_loop(
    router: Process,
    request: Request,
    answer: Callable[[Process, bytes, Ignored, Access], dict[str, Any]],
) -> Response:
    access = router.access.of(request.headers)
    TENANT.set(access.tenant)
    raw = await read_body(request, router)
    ignored = ignored_of(request)
    content = await off_loop(
        len(raw), lambda: msgspec.json.encode(answer(router, raw, ignored, access))
    )
    return Response(content, media_type="application/json")


def _tokenized(router: Process, raw: bytes, ignored: Ignored, access: Access) -> dict[str, Any]:
    body = parse(TokenizeBody, raw, ignored)
    model = _model_of(router, body.model, access)
    tokens = _tokens_of(model, body)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": model.max_context_tokens,
        "tokens": tokens,
    }
    if body.return_token_strs:
        answer["token_strs"] = [model.tokenizer.token_text(token_id) for token_id in tokens]
    return answer


def _model_of(router: Process, name: str | None, access: Access) -> ServedModel:
    """Return the model of a name, or the first one without a name; of an alias, its target."""
    lanes = router.lanes
    if name is None:
        return lanes.first.model
    entry = lanes.entry(router.routes.table, name)
    if entry is not None and (access.models is None or name in access.models):
        return lanes.of(entry.target, access.sees).model
    return lanes.of(name, access.sees, access.models).model


def _tokens_of(model: ServedModel, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError.at("prompt", "exactly one of prompt and messages is required")
    if body.messages is not None:
        return model.encode_chat(
            messages_of(body.messages),
            offered(body.tools),
            rendering(
                body.chat_template_kwargs, body.add_generation_prompt, body.continue_final_message
            ),
        )
    if body.tools is not None:
        raise InvalidRequestError.at("tools", "requires messages")
    prompt = body.prompt or ""
    model.check_length(prompt, "prompt")
    tokens = model.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
    model.check_ids(tokens, "prompt")
    return tokens


def _detokenized(router: Process, raw: bytes, ignored: Ignored, access: Access) -> dict[str, Any]:
    body = parse(DetokenizeBody, raw, ignored)
    model = _model_of(router, body.model, access)
    model.check_ids(body.tokens, "tokens")
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}
