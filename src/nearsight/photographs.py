"""Which side of a photograph is up: for training, for the program and for the explorer's page."""

from __future__ import annotations

import warnings

from PIL import ExifTags, Image, ImageOps

__all__ = ["upright"]

# Of what else cameras write nothing is wanted but which side is up.
warnings.filterwarnings("ignore", message="Corrupt EXIF data")


def upright(image: Image.Image) -> Image.Image:
    """A photograph turned as its EXIF data say that the camera was held."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
        return ImageOps.exif_transpose(image) if turned else image
    except Exception:  # whatever those data hold: the pixels are whole
        return image
