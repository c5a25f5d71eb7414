"""Modules of the parts of a model, which are built from their configurations."""

from typing import Any

from arbcli.base.lazy import imported
from arbcli.config.parts.base import PartConfig
from arbcli.config.site import Site


def build_part(config: PartConfig, site: Site, *arguments: Any) -> Any:
    """Build a part with uninitialised weights; the class is imported on first use.

    Args:
        config: configuration of the part, whose class names that of the module.
        site: site of the part; a rule of the configuration replaces that of the site.
        arguments: further arguments of the module's class.
    """
    return imported(config.module)(config, config.own_site(site), *arguments)
