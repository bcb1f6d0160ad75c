"""Images for the explorer: uploads, checked, and those that come with scikit-learn."""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from nearsight.errors import UserError
from nearsight.photographs import UnknownRangeError, plain, upright

__all__ = ["LIMITS", "MAX_BYTES", "MAX_PIXELS", "Shown", "built_in", "open_upload"]

MAX_BYTES = 10 * 1000**2
MAX_PIXELS = 25 * 1000**2
# What a visitor's image is shrunk to: networks look at 32 to 224 pixels, and many visitors' images are held at once.
MAX_SIDE = 1024
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
LIMITS = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}, up to {MAX_BYTES // 1000**2} MB and {MAX_PIXELS // 1000**2} megapixels."


class Shown(NamedTuple):
    """An image and what to call it."""

    name: str
    image: Image.Image


def open_upload(path: str | Path) -> Shown:
    """The image in an uploaded file, upright, in RGB, no side above MAX_SIDE; `UserError` says what is wrong with it.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".png") as file:
    ...     _ = file.write(b"no image"), file.flush()
    ...     open_upload(file.name)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    nearsight.errors.UserError: ... is not an image that can be read; wanted PNG, JPEG, WEBP, GIF, BMP or TIFF, ...
    """
    path = Path(path)
    name, size = path.name, path.stat().st_size
    if size > MAX_BYTES:
        raise UserError(f"{name} has {size / 1000**2:.1f} MB; wanted {LIMITS}")
    try:
        with warnings.catch_warnings():
            # The pixels are counted here, before any is unpacked.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(path, formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise UserError(f"{name} has {width}×{height} pixels; wanted {LIMITS}")
        image.draft("RGB", (2 * MAX_SIDE, 2 * MAX_SIDE))
        image.load()
        image = plain(upright(image), "RGB")
    except UnknownRangeError as error:
        raise UserError(f"{name} holds {error}; wanted {LIMITS}") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"{name} has far too many pixels; wanted {LIMITS}") from error
    except UnidentifiedImageError as error:
        raise UserError(f"{name} is not an image that can be read; wanted {LIMITS}") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{name} is damaged ({str(error).rstrip('.')}); wanted {LIMITS}") from error
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return Shown(name, image)


@lru_cache(maxsize=1)
def built_in() -> tuple[Shown, ...]:
    """scikit-learn's two photographs and one of its handwritten digits of each class.

    >>> [shown.name for shown in built_in()][:3]
    ['flower', 'china', 'digit 0']
    """
    from sklearn.datasets import load_digits, load_sample_image

    photos = [Shown(name, Image.fromarray(load_sample_image(f"{name}.jpg"))) for name in ("flower", "china")]
    digits = load_digits()
    numbers = {int(label): number for number, label in enumerate(digits.target)}
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    drawn = [Shown(f"digit {label}", Image.fromarray(pixels[numbers[label]]).convert("RGB")) for label in range(10)]
    return (*photos, *drawn)
