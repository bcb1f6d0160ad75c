"""Attention inside the non-overlapping blocks of an image, from its pixels: SASA's attention stem."""
