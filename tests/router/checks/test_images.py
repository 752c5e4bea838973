"""Images of clients: bombs, damage and lies about formats end in the side process, in time."""

import io
import struct
import zlib

import pytest
from batonpb.decode_pb2 import Hello
from PIL import Image

from baton.config.clients import ImagesConfig
from baton.text.image_check import ImageFile, ImageFinding, examined
from baton.types.errors import BatonError, InvalidRequestError, UnavailableError
from router.routing.checks.images import Images
from router.routing.workers.table import WorkerTable
from tests.router.settings import settings_of
from tests.router.static_directory import StaticDirectory

MOST_PIXELS = 1 << 20


def file_of(width: int, height: int, kind: str = "PNG", **more: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (9, 8, 7)).save(file, kind, **more)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """Return a PNG whose head promises more than its data have."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + rows + chunk(b"IEND", b"")


def no_workers() -> WorkerTable:
    return WorkerTable(StaticDirectory({}), *settings_of(), Hello(), lambda _: None)


def found(data: bytes, most_pixels: int = MOST_PIXELS) -> ImageFinding:
    return examined(ImageFile(data, most_pixels))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_size_is_that_of_the_decoded_image(kind: str) -> None:
    assert found(file_of(30, 20, kind)) == ImageFinding(30, 20)


def test_an_image_that_lies_on_its_side_is_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert found(file_of(30, 20, "JPEG", exif=exif)) == ImageFinding(20, 30)


def test_formats_are_those_of_the_content() -> None:
    for kind in ("BMP", "TIFF", "PPM", "ICO", "EPS"):
        assert "is no PNG" in found(file_of(30, 20, kind)).error
    assert found(b"").error
    assert found(b"%PDF-1.7").error
    assert "damaged" in found(file_of(300, 300, "JPEG")[:-500]).error


async def test_bombs_end_neither_the_router_nor_its_checks(model) -> None:
    images = Images(model, no_workers(), ImagesConfig(most_pixels=MOST_PIXELS))
    try:
        for data in (bomb(50_000, 50_000), bomb(1025, 1024), bomb(1 << 30, 1 << 30), b"x" * 99):
            with pytest.raises(InvalidRequestError, match=r"messages\[2\]") as error:
                await images.form(data, "messages[2].content[1]", "a")
            assert error.value.param == "messages[2].content[1]"
        with pytest.raises(UnavailableError, match="no worker"):  # it is an image
            await images.form(file_of(1024, 1024), "messages[0].content[0]", "a")
    finally:
        await images.close()


async def test_a_decoder_that_takes_too_long_is_ended(model, monkeypatch) -> None:
    monkeypatch.setattr("router.routing.checks.images._DECODE_S", 0.01)
    images = Images(model, no_workers(), ImagesConfig(most_pixels=1 << 26))
    try:
        await images._process.start()
        with pytest.raises(BatonError, match="to decode"):
            await images.form(file_of(8000, 8000), "messages[0].content[0]", "a")
    finally:
        await images.close()
