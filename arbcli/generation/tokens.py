"""The tokenizer of a saved model, and conversion between texts and symbols."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arbcli.base.errors import ArbError
from arbcli.base.run_files import TOKENIZER
from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.model.checkpoint import TOKENIZER_DIGEST

if TYPE_CHECKING:
    from arbcli.data.tokens import Tokenizer
    from arbcli.model.checkpoint import Checkpoint
    from arbcli.model.language_model import LanguageModel


def check_vocabulary(config: ModelConfig, tokenizer: "Tokenizer | None", name: str) -> None:
    """Check that a model's vocabulary matches its tokenizer.

    Args:
        config: configuration of the model.
        tokenizer: the tokenizer; None for bytes.
        name: path of the tokenizer, for the error.

    Raises:
        ArbError: the tokenizer is missing, or has more tokens than the vocabulary.
    """
    if tokenizer is None and config.vocabulary != VOCABULARY:
        raise ArbError(
            f"the model reads {config.vocabulary:,} tokens, and there is no tokenizer",
            "name the tokenizer that encoded them: `--tokenizer tokenizer.json`",
        )
    if tokenizer is not None and tokenizer.size > config.vocabulary:
        raise ArbError(
            f"`{name}` has tokens up to {tokenizer.size - 1:,}, and the model's vocabulary has"
            f" {config.vocabulary:,}",
            "use the model's own tokenizer, or a larger `vocabulary`",
        )


def saved_tokenizer(
    file: Path, checkpoint: "Checkpoint", config: ModelConfig
) -> "Tokenizer | None":
    """Read the tokenizer next to a checkpoint; None for a model of bytes.

    Args:
        file: path of the checkpoint.
        checkpoint: the checkpoint, which has the digest of its tokenizer.
        config: configuration of its model.

    Raises:
        ArbError: the tokenizer is missing, or has another digest.
    """
    digest = checkpoint.data.get(TOKENIZER_DIGEST)
    if digest is None and config.vocabulary == VOCABULARY:
        return None
    path = file.parent / TOKENIZER
    if not path.exists():
        raise ArbError(
            f"the model of `{file}` needs its tokenizer, and there is no `{path}`",
            f"copy the run's `{TOKENIZER}` to this folder",
        )
    from arbcli.data.special_tokens import stop_tokens  # models of bytes have none
    from arbcli.data.tokens import Tokenizer

    tokenizer = Tokenizer.read(path)
    check_digest(tokenizer, digest, path)
    check_vocabulary(config, tokenizer, str(path))
    tokenizer.ends = frozenset(stop_tokens(tokenizer, path))
    return tokenizer


def stop_symbols(model: "LanguageModel") -> frozenset[int]:
    """Return the tokens that end a text of a model; none for a model of bytes."""
    return frozenset() if model.tokenizer is None else model.tokenizer.ends


def check_digest(tokenizer: "Tokenizer", digest: str | None, path: Path) -> None:
    """Check that a tokenizer is the one of training, by its digest; None if that is unknown.

    Raises:
        ArbError: the digests differ.
    """
    if digest not in (None, tokenizer.digest):
        raise ArbError(
            f"`{path}` is not the tokenizer that the model was trained with",
            "restore the tokenizer of the run",
        )


def encode_prompt(model: "LanguageModel", text: bytes | list[int]) -> Sequence[int]:
    """Encode a prompt to the model's symbols, with the special tokens at the beginning.

    A list is already encoded.

    Raises:
        ArbError: the tokenizer is missing.
    """
    if isinstance(text, list):
        return text
    if model.tokenizer is not None:
        return [*model.tokenizer.beginning, *model.tokenizer.encode(text)]
    check_vocabulary(model.config, None, "")
    return text


def decode_symbols(
    model: "LanguageModel", prompt: Sequence[int], parts: Iterable[Sequence[int]]
) -> Iterator[bytes]:
    """Decode generated symbols to bytes, piece by piece.

    Args:
        model: the model, which has the tokenizer.
        prompt: symbols before the generated ones.
        parts: pieces of generated symbols.
    """
    if model.tokenizer is None:
        return map(bytes, parts)
    return model.tokenizer.decoded(prompt, parts)
