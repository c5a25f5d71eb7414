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
HEAD = """# Settings

This page lists every setting of a model and of a run. For example, `arb train --ctx 512`, or in a
file for `--config`:

```toml
[model]
ctx = 512
```

Each row is a field of a configuration. Its option belongs to `arb train`, and to the other commands
that use the field. Its name in a file is at the top level or below `[model]`. Options override the
file, and `arb train --print-config` prints all settings of a run as such a file.

- `--preset`, `--model` and `--attention` choose a whole model or a kind of block:
  [commands.md](commands.md#arb-train).
- `--set FIELD=VALUE` sets any of them, and any field of a part: `--set lr=0.5`,
  `--set attention.window=64`. `--help` lists the common options, `--help-all` all of them.
- A file may also name a field by its option, with `_` for `-`. `config.json` and `--print-config`
  have the fields `digits` and `direction` for the values of `--weights` and `--optimizer`.

`python tests/settings_page.py` writes this page from the declarations of the fields.
"""


def page() -> str:
    """Write the page."""
    return HEAD + "".join(f"\n## {group}\n\n{_table(group)}" for group in GROUPS if _table(group))


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
