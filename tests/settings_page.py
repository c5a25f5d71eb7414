"""The table of settings in the documents, from the declarations of the fields.

`python tests/settings_page.py` writes `docs/settings.md`; `commands/test_options.py` compares.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import get_args

from arbcli.config.settings import GROUPS, Declared
from arbcli.config.short_forms import MODEL_SETTINGS
from arbcli.config.training import RUN_SETTINGS

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"


def page() -> str:
    """Write the page: its first section stays as it is."""
    head, _, _ = PAGE.read_text(encoding="utf-8").partition("\n## ")
    return head + "".join(f"\n## {group}\n\n{_table(group)}" for group in GROUPS if _table(group))


def _table(group: str) -> str:
    rows = [*_rows(group, MODEL_SETTINGS, "`[model]` "), *_rows(group, RUN_SETTINGS, "")]
    head = "| option | in a file | values | default | |\n|---|---|---|---|---|\n"
    return head + "".join(rows) if rows else ""


def _rows(group: str, settings: dict[str, Declared], where: str) -> Iterator[str]:
    for name, one in settings.items():
        if one.setting.group == group:
            options = ", ".join(f"`{option}`" for option in one.option.split("/"))
            default = one.default or ("no" if one.value is False else "")
            called = one.option[2:].replace("-", "_") if one.setting.words else name
            cells = (options, f"{where}`{called}`", _values(one), default, one.setting.help)
            yield f"| {' | '.join(cells)} |\n"


def _values(one: Declared) -> str:
    setting = one.setting
    if setting.words:
        return ", ".join(f"`{word}`" for word in setting.words)
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    kinds = get_args(one.kind) if isinstance(one.kind, UnionType) else (one.kind,)
    if bool in kinds:
        return "yes or no"
    if int in kinds or float in kinds:
        kind = "integer" if int in kinds else "number"
        return kind if setting.minimum is None else f"{kind}, {setting.minimum} or more"
    return re.sub(r"\|", ", ", setting.metavar or "text").lower()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
