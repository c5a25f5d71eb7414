"""Documents that a saved model is evaluated on."""

from pathlib import Path

from arbcli.base.run_files import TOKENIZER
from arbcli.data.chats import Chats, open_documents
from arbcli.data.text import Text
from arbcli.model.language_model import LanguageModel

SHORTEST_WINDOW = 1024
"""Minimum number of positions of a window, unless the context is shorter."""


def documents_for(model: LanguageModel, checkpoint: Path, text: Text, field: str) -> Chats:
    """Tokenise documents as the model reads them, in windows that the longest one fills.

    Args:
        model: the model.
        checkpoint: path of its checkpoint, next to which are its tokenizer and template.
        text: records.
        field: see `Chats`.

    Raises:
        ArbError: the model has no tokenizer or no template, or a record is invalid.
    """
    path, context = checkpoint.with_name(TOKENIZER), model.config.ctx
    documents = open_documents(text, field, model.tokenizer, path, context)
    shorter = max(documents.longest, SHORTEST_WINDOW)
    if shorter >= context:
        return documents
    return open_documents(text, field, model.tokenizer, path, shorter)
