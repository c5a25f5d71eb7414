"""llama.cpp in this process: what it makes of a file of ours."""

from pathlib import Path
from typing import Any

import torch
import xllamacpp
from torch import Tensor


class Llama:
    """A model that llama.cpp has loaded, computing in float32 wherever the file lets it."""

    def __init__(self, path: Path, positions: int) -> None:
        about = xllamacpp.CommonParams()
        about.model.path = str(path)
        about.n_ctx, about.n_parallel, about.warmup = positions, 1, False
        about.fit_params = False
        about.cache_type_k = about.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        flash = xllamacpp.llama_flash_attn_type
        about.flash_attn_type = flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
        about.cpuparams.n_threads, about.verbosity = 1, -1
        self._server = xllamacpp.Server(about)

    def log_probabilities(self, text: bytes) -> Tensor:
        """Compute those of all bytes that may follow a text, (256,) float64."""
        # the byte that is chosen does not matter, but one that is not UTF-8 would be held back
        choices = self._complete(text, 1, n_probs=256, logit_bias=[[ord("a"), 1e4]])
        log_probs = {entry["id"]: entry["logprob"] for entry in choices[0]["top_logprobs"]}
        return torch.tensor([log_probs[byte] for byte in range(256)], dtype=torch.float64)

    def greedy(self, prompt: bytes, length: int) -> bytes:
        """Continue a prompt by the likeliest bytes."""
        return bytes(token["id"] for token in self._complete(prompt, length, n_probs=1))

    def scores(self, prompt: str | list[int]) -> Tensor:
        """Compute the log-probabilities of all tokens after a text or ids, (V,) float64."""
        choices = self._complete(prompt, 1, n_probs=2**17, logit_bias=[[ord("a"), 1e4]])
        log_probs = {entry["id"]: entry["logprob"] for entry in choices[0]["top_logprobs"]}
        return torch.tensor(
            [log_probs[index] for index in range(len(log_probs))], dtype=torch.float64
        )

    def _complete(self, prompt: bytes | str | list[int], length: int, **options: Any) -> list[dict]:
        how = {"max_tokens": length, "temperature": 0, "cache_prompt": False, **options}
        prompt_or_tokens = prompt if isinstance(prompt, str) else list(prompt)
        answer = self._server.handle_completions({"prompt": prompt_or_tokens, **how})
        return answer["choices"][0]["logprobs"]["content"]
