"""Texts of tokens, and of documents, for a run."""

import dataclasses

from arbcli.base.errors import ArbError
from arbcli.config.training import TrainConfig
from arbcli.data.chats import open_documents
from arbcli.data.files import has_documents
from arbcli.data.text import Texts
from arbcli.data.tokens import Tokenizer, tokenised
from arbcli.generation.tokens import check_vocabulary


def token_texts(texts: Texts, config: TrainConfig) -> Texts:
    """Tokenise the texts of a configuration.

    Raises:
        ArbError: the tokenizer cannot be read, is missing or does not fit, or a text is too short.
    """
    tokenizer = None if config.tokenizer is None else Tokenizer.read(config.tokenizer)
    check_vocabulary(config.model, tokenizer, str(config.tokenizer))
    if has_documents(config.field):
        return _document_texts(texts, tokenizer, config)
    assert tokenizer is not None, "a text of bytes has no tokens"
    return _tokenised_texts(texts, tokenizer, config.model.ctx)


def _tokenised_texts(texts: Texts, tokenizer: Tokenizer, context: int) -> Texts:
    train, val = (tokenised(text, tokenizer) for text in (texts.train, texts.val))
    for text, role in ((train, "training"), (val, "validation")):
        if not text.windows(context + 1):
            raise ArbError(
                f"a context of {context:,} needs a {role} text of {context + 1:,} tokens or more,"
                f" and this one has {len(text):,}",
                "use a smaller `--ctx`, or more text for `--data` and `--val`",
            )
    return dataclasses.replace(texts, train=train, val=val, tokenizer=tokenizer)


def _document_texts(texts: Texts, tokenizer: Tokenizer | None, config: TrainConfig) -> Texts:
    assert config.field is not None, "a run of documents has a field"
    config.model.check_documents()
    path, context = str(config.tokenizer), config.model.ctx
    train, val = (
        open_documents(text, config.field, tokenizer, path, context)
        for text in (texts.train, texts.val)
    )
    return dataclasses.replace(texts, train=train, val=val, tokenizer=tokenizer)
