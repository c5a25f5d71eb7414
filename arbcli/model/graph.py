"""`GraphLM`: n-grams, latent attention, codebooks, and experts that are iterated over a graph."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arbcli.config.dense import VOCABULARY
from arbcli.config.graph import GraphConfig
from arbcli.model.blocks.codebook import Codebook
from arbcli.model.blocks.latent_attention import LatentAttention, LatentBlockCache, LatentCache
from arbcli.model.blocks.memgram import ORDER, MemGram
from arbcli.model.blocks.mlp import MLP
from arbcli.model.blocks.moe_graph import Iterated, MoEGraph
from arbcli.model.blocks.router import Router
from arbcli.model.blocks.sequencer import HISTORY, TextSequencer
from arbcli.model.dense import takes_one_position
from arbcli.model.language_model import RECOMPUTE, LanguageModel
from arbcli.model.layers.embedding import TernaryEmbedding
from arbcli.model.layers.kinds import byte_head
from arbcli.model.layers.loss import cross_entropy
from arbcli.model.layers.norm import TernaryRMSNorm


class LatentBlock(nn.Module):
    """Latent attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GraphConfig) -> None:
        super().__init__()
        if config.attention:
            self.attention_norm = TernaryRMSNorm(config.dim, config)
            self.attention = LatentAttention(config)
        self.mlp_norm = TernaryRMSNorm(config.dim, config)
        self.mlp = MLP(config)
        self.attends = config.attention

    def forward(self, x: Tensor, past: LatentBlockCache | None = None) -> Tensor:
        """Add both branches to the stream (B, T, D)."""
        if self.attends:
            x = x + self.attention(x, self.attention_norm, past)
        return x + self.mlp(x, self.mlp_norm)

    def one_position(self, x: Tensor, past: LatentBlockCache) -> Tensor:
        """Do as `forward` does with one position after a past: see `takes_one_position`."""
        if self.attends:
            x = self.attention.one_position(x, past)
        return self.mlp.one_position(x)


class GraphLM(LanguageModel):
    """A language model over bytes, with every part of the system that `arb` re-creates.

    bytes -> embedding, n-grams -> half of the blocks -> codebooks -> iterated experts and graph ->
    the other blocks -> router -> byte head. A part that the configuration leaves out has no
    weights.

    Args:
        config: its shape and storage, and its parts.
        compute_dtype: of activations; bfloat16, or float32.
        recompute: whether a backward computes what is inside a block again.
    """

    config: GraphConfig

    def __init__(
        self,
        config: GraphConfig,
        compute_dtype: torch.dtype = torch.bfloat16,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.compute_dtype, self.recompute = config, compute_dtype, recompute
        self.embedding = TernaryEmbedding(VOCABULARY, config.dim, config, area="embedding")
        self.sequencer = TextSequencer(config) if config.sequencer else None
        self.memgram = MemGram(config) if config.memgram else None
        self.blocks = nn.ModuleList(LatentBlock(config) for _ in range(config.layers))
        books = {
            name: Codebook(*shape, config, area=name) for name, shape in config.codebooks.items()
        }
        self.codebook, self.knowledge = books.get("codebook"), books.get("knowledge")
        self.moe_graph = MoEGraph(config) if config.moe or config.graph else None
        self.router = Router(2 + len(config.codebooks), config) if config.router else None
        self.byte_norm = TernaryRMSNorm(config.dim, config)
        self.byte_mlp = MLP(config, config.head_ffn, area="head")
        self.norm = TernaryRMSNorm(config.dim, config)
        self.head = byte_head(config)

    def forward(self, ids: Tensor, cache: LatentCache | None = None) -> Tensor:
        """Compute (B, T, 256) logits, in `compute_dtype`, from (B, T) int64 bytes.

        With a cache B is 1: the bytes follow on those that it has seen, and are added to it.
        """
        if cache is None:
            return self._logits(ids, ids, None)[0]
        with cache.reading(ids) as text:
            return self._logits(ids, text, cache)[0]

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Average the cross-entropy, in nats a byte, over (B, T) int64 inputs and targets."""
        return self.losses(ids, targets)["text"]

    def losses(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute the parts of the loss: `text`, and `ponder`, see `Iterated.ponder_cost`."""
        logits, iterated = self._logits(ids, ids, None)
        losses = {"text": cross_entropy(logits.flatten(0, 1), targets.flatten())}
        return losses | {"ponder": iterated.ponder_cost()} if iterated else losses

    def new_cache(self, positions: int) -> LatentCache:
        """Make a cache for a text of at most `positions` bytes; no gradient passes through it."""
        history = max(HISTORY, ORDER - 1)
        about = (self.config, positions, history, self.compute_dtype, self.device)
        return LatentCache(*about, stored=self.stored)

    def _logits(
        self, ids: Tensor, text: Tensor, cache: LatentCache | None
    ) -> tuple[Tensor, Iterated | None]:
        """Compute logits of the bytes `ids`, the last ones of `text`, and what the experts gave."""
        length = ids.shape[1]
        x = self.embedding(ids, self.compute_dtype)
        if self.sequencer:
            x = x + self.sequencer(text, self.compute_dtype)[:, -length:]
        if self.memgram:
            x = x + self.memgram(text, length, self.compute_dtype)
        streams, half = [x], self.config.layers // 2
        x = self._through(self.blocks[:half], x, cache, 0)
        found = [book(x) for book in (self.codebook, self.knowledge) if book]
        streams += [each.y for each in found]
        for each in found:
            x = x + each.y
        iterated = None
        if self.moe_graph:
            first = found[0] if self.codebook else None
            iterated = self.moe_graph(x, self.codebook, first, text)
            x = iterated.x
        x = self._through(self.blocks[half:], x, cache, half)
        if self.router:
            x = self.router([x, *streams])
        if cache is not None and takes_one_position(self, x, self.config):
            x = self.byte_mlp.one_position(x)
            return self.head.fused(x, normalise=True), iterated
        x = x + self.byte_mlp(x, self.byte_norm)
        return self.head(x, self.norm), iterated

    def _through(
        self, blocks: nn.ModuleList, x: Tensor, cache: LatentCache | None, first: int
    ) -> Tensor:
        recompute = self.recompute and torch.is_grad_enabled()
        fits = cache is not None and not cache.in_eight_bits
        by_kernels = fits and takes_one_position(self, x, self.config)
        for index, block in enumerate(blocks, first):
            if by_kernels:
                x = block.one_position(x, cache.blocks[index])
            elif recompute:
                x = checkpoint(block, x, **RECOMPUTE)
            else:
                x = block(x, cache.blocks[index] if cache else None)
        return x

    def after_step(self) -> None:
        """Let the graph, the balance of the experts and the memory take in what a step has seen."""
        for part in self._integer_parts():
            part.after_step()

    def join(self, group: Any) -> None:
        """Bring together what each process has seen: see `LanguageModel.join`."""
        for part in self._integer_parts():
            part.join(group)

    def forget_uses(self) -> None:
        """Forget forwards whose backward never came, as after an error."""
        super().forget_uses()
        for part in self._integer_parts():
            part.forget()

    def _integer_parts(self) -> list[nn.Module]:
        found = [self.memgram]
        if self.moe_graph:
            found += [self.moe_graph.edges if self.config.graph else None]
            found += [self.moe_graph.experts.gate if self.config.moe else None]
        return [part for part in found if part]

    def gauges(self) -> dict[str, float]:
        """Measure codebooks, experts and graph; waits for the device.

        Returns:
            alive_codes, alive_knowledge: share of rows that any step has changed.
            fullest_expert: slots of the expert with most of them, over the mean.
            edges: share of the graph's places that are taken.
        """
        found = {}
        for name, book in (("alive_codes", self.codebook), ("alive_knowledge", self.knowledge)):
            if book:
                found[name] = book.table.weight.alive()
        if self.config.moe:
            found["fullest_expert"] = self.moe_graph.experts.gate.fullest()
        if self.config.graph:
            found["edges"] = float((self.moe_graph.edges.score > 0).float().mean())
        return found
