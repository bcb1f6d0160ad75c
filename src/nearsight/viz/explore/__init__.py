"""The explorer: click a pixel, see what it attends to. `page` needs the extra `explore`; the rest knows nothing of pages."""
