"""Check options against the configuration of a model, without importing torch."""

from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.errors import ArbError


def check_stride(config: ModelConfig, stride: int | None) -> int:
    """Choose the symbols from one window of an evaluation to the next.

    Args:
        config: of the model.
        stride: as it was asked for; None is half a window, or all of it if the model is masked, as
            no symbol of a window has more before it than another.

    Raises:
        ArbError: it is not within a window.
    """
    context = config.ctx
    if stride is None:
        return max(1, context if config.is_masked else context // 2)
    if not 1 <= stride <= context:
        raise ArbError(
            f"`--stride` is {stride}, and a window has {context} bytes",
            hint=f"use 1 to {context}: the smaller, the more context a byte has, and the slower",
        )
    return stride


def check_of_masked(config: ModelConfig, option: str, value: int | None) -> None:
    """Refuse an option of masked models, such as draws of hidden symbols, where none are hidden.

    Args:
        config: of the model.
        option: as it is written.
        value: that was given; None is none.

    Raises:
        ArbError: the model is not masked.
    """
    if value is not None and not config.is_masked:
        raise ArbError(
            f"`{option}` only works with a masked model, and this one reads from left to right",
            hint=f"leave `{option}` out",
        )


def check_ahead(config: ModelConfig, ahead: int) -> None:
    """Refuse to check several tokens at once.

    Raises:
        ArbError: more than one byte of a step is asked for, and the model makes tokens.
    """
    if ahead > 1 and config.vocabulary > VOCABULARY:
        raise ArbError(
            "several bytes are only checked of a model of bytes, and this one makes tokens",
            hint="leave `--ahead` out",
        )


def check_fills(config: ModelConfig) -> None:
    """Refuse holes that a model fills none of.

    Raises:
        ArbError: the model was trained for none.
    """
    if not config.fills:
        raise ArbError(
            "the model predicts the next byte, and cannot fill holes",
            hint="train one: `arb train --objective fill`; or continue a prompt: `--prompt TEXT`",
        )
