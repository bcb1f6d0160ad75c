"""The demo's page: one HTML file with its table, curves and attention pictures inside."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["page", "png"]

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%}th,td{padding:.35rem .7rem;border-bottom:1px solid #ddd;text-align:left}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}img{max-width:100%;height:auto}
code{background:#f4f4f4;padding:.1rem .3rem}figcaption{color:#555;font-size:.9rem}figure{margin:1.5rem 0}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}th,td{border-color:#444}code{background:#2a2d33}
figcaption{color:#aaa}img{background:#fff}}"""


def png(figure: Figure) -> bytes:
    """A figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def page(
    title: str,
    text: Sequence[str],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: Sequence[str],
    pictures: Sequence[tuple[str, bytes]],
) -> str:
    """One HTML document; `pictures` are (caption, PNG) and become part of it.

    >>> "<td>a &amp; b</td>" in page("t", [], ["name"], [["a & b"]], [], [])
    True
    """
    right = dict.fromkeys(numbers, ' class="number"')
    head = "".join(f"<th{right.get(c, '')}>{html.escape(c)}</th>" for c in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td{right.get(c, '')}>{html.escape(v)}</td>" for c, v in zip(columns, row, strict=True))
        + "</tr>"
        for row in rows
    )
    figures = "".join(
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, data in pictures
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><h1>{html.escape(title)}</h1>"
        f"{''.join(f'<p>{html.escape(line)}</p>' for line in text)}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{figures}</html>\n"
    )
