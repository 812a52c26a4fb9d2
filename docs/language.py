"""Checks what a program can see of the language of code and pages: ``python docs/language.py``.

It prints descriptions of arguments that do not begin with a noun phrase, attributes that a class describes and does not
have, and words that have a plainer one; exit code 1 if there are any.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ["dlo_framework", "plugins/dlo_plugins", "tasks/dlo_tasks", "plugins/example_pack", "benchmarks"]

#: First words that no description of an argument or attribute begins with: it begins with a noun phrase.
NOT_A_NOUN = re.compile(
    r"(about|after|along|among|amid|and|are|as|at|before|beside|between|but|by|called|for|from|had|has|have|how|if|in|into"
    r"|is|its?|kept|likewise|of|on|or|over|per|see|so|taken|than|that|through|till|to|together|under|until|what|when"
    r"|where|which|while|who|whom|whose|with|within|without)\b",
    re.IGNORECASE,
)

#: Words and turns that have a plainer one, with it.
PLAINER = {
    r"\banew\b": "again",
    r"\bamid\b": "in, during",
    r"\blikewise\b": "also, or say it",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bstand-ins?\b": "placeholder",
    r"\bwitness(es|ed)?\b": "placeholder, reference",
    r"\bhands? on\b": "passes, returns",
    r"\bhanded on\b": "passed, returned",
    r"\bwhat is held\b": "the shard, the local tensors",
    r"\bwhat passes\b": "the traffic, the messages",
    r"\bpart of it\b": "shard, slice",
    r"\bso many\b": "that many, or the number",
    r", say[.,:;)]": "for example",
    r"\bas it is\b": "unchanged",
    r"\b(is|are) no (?!longer\b|more\b|less\b|fewer\b|op\b)[a-z]+": "is not a, has no",
    r"\b(a|any|each|every|no) \w+ of (DeepSpeed|Lightning|torch|transformers|timm|Megatron)'s\b": "a DeepSpeed ...",
    r"\bbut was\b": "got",
    r"\b(it|one|which|that|they|this|what|where|there) (stands|lies)\b": "is",
}

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note|References|Source):\s*$")


def described(docstring: str) -> Iterator[tuple[str, str, str]]:
    """Yields the section, name and description of a docstring's arguments and attributes (Google style)."""
    lines = docstring.expandtabs().splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    section, indent = "", None
    for line in lines[1:]:
        text = line[margin:]
        if text and not text[0].isspace():
            match = SECTION.match(text)
            section, indent = match[1] if match else "", None
            continue
        if section not in ("Args", "Attributes") or not text.strip():
            continue
        depth = len(text) - len(text.lstrip())
        indent = depth if indent is None else indent
        if depth == indent:
            name, colon, description = text.strip().partition(":")
            if colon:
                yield section, name, description.strip()


def wrong_arguments(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each description of an argument that does not begin with a noun phrase."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for _, name, description in described(ast.get_docstring(node, clean=False) or ""):
            if NOT_A_NOUN.match(description) or description[:1].islower():
                yield getattr(node, "lineno", 1), f"{name}: {description}"


def members(node: ast.ClassDef) -> set[str]:
    """Returns the names of a class's fields, properties and methods, and of the attributes that it sets."""
    own: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            own.add(each.id)
        elif isinstance(each, ast.FunctionDef):
            own.add(each.name)
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
            own.add(each.attr)
    return own


def missing_attributes(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each attribute that a class describes and does not have."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for section, name, _ in described(ast.get_docstring(node, clean=False) or ""):
                if section == "Attributes" and name not in members(node):
                    yield node.lineno, f"{node.name}.{name}"


def prose(path: Path) -> str:
    """Returns a file's text without code blocks and names in backticks (Markdown), line by line as it was."""
    text = path.read_text()
    if path.suffix == ".md":
        text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.S)
    return re.sub(r"`[^`\n]*`", "``", text)


def plainer_words(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line of each word that has a plainer one, with both."""
    for number, line in enumerate(prose(path).splitlines(), 1):
        for pattern, better in PLAINER.items():
            match = re.search(pattern, line, flags=re.I)
            if match:
                yield number, f"{match[0]!r}: {better}"


def code() -> list[Path]:
    """Returns the files of code."""
    return sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))


def pages() -> list[Path]:
    """Returns the English pages, README and CONTRIBUTING."""
    english = [path for path in sorted((ROOT / "docs").rglob("*.md")) if not path.name.endswith(".fr.md")]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *english]


def findings() -> Iterator[str]:
    """Yields each finding with its file and line."""
    for path in code():
        for line, text in (*wrong_arguments(path.read_text()), *missing_attributes(path.read_text())):
            yield f"{path.relative_to(ROOT)}:{line}: {text}"
    for path in (*code(), *pages()):
        for line, text in plainer_words(path):
            yield f"{path.relative_to(ROOT)}:{line}: {text}"


if __name__ == "__main__":
    found = list(findings())
    print("\n".join(found))
    sys.exit(bool(found))
