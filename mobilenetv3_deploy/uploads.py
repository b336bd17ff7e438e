"""Images that strangers send: how much of a request is read, for how long, and what it is refused for."""

import asyncio

from pydantic import BaseModel, PositiveFloat
from python_multipart.exceptions import FormParserError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

MULTIPART = "multipart/form-data"
# Of the formats in mobilenetv3_common.images, in all their names; and what clients send that do not know the type.
IMAGE_TYPES = {
    *("image/jpeg", "image/jpg", "image/png", "image/bmp", "image/x-ms-bmp", "image/tiff", "image/webp", "image/gif"),
    *("image/x-portable-pixmap", "image/x-portable-graymap", "image/x-portable-anymap"),
    *("application/octet-stream", ""),
}
CLOSE = {"Connection": "close"}  # of a request that was not read to its end


class UploadLimits(BaseModel):
    """Of one request."""

    max_megabytes: PositiveFloat = 10  # of its body, in 10^6 bytes
    upload_seconds: PositiveFloat = 10  # until the body has come


async def read_upload(request: Request, limits: UploadLimits) -> bytes:
    """The image in a request: its body, or the first file of a form.

    Raises HTTPException: 408 for a body that comes too slowly, 413 for one that is too large, whatever length it
    claims, 415 for a type that is no image's, 400 for a form that cannot be read or a client that has gone, and 422 for
    a form without a file. What is refused is read to its end as well, while there is time: a client that still sends
    when the connection is closed loses the answer.
    """
    body, most = bytearray(), int(limits.max_megabytes * 1e6)
    try:
        await asyncio.wait_for(_receive(request, body, most), limits.upload_seconds)
    except (TimeoutError, asyncio.TimeoutError) as error:  # two types before Python 3.11
        if len(body) <= most:
            raise HTTPException(
                408, f"the body has not come within {limits.upload_seconds:g} s: send it faster", CLOSE
            ) from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the client has gone") from error
    if len(body) > most:
        raise HTTPException(413, f"the body is larger than {limits.max_megabytes:g} MB: send a smaller image", CLOSE)
    media_type = check_type(request.headers.get("content-type"), {MULTIPART} | IMAGE_TYPES)
    return await _file_of_form(request, bytes(body)) if media_type == MULTIPART else bytes(body)


async def _receive(request: Request, body: bytearray, most: int) -> None:
    """Add to `body` what comes, and nothing more once it has over `most` bytes."""
    async for chunk in request.stream():
        if len(body) <= most:
            body += chunk


def check_type(content_type: str | None, known: set[str]) -> str:
    """The media type in a Content-Type, without parameters; raises HTTPException 415 if it is not a `known` one."""
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type not in known:
        raise HTTPException(415, f"{media_type} is no type of image that is read: send JPEG, PNG or WebP")
    return media_type


async def _file_of_form(request: Request, body: bytes) -> bytes:
    """The first file in `body`, a form as the headers of `request` describe it."""

    async def receive() -> dict:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        # Starlette itself answers 400 where it can name what is wrong with the form.
        async with Request(request.scope, receive).form(max_files=1, max_fields=8) as form:
            file = next((value for value in form.values() if isinstance(value, UploadFile)), None)
            if file is None:
                raise HTTPException(422, "the form has no file: send the image as one")
            check_type(file.content_type, IMAGE_TYPES)
            return await file.read()
    except FormParserError as error:
        raise HTTPException(400, f"the form cannot be read ({error})") from error
