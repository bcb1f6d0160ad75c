"""The explorer: click a pixel, see what it attends to.

`images`, `subjects`, `views` and `draw` are pure and know of no page; `answers`, `page` and `serve` need the extra `explore`.
"""
