"""Writes the pages of the documentation that come from other files, while mkdocs builds the site.

A hook of `mkdocs.yml`. The reference of the command line comes from typer, that of the
configuration from pydantic, and the pages of notebooks from `examples/`. CONTRIBUTING and CHANGELOG
become pages. Links to other files of the repository lead to copies in the site. A public name that
the reference shows without a docstring is a warning, at which `mkdocs build --strict` fails.
"""

import base64
import functools
import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import griffe
import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

from solodg.cli import app
from solodg.runs.config import RunConfig
from solodg.runs.machine import Machine

ROOT = Path(__file__).parents[1]
DOCS, NOTEBOOKS = ROOT / "docs", ROOT / "examples"
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
COPIES = "repository"  # folder of the site for other files of the repository
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
log = logging.getLogger("mkdocs.docs_site")  # below mkdocs: its warnings count in --strict


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and files that lie outside of the folder of the docs."""
    for name, page in PAGES.items():
        text = with_links_of_site((ROOT / name).read_text(), name, page)
        files.append(File.generated(config, page, content=text))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for name, content in notebook_files(path):
            files.append(File.generated(config, f"howto/{name}", content=content))
    for path in sorted(DOCS.rglob("*.md")):
        for target in LINK.findall(path.read_text()):
            linked = (path.parent / target).resolve()
            if linked.is_file() and not linked.is_relative_to(DOCS):
                place = site_path(linked.relative_to(ROOT).as_posix())
                if files.get_file_from_path(place) is None:
                    files.append(File.generated(config, place, content=linked.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in what is generated, and turns links to the repository into links of the site."""
    place = page.file.src_uri
    for name in re.findall(r"^::: ([\w.]+)$", markdown, re.MULTILINE):
        for missing in undocumented(name):
            log.warning("%s: %s has no docstring", place, missing)
    for name, write in GENERATED.items():
        if f"<!-- {name} -->" in markdown:
            markdown = markdown.replace(f"<!-- {name} -->", write())
    if page.file.generated_by:
        return markdown
    return with_links_of_site(markdown, f"docs/{place}", place)


def site_path(name: str) -> str:
    """Returns where in the site a file of the repository is."""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if name == "README.md":
        return "index.md"
    if Path(name).parent == Path("examples") and name.endswith(".ipynb"):
        return f"howto/{Path(name).stem}.md"
    return PAGES.get(name, f"{COPIES}/{name}")


def with_links_of_site(text: str, source: str, place: str) -> str:
    """Returns a page with links as they are in the site.

    `source` is the path of the page in the repository, `place` its path in the site.
    """

    def moved(link: re.Match[str]) -> str:
        name = os.path.normpath(Path(source).parent / link[1])
        if not (ROOT / name).exists():
            return link[1]  # mkdocs says that it is broken
        return os.path.relpath(site_path(name), Path(place).parent)

    return LINK.sub(moved, text)


def notebook_files(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yields the page of a notebook, its pictures and the notebook itself, each with its name."""
    cells = json.loads(path.read_text())["cells"]
    parts: list[str] = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(parts)}.png"
                yield name, base64.b64decode(data["image/png"])
                parts.append(f"![Output of the code above]({name})")
            else:
                text = "".join(output.get("text") or data["text/plain"])
                parts.append(f"```text\n{text.rstrip()}\n```")
    title, _, rest = "\n\n".join(parts).partition("\n")
    note = f"This page is a notebook: [{path.name}]({path.name})."
    yield f"{path.stem}.md", f"{title}\n\n{note}\n{rest}\n"
    yield path.name, path.read_bytes()


def command_reference() -> str:
    """Returns the reference of the command line: a section for each command."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="solodg")
    return "\n".join(_command(command, context) for command in group.commands.values())


def _command(command: Any, parent: Any) -> str:
    context = typer.Context(command, info_name=command.name, parent=parent)
    usage = command.get_usage(context).removeprefix("Usage: ")
    records = [p.get_help_record(context) for p in command.params]
    rows = [f"| `{_cell(names)}` | {_cell(_markdown(text))} |" for names, text in records]
    table = "| argument or option | what |\n|---|---|\n" + "\n".join(rows)
    help_text = _markdown(inspect.cleandoc(command.help))
    parts = [f"## solodg {command.name}", help_text, f"```text\n{usage}\n```"]
    parts += [table] if rows else []
    parts += [_markdown(command.epilog)] if command.epilog else []
    return "\n\n".join(parts) + "\n"


def _markdown(text: str) -> str:
    """Returns help text of the command line as Markdown."""
    text = text.replace("*", r"\*").replace("<", "&lt;").replace("[required]", "")
    text = re.sub(r"\[dim\](.*?)\[/dim\]|\[(default: .*?)\]", lambda m: f"*{m[1] or m[2]}*", text)
    return re.sub(r"\[bold\](.*?)\[/bold\]", lambda m: "`" + m[1].replace(r"\*", "*") + "`", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def configuration_reference() -> str:
    """Returns the reference of the configuration of a run, and of the machine."""
    return "\n".join(_model_table(model) for model in (RunConfig, Machine))


def _model_table(model: type[BaseModel]) -> str:
    schema = model.model_json_schema()["properties"]
    rows = ["| field | values | option | what |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        text = _cell(_markdown(field.description or "Only in plans."))
        default = extra.get("shown_default")
        if default is None and isinstance(field.default, bool | int | float | str):
            default = f"`{field.default}`"
        text += "" if default is None else f" *Default:* {default}."
        flag = (
            f"`{extra.get('flag') or '--' + name.replace('_', '-')}`" if field.description else ""
        )
        rows.append(f"| `{name}` | {_cell(_values(schema[name]))} | {flag} | {text} |")
    doc = inspect.cleandoc(model.__doc__ or "")
    return f"## {model.__name__}\n\n{doc}\n\n" + "\n".join(rows) + "\n"


def _values(schema: Mapping[str, Any]) -> str:
    """Returns in words which values a JSON schema allows."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_values(s) for s in schema["anyOf"] if _values(s)))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("prefixItems") or [schema.get("items", {})]
        inner = " and ".join(_values(item) for item in items)
        return f"list of {inner}" if "items" in schema else inner
    words = {"string": "text", "boolean": "true or false", "integer": "whole number",
             "number": "number", "object": "map", "null": ""}  # fmt: skip
    text = words.get(str(kind), "any")
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return " ".join([text, ", ".join(limits)]).strip()


def undocumented(name: str, source: Path = ROOT / "src") -> list[str]:
    """Returns which of a public name and its public members have no docstring."""
    package, _, rest = name.partition(".")
    found = _package(package, source)[rest]
    members = found.all_members.values() if found.is_class else ()
    public = [m for m in members if not m.name.startswith("_") and (m.is_function or m.is_class)]
    return [each.path for each in (found, *public) if not each.has_docstring]


@functools.cache
def _package(name: str, source: Path) -> griffe.Module:
    """Reads a package without importing it."""
    found = griffe.load(name, search_paths=[str(source)])
    assert isinstance(found, griffe.Module)
    return found


GENERATED: dict[str, Callable[[], str]] = {
    "commands": command_reference,
    "configuration": configuration_reference,
}
