"""The tokenizer of `tokenizer.json` as it is, for Transformers, which rebuilds that of a Qwen 2.

`arb export --to hf` copies this file next to the weights of such a model. Transformers only runs it
with `trust_remote_code=True`, and otherwise takes the same class, as its settings name that.
"""

from transformers import PreTrainedTokenizerFast


class ArbTokenizer(PreTrainedTokenizerFast):
    """A tokenizer without additions."""
