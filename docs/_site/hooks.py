"""What mkdocs does beside the pages: links that leave docs/ become plain names of files."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!docs/)([^)\s]*)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Write links to files that the site does not hold as their names."""

    def name(match: re.Match[str]) -> str:
        depth = page.file.src_uri.count("/") + 1
        climbs = match[0].count("../")
        if climbs < depth:
            return match[0]
        text, path = match[1], match[2].rstrip("/")
        return text if path.split("/")[-1] in text else f"{text} (`{path}`)"

    return _OUTSIDE.sub(name, markdown)
