"""An image file's pixels as networks are given them: in training, by the program and on the explorer's page."""

from __future__ import annotations

import warnings

import numpy as np
from PIL import ExifTags, Image, ImageOps

__all__ = ["UnknownRangeError", "plain", "upright"]

# Of what else cameras write nothing is wanted but which side is up.
warnings.filterwarnings("ignore", message="Corrupt EXIF data")


class UnknownRangeError(ValueError):
    """Of an image whose numbers do not say what is white."""


def upright(image: Image.Image) -> Image.Image:
    """A photograph turned as its EXIF data say that the camera was held."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
        return ImageOps.exif_transpose(image) if turned else image
    except Exception:  # whatever those data hold: the pixels are whole
        return image


def plain(image: Image.Image, mode: str) -> Image.Image:
    """In `mode`, "L" or "RGB": on white where it is transparent, of 16 bits a pixel the upper eight, where PIL would cut
    greys off at 255.

    >>> plain(Image.new("RGBA", (1, 1), (0, 0, 0, 102)), "L").getpixel((0, 0))
    153
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise UnknownRangeError(f"32 bits a pixel (PIL's mode {image.mode}), of which nobody knows what is white")
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert(mode)
