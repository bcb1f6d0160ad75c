"""One image from bytes to pixels, and what becomes of files that are none."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from nearsight.errors import UserError
from nearsight.photographs import UnknownRangeError, plain, upright

__all__ = ["BadImageError", "LeftOut", "decode", "image_mode", "refuse_bad"]


# `decode` has a limit of its own and says so in a sentence.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


# A side may be so many times the other: networks' images are resized by the short one, where a line would become gigabytes.
THINNEST = 1000


class BadImageError(Exception):
    """A file that is no image, is cut short, or would unpack or be resized to too many pixels."""


def image_mode(channels: int) -> str:
    """PIL's name for 1 or 3 channels.

    >>> image_mode(3)
    'RGB'
    """
    return {1: "L", 3: "RGB"}[channels]


def decode(source: bytes | Path | Any, mode: str, max_pixels: int, *, as_stored: bool = False) -> Image.Image:
    """The image in a file, in `mode` and upright, or `as_stored`; `BadImageError` says what is wrong with it.

    >>> decode(b"no image", "RGB", 100)
    Traceback (most recent call last):
    ...
    nearsight.train.data.images.BadImageError: not an image
    """
    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        width, height = image.size
        if width * height > max_pixels:
            raise BadImageError(f"{width}×{height} pixels exceed data.max_pixels={max_pixels}")
        if max(width, height) > THINNEST * min(width, height):
            raise BadImageError(f"{width}×{height} pixels: one side is more than {THINNEST} times the other")
        image.load()
        return plain(image if as_stored else upright(image), mode)
    except FileNotFoundError as error:
        raise BadImageError("missing") from error
    except UnidentifiedImageError as error:
        raise BadImageError("not an image") from error
    except UnknownRangeError as error:
        raise BadImageError(str(error)) from error
    except Image.DecompressionBombError as error:
        raise BadImageError(f"more pixels than data.max_pixels={max_pixels}") from error
    except (OSError, SyntaxError, ValueError, NotImplementedError) as error:
        raise BadImageError(f"damaged ({error})") from error


class LeftOut:
    """Tells once of every file that was no image.

    >>> left_out = LeftOut(print)
    >>> left_out.tell(["b.png", "a.png"])
    left out a.png, b.png: no image (2 so far)
    >>> left_out.tell(["a.png"])
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note, self.files = note, set[str]()

    def tell(self, names: Iterable[str]) -> None:
        new = set(names) - self.files
        if new:
            self.files |= new
            self.note(f"left out {', '.join(sorted(new))}: no image ({len(self.files)} so far)")


def refuse_bad(name: str, reason: str) -> UserError:
    """The sentence that ends a run with `data.on_bad=stop`."""
    return UserError(f"{name}: {reason}; mend or remove it, or leave such files out with data.on_bad=skip.")
