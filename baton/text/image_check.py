"""Checks of clients' images, in a separate process.

    python -m baton.text.image_check

Decoders of images are written in C, and a small file may become any number of pixels. Therefore
this process can open neither files nor sockets, its memory is limited, and the router limits its
time. It decodes each image once, so that no damaged or large one reaches an engine.

Frames (``baton/text/confined.py``) on stdin are questions; each is answered by an `ImageFinding`.
"""

import warnings
from io import BytesIO

import msgspec
from PIL import ExifTags, Image

from baton.text.confined import forbid_files, limit_process, read_frame, write_frame

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MEMORY_BYTES = 1 << 30
_TURNED = (5, 6, 7, 8)  # orientations that swap width and height


class ImageFile(msgspec.Struct, frozen=True):
    """Question for the size of an image of at most ``most_pixels``."""

    data: bytes
    most_pixels: int


class ImageFinding(msgspec.Struct, frozen=True):
    """Size of an image as it is shown; with an ``error`` the image cannot be used."""

    width: int = 0
    height: int = 0
    error: str = ""


def examined(file: ImageFile) -> ImageFinding:
    """Decode an image; of an animation the first frame, as engines do."""
    Image.MAX_IMAGE_PIXELS = file.most_pixels
    try:
        with Image.open(BytesIO(file.data), formats=_FORMATS) as image:
            image.load()
            size = image.size
            turned = image.getexif().get(ExifTags.Base.Orientation) in _TURNED
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return ImageFinding(error=f"has more pixels than the limit, {file.most_pixels}")
    except Exception:  # noqa: BLE001 - damaged files raise many types
        return ImageFinding(error="is no PNG, JPEG, WebP or GIF, or it is damaged, or too large")
    return ImageFinding(*(reversed(size) if turned else size))


def main() -> None:
    """Answer questions until stdin ends."""
    limit_process(_MEMORY_BYTES)
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    Image.init()  # imports all that checks need
    forbid_files()
    write_frame(ImageFinding())
    while body := read_frame():
        write_frame(examined(msgspec.msgpack.decode(body, type=ImageFile)))


if __name__ == "__main__":
    main()
