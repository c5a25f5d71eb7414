"""Source files of kernels, of the core and of families."""

from pathlib import Path


def kernel_files() -> list[Path]:
    """List the source files of the core's kernels, then those of the families' kernels."""
    package = Path(__file__).parents[1]
    core, families = (package / "kernels").rglob("*.py"), package.glob("families/*/kernels/*.py")
    return [*sorted(core), *sorted(families)]


def module_of(path: Path) -> str:
    """Return the name of the module in a source file of the package."""
    return ".".join(path.relative_to(Path(__file__).parents[2]).with_suffix("").parts)
