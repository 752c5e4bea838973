"""Live page at ``/`` and API page at ``/docs``: static files of the package.

The pages contain no data of the fleet and need no API key. Calls from them need one, if the fleet
has API keys.
"""

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import NamedTuple

from fastapi import HTTPException, Request, Response

from router.frontend.api.endpoints import Endpoints
from router.process import Process

_FOLDER = files("router.frontend").joinpath("page")
_SCRIPTS = [file.name for file in _FOLDER.iterdir() if file.name.endswith(".js")]
_FILES = {
    "page.css": ("page.css", "text/css"),
    **{name: (name, "text/javascript") for name in _SCRIPTS},
    "swagger.css": ("vendor/swagger-ui.css", "text/css"),
    "swagger.js": ("vendor/swagger-ui-bundle.js", "text/javascript"),
    "uplot.css": ("vendor/uPlot.min.css", "text/css"),
    "uplot.js": ("vendor/uPlot.iife.min.js", "text/javascript"),
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
# Swagger UI sets inline styles.
_DOCS_HEADERS = {
    **_HEADERS,
    "content-security-policy": _HEADERS["content-security-policy"].replace(
        "style-src 'self'", "style-src 'self' 'unsafe-inline'"
    ),
}


class _File(NamedTuple):
    body: bytes
    media_type: str
    etag: str


def routes(router: Process) -> Endpoints:
    """Return ``/``, ``/docs`` and ``/page/*``."""
    api = Endpoints()
    index = _read("index.html", "text/html")
    docs = _read("docs.html", "text/html")
    loaded = {name: _read(path, kind) for name, (path, kind) in _FILES.items()}

    @api.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return _answer(request, index)

    @api.get("/docs", include_in_schema=False)
    async def api_page(request: Request) -> Response:
        return _answer(request, docs, _DOCS_HEADERS)

    @api.get("/page/{name}", include_in_schema=False)
    async def part(request: Request, name: str) -> Response:
        if name not in loaded:
            raise HTTPException(404, f"/page/{name[:40]} does not exist")
        return _answer(request, loaded[name])

    return api


def _read(path: str, media_type: str) -> _File:
    body = _FOLDER.joinpath(path).read_bytes()
    return _File(body, f"{media_type}; charset=utf-8", f'"{hashlib.sha256(body).hexdigest()[:16]}"')


def _answer(request: Request, file: _File, policy: Mapping[str, str] = _HEADERS) -> Response:
    headers = {**policy, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)
