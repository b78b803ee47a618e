"""Whether the API answers, and its OpenAPI document. Open to everybody."""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from functions.common.http import Answer, Api, Request


@cache
def document() -> Any:
    """Built into the zip beside this file."""
    return msgspec.json.decode((Path(__file__).parent / "openapi.json").read_bytes())


async def health(request: Request) -> Answer:
    """200."""
    return Answer(200, {"status": "ok"})


async def openapi(request: Request) -> Answer:
    """The document."""
    return Answer(200, document())


handler = Api({("GET", "/healthz"): health, ("GET", "/openapi.json"): openapi}, public=True)
