"""The tokenizer of a saved model, and prompts and texts in its tokens."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from arbcli.checkpoint import Checkpoint
from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.errors import ArbError
from arbcli.model.language_model import LanguageModel
from arbcli.tokens import FILE, Tokenizer

DIGEST = "tokenizer"
"""Name of its digest in the `data` of a checkpoint."""


def check_vocabulary(config: ModelConfig, tokenizer: Tokenizer | None, name: str) -> None:
    """Refuse a tokenizer that a model has no symbols for, and tokens without a tokenizer.

    Args:
        config: of the model.
        tokenizer: None is bytes.
        name: of its file, for the error.

    Raises:
        ArbError: they do not fit.
    """
    if tokenizer is None and config.vocabulary != VOCABULARY:
        raise ArbError(
            f"the model reads {config.vocabulary:,} tokens, and there is no tokenizer",
            hint="name the file that made them: `--tokenizer tokenizer.json`",
        )
    if tokenizer is not None and tokenizer.size > config.vocabulary:
        raise ArbError(
            f"`{name}` has tokens up to {tokenizer.size - 1:,}, and the model"
            f" {config.vocabulary:,} symbols",
            hint="use the model's own tokenizer, or a larger `vocabulary`",
        )


def saved_tokenizer(file: Path, checkpoint: Checkpoint, config: ModelConfig) -> Tokenizer | None:
    """Read the tokenizer that lies next to a checkpoint; None of a model of bytes.

    Args:
        file: of the checkpoint.
        checkpoint: which knows the digest of its tokenizer.
        config: of its model.

    Raises:
        ArbError: it is missing, or another.
    """
    digest = checkpoint.data.get(DIGEST)
    if digest is None and config.vocabulary == VOCABULARY:
        return None
    path = file.parent / FILE
    if not path.exists():
        raise ArbError(
            f"`{file}` holds a model of tokens, and its tokenizer `{path}` is missing",
            hint=f"put the run's own `{FILE}` next to it",
        )
    tokenizer = Tokenizer.read(path)
    check_digest(tokenizer, digest, path)
    check_vocabulary(config, tokenizer, str(path))
    return tokenizer


def check_digest(tokenizer: Tokenizer, digest: str | None, path: Path) -> None:
    """Refuse a tokenizer that is not the one a model was trained with; None is not known.

    Raises:
        ArbError: it is another.
    """
    if digest not in (None, tokenizer.digest):
        raise ArbError(
            f"`{path}` is not the tokenizer that the model was trained with",
            hint="put back the one of the run",
        )


def symbols_of(model: LanguageModel, text: bytes | list[int]) -> Sequence[int]:
    """Turn a prompt into what a model reads: the bytes, or tokens, and those that belong before.

    A list is of tokens already.

    Raises:
        ArbError: the model reads tokens and has no tokenizer.
    """
    if isinstance(text, list):
        return text
    if model.tokenizer is not None:
        return [*model.tokenizer.beginning, *model.tokenizer.encode(text)]
    check_vocabulary(model.config, None, "")
    return text


def bytes_of(
    model: LanguageModel, prompt: Sequence[int], parts: Iterable[Sequence[int]]
) -> Iterator[bytes]:
    """Turn what a model makes into bytes, a part after another.

    Args:
        model: which made it.
        prompt: symbols before.
        parts: of symbols.
    """
    if model.tokenizer is None:
        return map(bytes, parts)
    return model.tokenizer.decoded(prompt, parts)
