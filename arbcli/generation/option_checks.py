"""Checks of options against a model's configuration that do not import torch."""

from arbcli.base.errors import ArbError
from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.data.files import has_documents


def check_stride(config: ModelConfig, stride: int | None) -> int:
    """Return the stride of an evaluation, in symbols between the starts of two windows.

    Args:
        config: configuration of the model.
        stride: the requested stride; None is half the context, or all of it for a masked model,
            which reads each window from both sides.

    Raises:
        ArbError: the stride is not between 1 and the context.
    """
    context = config.ctx
    if stride is None:
        return max(1, context if config.is_masked else context // 2)
    if not 1 <= stride <= context:
        raise ArbError(
            f"`--stride` is {stride}, and a window has {context} bytes",
            f"use 1 to {context}: a smaller one gives each byte more context, and is slower",
        )
    return stride


def check_masked_option(config: ModelConfig, option: str, value: int | None) -> None:
    """Check that an option of masked models is only given for one.

    Args:
        config: configuration of the model.
        option: name of the option, such as `--draws`.
        value: its value; None if it was not given.

    Raises:
        ArbError: the model is not masked.
    """
    if value is not None and not config.is_masked:
        raise ArbError(
            f"`{option}` only applies to masked models, and this one reads from left to right",
            f"leave `{option}` out",
        )


def check_ahead(config: ModelConfig, ahead: int) -> None:
    """Check that speculative decoding is only asked of a model of bytes.

    Raises:
        ArbError: `ahead` is above 1 and the model has a tokenizer.
    """
    if ahead > 1 and config.vocabulary > VOCABULARY:
        raise ArbError(
            "`--ahead` only works with models of bytes, and this one has a tokenizer",
            "leave `--ahead` out",
        )


def check_fills(config: ModelConfig) -> None:
    """Check that a model fills holes.

    Raises:
        ArbError: it was trained to predict the next byte only.
    """
    if not config.fills:
        raise ArbError(
            "this model predicts the next byte and cannot fill holes",
            "train one with `arb train --objective fill`, or use `--prompt TEXT`",
        )


def check_document_options(field: str | None, stride: int | None) -> None:
    """Check that an option of plain texts is not given for documents.

    Raises:
        ArbError: it is.
    """
    if stride is not None and has_documents(field):
        raise ArbError(
            f"`--stride` does not apply to `--field {field}`, whose documents are read once",
            "leave `--stride` out",
        )
