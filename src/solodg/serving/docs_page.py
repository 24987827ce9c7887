"""The description of the API as an HTML page that loads nothing from the network."""

from html import escape
from typing import Any

_HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: API</title>
<link rel="stylesheet" href="page.css">
<main>
<h1>{title}</h1>
<p>{summary} Schema: <a href="openapi.json">openapi.json</a>. Web page:
<a href="./">upload images</a>.</p>
"""


def docs_page(schema: dict[str, Any]) -> str:
    """Returns the page of an OpenAPI schema: each route with its body types and statuses."""
    info = schema["info"]
    parts = [_HEAD.format(title=escape(info["title"]), summary=escape(info.get("summary", "")))]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(path, method, operation))
    return "".join([*parts, "</main>\n</html>\n"])


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    lines = [f"<h2><code>{method.upper()} {escape(path)}</code></h2>",
             f"<p>{escape(operation.get('summary', ''))}. "
             f"{escape(operation.get('description', ''))}</p>"]  # fmt: skip
    kinds = operation.get("requestBody", {}).get("content", {})
    if kinds:
        lines.append(f"<p>Body: {', '.join(f'<code>{escape(kind)}</code>' for kind in kinds)}.</p>")
    lines.append("<table><tr><th>status</th><th>when</th></tr>")
    for status, response in operation["responses"].items():
        lines.append(f"<tr><td>{status}</td><td>{escape(response['description'])}</td></tr>")
    return "\n".join([*lines, "</table>\n"])
