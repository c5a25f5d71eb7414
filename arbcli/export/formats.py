"""Names of the forms that a model is written in; no torch, as a command line asks for them."""

FORMATS = {
    "gguf": "one file for llama.cpp and what is built on it",
    "hf": "a folder for Transformers",
    "safetensors": "the packed weights alone, for arb",
}
"""Purpose of each."""
TYPES = ("f32", "bf16", "f16", "q8_0", "q4_0", "q2_0")
"""Types of weights; hf has f32 and bf16 of them."""
