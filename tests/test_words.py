"""No prose of the project uses a word that the glossary retires."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WHERE = ("arbcli", "benchmarks", "examples", "tests", "docs", "README.md", "CONTRIBUTING.md")
COMPARED = "better closer earlier faster further larger later less longer lower more narrower other"
COMPARED += " slower smaller wider worse"


def retired(of_names: bool = False) -> str:
    """Read the table at the end of the glossary: a pattern of all its words.

    Args:
        of_names: leave out the words that names in code keep.
    """
    glossary = (ROOT / "docs/glossary.md").read_text("utf-8")
    rows = glossary.partition("## Retired words")[2].partition("|---|")[2].splitlines()
    words = {
        word
        for row in rows
        if row[:2] == "| " and not (of_names and "names in code keep" in row)
        for word in row.split(" | ")[0][2:].split(", ")
    }
    assert len(words) > 10
    # "is no larger than" compares, and "there is no" counts
    no = rf"(?<!here ){{}}(?! (?:{COMPARED.replace(' ', '|')})\b)"
    return "|".join(no.format(word) if word.endswith(" no") else word for word in sorted(words))


def prose_of(path: Path) -> str:
    """Find comments, docstrings and messages of code, and text of documents outside of code."""
    text = path.read_text("utf-8")
    if path.suffix == ".c":
        text = "\n".join(re.findall(r"/\*[\s\S]*?\*/", text))
    elif path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        kinds = {"COMMENT", "STRING", "FSTRING_MIDDLE"}
        found = (part.string for part in tokens if tokenize.tok_name[part.type] in kinds)
        # before Python 3.12 an f-string is one token, with its expressions
        parts = (re.sub(r"\{[^{}\n]*\}", "", part) if part[0] in "fF" else part for part in found)
        text = "\n".join(part for part in parts if re.search(r"\s", part))
    else:
        text = re.sub(r"(?ms)^ *```.*?^ *```", "", text)
    return re.sub(r"`[^`\n]*`|--[\w-]+|\{[\w.]+\}", "", text)


def files() -> list[Path]:
    kinds = {".py", ".md", ".c"}
    found = [path for name in WHERE for path in ((ROOT / name).rglob("*"), [ROOT / name])]
    listed = (path for paths in found for path in paths if path.suffix in kinds and path.is_file())
    return sorted({*listed} - {ROOT / "docs/glossary.md"})


@pytest.mark.parametrize("pattern", [retired()], ids=["words"])
def test_no_prose_has_a_word_that_is_retired(pattern):
    found, words = [], re.compile(rf"(?i)\b(?:{pattern})\b.{{0,30}}")
    for path in files():
        if words.search(path.read_text("utf-8")):  # perhaps in code, and few files have any
            name = path.relative_to(ROOT)
            found += [f"{name}: {word[0]}" for word in words.finditer(prose_of(path))]
    assert len(files()) > 500
    assert found == []


STORED = {"beside", "BESIDE"}
"""Names that files store: a part next to the embedding."""


def test_no_name_has_a_word_that_is_retired():
    found, words = set(), re.compile(rf"(?i)(?<![a-z])(?:{retired(of_names=True)})(?![a-z])")
    for path in files():
        text = path.read_text("utf-8")
        if path.suffix == ".py" and words.search(text.replace("_", " ")):
            for part in tokenize.generate_tokens(io.StringIO(text).readline):
                name = part.string if part.type == tokenize.NAME else ""
                if words.search(name.replace("_", " ")) and name not in STORED:
                    found.add(f"{path.relative_to(ROOT)}: {name}")
    assert not found
