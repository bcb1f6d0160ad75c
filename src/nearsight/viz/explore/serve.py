"""The explorer's page on a port: for whom, how large an upload, and that it asks nobody else. Needs the extra `explore`."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from nearsight.viz.explore.images import MAX_BYTES
from nearsight.viz.explore.page import build_page
from nearsight.viz.explore.subjects import Subject

__all__ = ["serve"]

# Beyond this the upload itself is refused, by Gradio; what is smaller and too large is answered by `open_upload`.
TRANSPORT = 4 * MAX_BYTES
# Nothing on the page is fetched from elsewhere, and the browser is told to refuse it if something were.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:"
)


def serve(subjects: Sequence[Subject], host: str, port: int, *, browser: bool = False, wait: bool = True) -> Any:
    """Show the page on a port until stopped; with `wait=False`, return the running page (its `close()` stops it)."""
    # Of this user alone, and gone with the page; Gradio's own place is one for all users of a machine, and stays.
    folder = tempfile.TemporaryDirectory(prefix="nearsight-explore-", ignore_cleanup_errors=True)
    os.environ["GRADIO_TEMP_DIR"] = folder.name
    page = build_page(subjects)
    page.queue(default_concurrency_limit=4, max_size=64)
    page.uploads = folder  # type: ignore[attr-defined]
    if wait:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        page.launch(
            server_name=host,
            server_port=port,
            share=False,
            inbrowser=browser,
            quiet=True,
            prevent_thread_lock=not wait,
            max_file_size=TRANSPORT,
            state_session_capacity=200,
            ssr_mode=False,
            footer_links=[],
            theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
            css_paths=Path(__file__).with_name("style.css"),
            app_kwargs={"middleware": [Middleware(NoOutsiders)]},
        )
    finally:
        if wait:
            folder.cleanup()
    return page


class NoOutsiders:
    """Adds the policy to every answer."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        await self.app(scope, receive, with_policy if scope["type"] == "http" else send)
