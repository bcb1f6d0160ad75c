"""Networks out of and into other programs."""
