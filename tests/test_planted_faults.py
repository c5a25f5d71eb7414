"""Faults planted on purpose, one at a time, in kernels, updates, model and checkpoints: all caught.

A fault is one replaced expression in the source of a module. The faulty module is executed, and
what it defines takes the place of the real things wherever they were imported.
"""

import importlib.util
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from arbcli import checkpoint
from arbcli.errors import ArbError
from arbcli.kernels.runtime.spec import KernelSpec
from arbcli.verify import kernels as verify
from arbcli.verify import parity
from arbcli.verify.parity import RAGGED, RAGGED_GRAPH, Subject

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compiled kernels refuse globals that change"
)
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
RENAMED = {"update": "updater", "lm": "dense", "ternary": "packed"}


def home(where: str, what: str) -> Path:
    """Find the file of a module that was there once, by its source."""
    stem = where.rpartition(".")[2]
    paths = [*ROOT.glob(f"arbcli/**/{RENAMED.get(stem, stem)}.py")]
    if stem == "layers":
        paths = [*ROOT.glob("arbcli/model/layers/*.py")]
    (path,) = (path for path in paths if path.read_text().count(what) == 1)
    return path


@dataclass(frozen=True)
class Fault:
    name: str
    where: str
    """Module, without `arbcli.`."""
    what: str
    """Part of its source, which occurs once."""
    instead: str
    caught_by: str
    """A kernel, which `arb verify-kernels` finds wrong, or the name of a check below.

    A kernel is checked with T6, in which groups straddle everything, unless T32 is named.
    """


def kernel(name, what, instead, caught_by, where=None):
    return Fault(name, f"kernels.{where or caught_by}", what, instead, caught_by)


FAULTS = [
    # products in eight bits
    kernel("ties rounded up", "+ ((bits >> 20) & 1)) >> 20", "+ 1) >> 20", "quantise_rows"),
    kernel(
        "scale of a row off", "scale = ((field - 7) << 23)", "scale = ((field - 6) << 23)",
        "quantise_rows",
    ),
    kernel(
        "odd digits of e4m3 negated, not even ones",
        "0x40404040 if digit % 2 else", "0x40404040 if digit % 2 == 0 else", "decode_e4m3",
    ),
    kernel("e4m3 without signs", "& nonzero) ^ trits", "& nonzero)", "decode_e4m3"),
    kernel(
        "e4m3 an octave off",
        "inverse = ((127 - octave) << 23)", "inverse = ((126 - octave) << 23)", "decode_e4m3",
    ),
    kernel("scale of w left out", "* (scale * weight_scale)", "* scale", "fp8_matmul"),
    kernel(
        "gate without its sigmoid", "y = y * sigmoid(y) *", "y = y *", "gated_rms_norm_e4m3",
        "norm_e4m3",
    ),
    # packing
    kernel(
        "planes of a short block as wide as a full one",
        "k = block * 160 + width * digit + j", "k = block * 160 + 32 * digit + j",
        "unpack_trits", "packing",
    ),
    kernel(
        "even digits taken with both bits flipped",
        "(left ^ 0x40000000)", "(left ^ 0xC0000000)", "gradient_statistics T32", "packing",
    ),
    kernel(
        "even digits of pairs taken with both bits flipped",
        "0x40004000 if digit % 2 == 0", "-0x3FFF4000 if digit % 2 == 0", "decode_weight T32",
        "warp_products",
    ),
    kernel(
        "prefixes rounded down", "byte // 3**digit - ONES", "(byte - 1) // 3**digit - ONES",
        "arranged_matmul", "warp_products",
    ),
    kernel(
        "what prefixes are more not taken back from the first digit",
        "(9, -6, 6, -6, -3)", "(9, -6, 6, -6, 0)", "arranged_matmul",
    ),
    kernel(
        "words of a row taken twice", "low = shift_pair(loaded[3 * i], loaded",
        "low = shift_pair(loaded[3 * i + 1], loaded", "decode_weight T32", "decode_weight",
    ),
    kernel(
        "column stride ignored", "k[None, :] * stride_tk,", "k[None, :],", "pack_trits", "packing",
    ),
    kernel(
        "last byte of a row not stored",
        "byte.to(tl.uint8), mask=mask_n & (offs_b < row_bytes)",
        "byte.to(tl.uint8), mask=mask_n & (offs_b < row_bytes - 1)",
        "pack_trits", "packing",
    ),
    kernel(
        "fifth digit read as the fourth",
        "2**32 // 3 ** (digit + 1) + 1", "2**32 // 3 ** (min(digit, 3) + 1) + 1",
        "gradient_statistics", "packing",
    ),
    # scales
    kernel(
        "octave off by one", "(exponent.to(tl.int32) - 1) << 23",
        "(exponent.to(tl.int32) - 2) << 23", "decode_weight",
    ),
    kernel(
        "scale truncated to bf16, not rounded",
        "(tl.exp2(power).to(tl.int32, bitcast=True) + 0x8000) & -0x10000",
        "tl.exp2(power).to(tl.int32, bitcast=True) & -0x10000", "decode_weight",
    ),
    kernel(
        "fraction read with the strides of the exponent",
        "offs_n * stride_fn + offs_g * stride_fg", "offs_n * stride_en + offs_g * stride_eg",
        "decode_weight",
    ),
    kernel(
        "short group given its neighbour's scale (torch backend)",
        "*= scale[:, whole]", "*= scale[:, whole - 1]", "decode_weight",
    ),
    # products
    kernel(
        "last plane of bytes left out", "range(0, row_bytes, 32)", "range(0, row_bytes - 1, 32)",
        "ternary_matmul",
    ),
    kernel(
        "stride of x ignored", "k[None, :] * stride_xk", "k[None, :]", "ternary_matmul",
    ),
    kernel(
        "group size taken to be 32", "k[:, None] // GROUP", "k[:, None] // 32", "ternary_matmul",
    ),
    kernel(
        "rows begin on a whole word", "skews = skews + (8 * skew,)", "skews = skews + (0 * skew,)",
        "ternary_matmul T32", "few_rows",
    ),
    kernel(
        "scale of the neighbouring thread's block", "scales[5 * i + digit], lane, PTX",
        "scales[5 * i + digit], lane ^ 1, PTX", "ternary_matmul T32", "few_rows",
    ),
    kernel(
        "digits 0, 2 and 4 added, not subtracted", "scale *= -2 if digit % 2 == 0 else 2",
        "scale *= 2", "ternary_matmul T32", "few_rows",
    ),
    kernel(
        "last block's weights beyond its first plane read as the first",
        "byte = tl.where(later, k - digit * width, byte)",
        "byte = tl.where(later, k - width, byte)", "ternary_matmul T32", "few_rows",
    ),
    kernel(
        "second round reads the blocks of the first", "xs += 320 * STEP", "xs += 0 * STEP",
        "ternary_matmul T32", "few_rows",
    ),
    kernel(
        "upper eight of sixteen rows stored twice", "row = n + 8 * (i // 2)", "row = n",
        "ternary_matmul T32", "few_rows",
    ),
    kernel(
        "four blocks abreast, of which one thread's are summed",
        "tl.broadcast_to(tl.sum(y, axis=1)[:, None], y.shape)", "y", "ternary_matmul T32",
        "few_rows",
    ),
    # experts
    kernel(
        "rows of an expert begin where the block before them does",
        "begin + (block - before) * BLOCK_M", "block * BLOCK_M", "grouped_matmul",
    ),
    kernel(
        "rows of the next expert overwritten", "(offs_m < last) & (offs_n < N)",
        "(offs_m < S) & (offs_n < N)", "grouped_matmul",
    ),
    kernel(
        "rows behind all experts not zeroed", "is_group = offs_e < E + 2",
        "is_group = offs_e < E + 1", "grouped_matmul",
    ),
    kernel(
        "rows of the next expert summed", "whole + tl.arange(0, BLOCK_R) < last",
        "whole + tl.arange(0, BLOCK_R) < S", "grouped_grad_w", "grouped_matmul",
    ),
    kernel(
        "last rows of an expert not summed", "if whole < last:", "if whole < 0:",
        "grouped_grad_w", "grouped_matmul",
    ),
    kernel(
        "gate of the slot before", "gates_ptr + offs_m * stride_gm + j * stride_gj",
        "gates_ptr + offs_m * stride_gm + (j // 2) * stride_gj", "expert_combine",
    ),
    kernel(
        "gradient of a slot without its gate", "(gate[:, None] * grad_y)",
        "(gate[:, None] * 0 + grad_y)", "expert_combine_backward", "expert_combine",
    ),
    kernel(
        "gradient of a gate from the first columns alone", "products += grad_y *",
        "products = grad_y *", "expert_combine_backward", "expert_combine",
    ),
    # norm
    kernel(
        "eps forgotten", "r = tl.rsqrt(squares / D + eps)[:, None]",
        "r = tl.rsqrt(squares / D)[:, None]", "rms_norm",
    ),
    kernel(
        "added rows not added", "x += load_rows(added_ptr,", "load_rows(added_ptr,",
        "add_rms_norm", "rms_norm",
    ),
    kernel(
        "eps of a row held whole forgotten",
        "tl.sum(x * x, axis=1) / D + eps)[:, None]\n        store_rows",
        "tl.sum(x * x, axis=1) / D)[:, None]\n        store_rows", "rms_norm",
    ),
    kernel(
        "gradient of the root-mean-square forgotten",
        "(grad_xhat - xhat * mean), offs_m, offs_d, mask, D)\n        store_rows",
        "(grad_xhat), offs_m, offs_d, mask, D)\n        store_rows",
        "rms_norm_backward", "rms_norm",
    ),
    kernel(
        "sigmoid in place of silu",
        "y = gate * sigmoid(gate) * load_rows(up_ptr, offs_m, offs_d, mask, stride_xm)\n   "
        "         if", "y = sigmoid(gate) * load_rows(up_ptr, offs_m, offs_d, mask, stride_xm)\n"
        "            if",
        "gated_rms_norm",
    ),
    kernel(
        "squares of a row held whole taken before the gate",
        "y *= tl.rsqrt(tl.sum(y * y, axis=1)", "y *= tl.rsqrt(tl.sum(up * up, axis=1)",
        "gated_rms_norm",
    ),
    kernel(
        "gradient of up given to the gate", "grad * up * slope", "grad * gate * slope",
        "gated_rms_norm_backward", "gated_rms_norm",
    ),
    kernel(
        "the norm's weights left out", "y *= r * load_weight(weight_ptr, offs_d, D)", "y *= r",
        "gated_rms_norm",
    ),
    # generation
    kernel(
        "blocks abreast multiplied by each other's x", "mine == theirs if", "mine == 3 - theirs if",
        "arranged_matmul",
    ),
    kernel(
        "up gated by itself", "upper / (1 + tl.exp(-upper))", "lower / (1 + tl.exp(-lower))",
        "arranged_matmul",
    ),
    kernel(
        "all tiles given to the first warp", "tl.where(warp == i, t", "tl.where(warp == 0, t",
        "arranged_matmul",
    ),
    kernel(
        "new key not seen", "offs_d < WIDTH, offs_s == slot", "offs_d < WIDTH, offs_s < 0",
        "decode_attention",
    ),
    kernel(
        "stale slots attended to", "tl.where(offs_s < seen, tl", "tl.where(offs_s < W, tl",
        "decode_attention",
    ),
    kernel(
        "only the first parts added up", "range(0, splits, BLOCK_P)", "range(0, BLOCK_P, BLOCK_P)",
        "decode_attention",
    ),
    kernel(
        "oldest slot kept", "slot, seen = position % W", "slot, seen = (position + 1) % W",
        "decode_attention",
    ),
    kernel(
        "tickets not given back", "tl.store(tickets_ptr + head, 0)",
        "tl.store(tickets_ptr + head, 1)", "decode_attention",
    ),
    kernel(
        "the last of equals kept", "(rival < symbol[:, None])", "(rival > symbol[:, None])",
        "choose_byte",
    ),
    kernel(
        "share of all, not of the kept", "tl.sum(tl.where(kept, tl.exp(score), 0))",
        "tl.sum(tl.exp(score))", "choose_byte",
    ),
    kernel(
        "noise without its second logarithm", "score - tl.log(-tl.log(uniform))",
        "score - tl.log(uniform)", "choose_byte",
    ),
    # loss
    kernel(
        "the row's last class left out", "(offs_v < V)[None, :], stride_m, stride_v)\n    target ="
        " tl.load(targets_ptr + offs_m * stride_t, mask=inside, other=0)\n    of_target",
        "(offs_v < V - 1)[None, :], stride_m, stride_v)\n    target ="
        " tl.load(targets_ptr + offs_m * stride_t, mask=inside, other=0)\n    of_target",
        "cross_entropy",
    ),
    kernel(
        "gradient of the target forgotten", "/ total[:, None] - here)", "/ total[:, None])",
        "cross_entropy_backward", "cross_entropy",
    ),
    # rotary
    kernel(
        "every head turned like its position's neighbour", "(token % T) * HALF",
        "((token + 1) % T) * HALF", "rotary_norm",
    ),
    kernel(
        "turned on instead of back", "grad_first * cos + grad_second * sin",
        "grad_first * cos - grad_second * sin", "rotary_norm_backward", "rotary_norm",
    ),
    # embedding
    kernel(
        "stride of the ids ignored", "ids_ptr + offs_m * stride_im", "ids_ptr + offs_m",
        "embedding_rows", "ternary_embedding",
    ),
    kernel(
        "last token of every id dropped", "mask_m = offs_m < last", "mask_m = offs_m < last - 1",
        "embedding_grad", "ternary_embedding",
    ),
    # rows of large tables
    kernel(
        "only the last slot kept", "total += (weight * scale)", "total = (weight * scale)",
        "weighted_rows",
    ),
    kernel(
        "weights of slots without a row counted",
        "tl.load(weights_ptrs, mask=inside", "tl.load(weights_ptrs, mask=mask_j", "weighted_rows",
    ),
    kernel(
        "chunks take the next group's columns", "(within < GROUP) & (k < D)", "k < D",
        "weighted_rows_grad_weights", "weighted_rows",
    ),
    kernel(
        "only the first columns multiplied", "parts[0] if len(parts) == 1 else parts.sum(dim=0)",
        "parts[0]", "weighted_rows_grad_weights", "weighted_rows",
    ),
    kernel(
        "last slot of a row with many dropped", "place, place < end,", "place, place < end - 1,",
        "weighted_rows_grad", "weighted_rows",
    ),
    kernel(
        "rows with just enough slots for neither sum", "few = last - first <= MOST",
        "few = last - first < MOST", "weighted_rows_grad", "weighted_rows",
    ),
    kernel(
        "column stride of the table ignored", "offs_b.to(tl.int64) * stride_bb",
        "offs_b.to(tl.int64)", "gather_rows", "table_rows",
    ),
    kernel(
        "column stride of the values ignored", "columns * stride_vb", "columns",
        "scatter_rows", "table_rows",
    ),
    # statistics
    kernel(
        "mean over one too many", "tl.sum(total, axis=0) / count",
        "tl.sum(total, axis=0) / (count + 1)", "gradient_gains",
    ),
    kernel(
        "statistics forget ten times faster", "0.99 * _decode(whole, fraction) + 0.01 * value",
        "0.9 * _decode(whole, fraction) + 0.1 * value", "gradient_gains",
    ),
    # symmetric products
    kernel(
        "tile stored below the diagonal only", "y_desc.store([matrix, n, m], y.T",
        "y_desc.store([matrix, m, n], y", "gram", "newton_schulz",
    ),
    kernel(
        "tile above the diagonal not transposed", "[matrix, n, m], y.T", "[matrix, n, m], y",
        "gram", "newton_schulz",
    ),
    kernel(
        "odd triangles folded like even ones", "r - T % 2)", "r)", "gram", "newton_schulz",
    ),
    kernel(
        "sums of other programs left out", 'acc += tl.load(part_ptrs, cache_modifier=".cg")',
        "acc += 0.0", "gram", "newton_schulz",
    ),
    kernel(
        "identity added to every tile",
        "tl.where(rows == columns, alpha, 0.0)", "tl.where(rows % 32 == columns % 32, alpha, 0.0)",
        "gram_polynomial", "newton_schulz",
    ),
    kernel(
        "addend always of the first of a stack", "addend_ptr + matrix.to(tl.int64) * stride_matrix",
        "addend_ptr", "gram_polynomial", "newton_schulz",
    ),
    kernel(
        "next group's weights counted where a tile is wider than a group",
        "(k < K) & (lane % LANES < GROUP)", "(k < K)", "gradient_statistics",
    ),
    kernel(
        "last rows of a tile not summed",
        "BLOCK_N + tl.arange(0, BLOCK_N)\n        mask_n = n < N\n        mask = ",
        "BLOCK_N + tl.arange(0, BLOCK_N) // 2\n        mask_n = n < N\n        mask = ",
        "gradient_statistics",
    ),
    kernel(
        "columns of a plane stored in place of another", "columns_ptrs + 32 * digit + tl",
        "columns_ptrs + 32 * (digit // 2) + tl", "gradient_statistics T32", "gradient_statistics",
    ),
    kernel(
        "infinite gradients accepted", "ok = (total >= SMALLEST) & (total <= LARGEST)\n    tile",
        "ok = total >= SMALLEST\n    tile", "gradient_gains",
    ),
    kernel(
        "gain of the columns forgotten in the root-mean-square",
        "mask_n, HAS_ROWS) * column_gain", "mask_n, HAS_ROWS)", "unit_gain",
    ),
    # direction
    kernel(
        "direction truncated, not rounded",
        "return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000",
        "return x.to(tl.int32)", "blend_moment", "direction",
    ),
    kernel(
        "direction does not saturate", "tl.minimum(tl.maximum(u, -LIMIT), LIMIT)", "u",
        "step_by_direction", "direction",
    ),
    # steps
    kernel(
        "scales wrap around", "tl.minimum(tl.maximum(v - (step >> 16), LOWEST), HIGHEST)",
        "v - (step >> 16)", "step_scales",
    ),
    kernel(
        "random bits of the transposed element", "random_words(tl.load(key_ptr), n, g)",
        "random_words(tl.load(key_ptr), g, n)", "step_scales",
    ),
    kernel(
        "one constant of the random bits mistyped",
        "    x *= 0x7FEB352D\n", "    x *= 0x7FEB352F\n", "blend_moment", "random_bits",
    ),
    kernel(
        "nibble read a bit too low", "old = state >> 4 if NIBBLE", "old = state >> 3 if NIBBLE",
        "blend_moment",
    ),
    kernel(
        "a refused gradient steps all the same", "if tl.load(ok_ptr) == 0:",
        "if tl.load(ok_ptr) == 2:", "blend_moment",
    ),
    kernel(
        "two rows rounded by the same bits", "(words >> (16 * half)) & 0xFFFF", "words & 0xFFFF",
        "blend_moment",
    ),
    kernel(
        "trit flips one unit early", "((z - RADIX - RADIX // 2 - 1) >> 31)",
        "((z - RADIX - RADIX // 2) >> 31)", "step_by_moment", "step_trits",
    ),
    kernel(
        "remainder thrown away when a trit flips", "low = z - new * RADIX\n",
        "low = tl.where(new == old, z - new * RADIX, 0)\n", "step_by_direction", "step_trits",
    ),
    kernel(
        "step uphill", "<< 16) - step + random", "<< 16) + step + random", "step_by_moment",
        "step_trits",
    ),
    kernel(
        "moment not brought to unit size", "tl.div_rn(step_size, tl.sqrt_rn(mean_square))",
        "tl.div_rn(step_size, mean_square)", "step_by_moment", "step_trits",
    ),
    kernel(
        "trits of odd rows lost", "tl.store(odd_bytes, odd_byte", "tl.store(even_bytes, odd_byte",
        "step_by_direction", "step_trits",
    ),
    kernel(
        "votes need one more", "tl.abs(total) >= THRESHOLD", "tl.abs(total) > THRESHOLD",
        "cast_trit_votes", "cast_votes",
    ),
    kernel(
        "scales never fall", "(total <= -THRESHOLD)", "(total < -127)", "cast_scale_votes",
        "cast_votes",
    ),
    # update
    Fault(
        "moment decays with every micro-batch", "model.update", "if first else UNIT",
        "if True else UNIT", "update moment sign",
    ),
    Fault(
        "steps clipped too late", "model.update", "STEP_CLIP = 4", "STEP_CLIP = 40",
        "update moment factored",
    ),
    Fault(
        "three Newton-Schulz steps", "model.update", "NEWTON_SCHULZ_STEPS = 5",
        "NEWTON_SCHULZ_STEPS = 3", "update moment orthogonal",
    ),
    Fault(
        "scales step whole for every micro-batch", "model.update",
        "lr * SCALE_STEP / accumulation", "lr * SCALE_STEP", "update moment sign",
    ),
    Fault(
        "NaN gradients accepted", "kernels.gradient_gains",
        "usable = SMALLEST <= total <= LARGEST", "usable = True", "update nibble sign",
    ),
    Fault(
        "scales step uphill", "model.update", "slope = (statistics.slope, gains.slope)",
        "slope = (-statistics.slope, gains.slope)", "update moment sign",
    ),
    Fault(
        "gain of the columns forgotten", "model.update",
        "(gains.rows, gains.columns)", "(gains.rows, gains.columns[:0])", "update carry factored",
    ),
    # model
    Fault(
        "attention sees later bytes", "model.lm", "is_causal=True", "is_causal=False",
        "model: causality",
    ),
    Fault(
        "rotary table in bf16", "model.layers", "return angle.cos(), angle.sin()",
        "return angle.cos().bfloat16().float(), angle.sin().bfloat16().float()", "rotary",
    ),
    kernel(
        "half the pairs turned backwards", "((first * sin + second * cos) * r",
        "((second * cos - first * sin) * r", "rotary_norm",
    ),
    Fault(
        "attention's norm before the MLP", "model.lm", "self.mlp(x, self.mlp_norm)",
        "self.mlp(x, self.attention_norm)", "model: output",
    ),
    Fault(
        "queries and keys exchanged", "model.lm", "q, k, v = self", "k, q, v = self",
        "model: output",
    ),
    Fault(
        "residual dropped", "model.lm", "x = x + self.attention(", "x = self.attention(",
        "model: output",
    ),
    Fault(
        "loss summed, not averaged", "model.layers", "(logits, targets).mean()",
        "(logits, targets).sum()", "model: end to end",
    ),
    Fault(
        "gradient averaged over rows", "model.layers", "return grad_y.T @ source",
        "return grad_y.T @ source / len(source)", "model: gradient",
    ),
    Fault(
        "grad_x from the exponents alone", "model.layers",
        "grad_x(grad_y, *self.packed)",
        "grad_x(grad_y, self.trits, self.exponent, None, *self.packed[3:])",
        "model: gradient",
    ),
    # the graph model
    Fault(
        "weights of experts forgotten", "model.experts",
        "expert_combine(values, routing.positions, gates)",
        "expert_combine(values, routing.positions, None)", "graph: end to end",
    ),
    Fault(
        "balance weighs", "model.experts", "torch.softmax(scores.gather(1, chosen), dim=1)",
        "torch.softmax((scores + self.balance * BALANCE_UNIT).gather(1, chosen), dim=1)",
        "graph: end to end",
    ),
    Fault(
        "gradient of one slot only", "model.experts", "expert_combine(grad, ctx.positions, None)",
        "expert_combine(grad, ctx.positions[:, :1], None)", "graph: whole gradient",
    ),
    Fault(
        "experts forget the earlier uses", "model.experts", "grads = grouped_grad_w(grad_y, x,",
        "grads = grouped_grad_w(grad_y, sources[0][0].repeat(len(sources), 1),",
        "graph: whole gradient",
    ),
    Fault(
        "edges without a sign", "model.edges", "self.sign[bucket].float() * score",
        "self.sign[bucket].abs().float() * score", "graph: end to end",
    ),
    Fault(
        "edges of other codes", "model.edges",
        "(self.source[bucket] == codes[:, None]) & (score > 0)\n        weights",
        "score > 0\n        weights", "graph: end to end",
    ),
    Fault(
        "code stays where it is", "model.moe_graph", "torch.where(on >= 0, on, codes)", "codes",
        "graph: end to end",
    ),
    Fault(
        "confidence without a gradient", "model.moe_graph",
        "found.confidence - found.confidence.detach()", "0 * found.confidence",
        "graph: whole gradient",
    ),
    Fault(
        "ponder cost summed", "model.moe_graph", ".sum(dim=0).mean()", ".sum(dim=0).sum()",
        "graph: end to end",
    ),
    Fault(
        "pairs with the halves exchanged", "model.codebook", "return best, i * right.shape[1] + j",
        "return best, j * left.shape[1] + i", "graph: end to end",
    ),
    Fault(
        "table's gradient to the next row", "model.table", "self.sink(self, grad, touched)",
        "self.sink(self, grad, touched._replace(rows=touched.rows - 1))",
        "graph: whole gradient",
    ),
    Fault(
        "strength of a memory linear", "model.memgram", "strength.sqrt().to(dtype)",
        "strength.to(dtype)", "graph: end to end",
    ),
    Fault(
        "n-grams of the next byte", "model.sequencer", "functional.pad(ids, (back, 0), value=-1)",
        "functional.pad(ids.roll(-1, 1), (back, 0), value=-1)", "graph: causality",
    ),
    Fault(
        "latent attention sees later bytes", "model.latent_attention", "is_causal=mask is None",
        "is_causal=False", "graph: causality",
    ),
    # checkpoint
    Fault(
        "altered tensors accepted", "checkpoint", '== metadata["digests"][name], f"`{name}` was',
        '!= "", f"`{name}` was', "checkpoint",
    ),
    Fault(
        "altered metadata accepted", "checkpoint", "_require(_seal(metadata) == metadata,",
        "_require(True,", "checkpoint",
    ),
    Fault(
        "newer format accepted", "checkpoint", "type(version) is int and version > FORMAT", "False",
        "checkpoint",
    ),
    Fault(
        "illegal trits saved", "checkpoint", "or illegal_bytes(tensor) == 0", "or True",
        "checkpoint",
    ),
    Fault(
        "bytes after the end accepted", "checkpoint", "_require(size == expected,",
        "_require(True,", "checkpoint",
    ),
]  # fmt: skip


def plant(monkeypatch, folder: Path, where: str, what: str, instead: str) -> None:
    """Execute a module with one expression replaced, and put its things in place of the real."""
    real = home(where, what)
    module = import_module(".".join(real.relative_to(ROOT).with_suffix("").parts))
    source = real.read_text()
    path = folder / f"{where}.py"  # triton reads the source of a kernel again
    path.write_text(source.replace(what, instead))
    spec = importlib.util.spec_from_file_location(module.__name__, path)
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    places = [m for name, m in sys.modules.items() if name.split(".")[0] == "arbcli"]
    for name, real in vars(module).items():
        own = getattr(getattr(real, "fn", real), "__module__", None) == module.__name__
        if own or isinstance(real, KernelSpec):
            for place in places:
                if vars(place).get(name) is real:
                    monkeypatch.setattr(place, name, getattr(faulty, name))
    faulty_specs = {s.name: s for s in vars(faulty).values() if isinstance(s, KernelSpec)}
    kernels = tuple(faulty_specs.get(spec.name, spec) for spec in verify.KERNELS)
    monkeypatch.setattr(verify, "KERNELS", kernels)


def failures(check: str, folder: Path) -> list:
    """Make one check, and list what it finds wrong."""
    kind, _, rest = check.partition(" ")
    if kind == "checkpoint":
        return checkpoint_failures(folder)
    if kind == "rotary":
        results = parity._rotary(CPU)
    elif kind == "model:":
        model = Subject("ragged", RAGGED, 2, torch.float32, CPU, "torch")
        results = [r for r in parity._check("", "", model) if r.check == rest]
    elif kind == "graph:":
        model = Subject("graph", RAGGED_GRAPH, 2, torch.float32, CPU, "torch")
        results = [r for r in parity._check("", "", model) if r.check == rest]
    elif kind == "update":
        rule, direction = rest.split()
        config = replace(RAGGED, rule=rule, direction=direction)
        subject = Subject(rest, config, 1, torch.float32, CPU, "torch", "update")
        results = parity._check("", "", subject)
    else:
        return kernel_failures(kind, {rest: int(rest[1:])} if rest else {"T6": 6})
    return [result for result in results if not result.passed]


class Found(Exception):
    """The first case that a kernel fails."""


def kernel_failures(name: str, scales: dict[str, int]) -> list:
    """Verify a kernel as far as its first failure."""
    run_case = verify._run_case

    def until_one_fails(*arguments):
        results = run_case(*arguments)
        if wrong := [result for result in results if not result.passed]:
            raise Found(wrong)
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "_run_case", until_one_fails)
        try:
            verify.verify_kernels([name], scales, CPU, ["interpreter", "torch"])
        except Found as found:
            return found.args[0]
    return []


def checkpoint_failures(folder: Path) -> list[str]:
    """Save, damage and load: list what a checkpoint ought to have refused."""
    folder = folder / "run"
    folder.mkdir(exist_ok=True)
    tensors = {"a.trits": torch.arange(24, dtype=torch.uint8), "b": torch.ones(9, dtype=torch.int8)}
    state = checkpoint.Checkpoint(7, {"dim": 4}, {"refused": 0}, {"position": 7}, tensors)
    whole = checkpoint.save_checkpoint(folder, state).read_bytes()
    damaged = {
        "last byte": whole[:-1] + b"\x02",
        "truncated": whole[:-1],
        "longer": whole + b"\x00",
        "counter": whole.replace(rb"\"refused\":0", rb"\"refused\":1"),
        "format": whole.replace(rb"\"format\":1", rb"\"format\":2"),
    }
    found = []
    for name, content in damaged.items():
        assert content != whole
        path = folder / "step-000008.safetensors"
        path.write_bytes(content)
        try:
            checkpoint.load_checkpoint(path)
            found.append(f"{name} accepted")
        except ArbError as error:
            if name == "format" and "newer" not in str(error):
                found.append("the newer format is not named")
    path.unlink()
    illegal = tensors | {"a.trits": torch.full((3,), 243, dtype=torch.uint8)}
    try:
        checkpoint.save_checkpoint(folder, replace(state, step=9, tensors=illegal))
        found.append("illegal trits saved")
    except ValueError:
        pass
    return found


OF_KERNELS = {spec.name for spec in verify.KERNELS}
"""What kernels without a fault give is in tests/kernels/test_every_kernel.py."""
CHECKS = sorted({fault.caught_by for fault in FAULTS})


@pytest.mark.parametrize("check", [c for c in CHECKS if c.split()[0] not in OF_KERNELS])
def test_nothing_is_found_without_a_fault(check, tmp_path):
    assert not failures(check, tmp_path)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_planted_fault_is_caught(fault, monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, fault.where, fault.what, fault.instead)
    assert failures(fault.caught_by, tmp_path)


def test_there_are_faults_in_every_part():
    assert len(FAULTS) >= 25
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    parts = {fault.where.split(".")[0] for fault in FAULTS}
    assert parts == {"kernels", "model", "checkpoint"}
