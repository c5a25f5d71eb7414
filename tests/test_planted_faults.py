"""Every class of mistake, planted once on purpose in kernels, updates and models: caught.

The author of a check of `arb verify-kernels` wants to know that it would notice, also after it is
made cheaper. `FAULTS` has one of each class, one for every kernel that its cases notice, and one
for every check of a model. `planting` says how.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
from apparatus.planting import (
    Change,
    Fault,
    edit,
    functions_of_kernel,
    functions_of_package,
    launched,
    method,
    rewrite,
    set_constant,
)
from apparatus.sampling import sample

from arbcli.config.layer_spec import SCALE_TYPES
from arbcli.families.streams.hyper_connection import HyperConnection
from arbcli.kernels.runtime._triton import HAS_TRITON
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.stack import Block
from arbcli.verify import models, parity
from arbcli.verify.check_kernels import copies, find_kernels, peers_of
from arbcli.verify.compare import as_tuple, compare, poisoned
from arbcli.verify.models import RAGGED
from arbcli.verify.registry import KERNELS
from arbcli.verify.subjects import Subject, several_rules

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels refuse globals that change"
    ),
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
]
CPU = torch.device("cpu")
ATTENTION = "functional.scaled_dot_product_attention"


def kernel(
    kind: str, name: str, of: str, change: Change, *,
    scale: str = "", place=functions_of_kernel,
) -> Fault:  # fmt: skip
    """Plant a fault in what a kernel's spec reaches, which its cases must notice.

    With the scales that test_every_kernel.py finds nothing with: T6, in which groups straddle
    everything, T32 for norms; or with those that are named.
    """
    return Fault(kind, name, edit(place(of), change), f"{of} {scale}".strip())


torch_backend = partial(functions_of_kernel, backend="torch")


def module(kind: str, name: str, room: str, change: Change, caught_by: str) -> Fault:
    """Plant a fault in a room of `arbcli`."""
    return Fault(kind, name, edit(functions_of_package(room), change), caught_by)


FAULTS = [
    # products in eight bits
    kernel("rounding", "ties rounded up", "quantise_rows", rewrite("(a >> 20) & 1", "1")),
    kernel("layout", "planes of e4m3 as wide as those of a full block", "decode_e4m3",
        rewrite("b * 160 + w * d + j", "b * 160 + 32 * d + j")),
    kernel("missing term", "scale of w left out", "fp8_matmul", rewrite("a * (b * c)", "a * b")),
    # products in four bits, emulated
    kernel("saturation", "scales of four-bit numbers beyond the largest of e4m3", "round_nvfp4",
        rewrite("((264 - f) << 23).to(tl.float32, bitcast=True)",
        "((266 - f) << 23).to(tl.float32, bitcast=True)")),
    kernel("tie", "ties of four-bit numbers away from zero", "round_nvfp4",
        rewrite("a > 2.5 * s", "a >= 2.5 * s")),
    # packing and scales
    kernel("layout", "planes of a short block as wide as a full one", "unpack_trits",
        rewrite("b * 160 + w * d + j", "b * 160 + 32 * d + j")),
    kernel("layout", "even digits taken with both bits flipped", "gradient_statistics",
        rewrite("a ^ 0x40000000", "a ^ 0xC0000000"), scale="T32"),
    kernel("sign", "four bits of remainder read as unsigned", "decode_digits",
        rewrite("(a << 28) >> 28", "a & 15")),
    kernel("octave", "all digits in e4m3 an octave too large", "decode_e4m3",
        rewrite("tl.load(a).to(tl.int32) - b", "tl.load(a).to(tl.int32) - 7")),
    kernel("layout", "both rows of a thread by the first one's scale", "int8_matmul",
        rewrite("a >> (16 * b)", "a >> (0 * b)")),
    kernel("tie", "of codes at one distance the last taken", "nearest_codes",
        rewrite("tl.where(m > b, f + a, p)", "tl.where(m >= b, f + a, p)")),
    kernel("missing term", "rows of zeros counted like others", "unit_rows",
        rewrite("tl.rsqrt(s * h)", "tl.rsqrt(s)")),
    kernel("stride", "column stride ignored", "pack_trits",
        rewrite("a * stride_tk", "a"), place=launched),
    kernel("cut short", "last byte of a row not stored", "pack_trits",
        rewrite("tl.store(p, v, mask=m & (o < n)[None, :])",
        "tl.store(p, v, mask=m & (o < n - 1)[None, :])"), place=launched),
    kernel("octave", "octave of every scale off by one", "decode_weight",
        rewrite("(e - 1) << 23", "(e - 2) << 23")),
    kernel("group", "short group given its neighbour's scale by torch", "ternary_matmul_grad_x",
        rewrite("w *= s[:, g]", "w *= s[:, g - 1]"), place=torch_backend),
    kernel("group", "weights multiplied by the scale of the group before", "ternary_matmul",
        rewrite("w *= s[:, g]", "w *= s[:, g - 1]"), place=torch_backend),
    kernel("alignment", "rows begin on a whole word", "decode_weight",
        rewrite("ptx.shift_pair(a, b, 8 * s, p)", "ptx.shift_pair(a, b, 0 * s, p)"), scale="T32"),
    # products
    # experts
    kernel("neighbour", "rows of an expert begin where the block before them does",
        "grouped_matmul", rewrite("a + (b - c) * BLOCK_M", "b * BLOCK_M")),
    kernel("too far", "rows of the next expert summed", "grouped_grad_w",
        rewrite("a + tl.arange(0, BLOCK_R) < l", "a + tl.arange(0, BLOCK_R) < S")),
    kernel("neighbour", "gate of the slot before", "expert_combine",
        rewrite("g + m * stride_gm + j * stride_gj", "g + m * stride_gm + (j // 2) * stride_gj")),
    kernel("partial sum", "gradient of a gate from the last columns alone",
        "expert_combine_backward", rewrite("a += g * tl.load(v, ...).to(tl.float32)",
        "a = g * tl.load(v, ...).to(tl.float32)")),
    # streams
    kernel("cut short", "one round less", "stream_weights",
        rewrite("_several_rounds(_begin(z), r)", "_several_rounds(_begin(z), r - 1)")),
    kernel("correction", "what rows and columns lack not filled up", "stream_weights",
        rewrite("p + e[:, :, None] * (f / s[:, None])[:, None, :]", "p")),
    kernel("gradient", "sums of columns taken to be constant", "stream_weights_backward",
        rewrite("(g - tl.sum(g * p / c, axis=1)[:, None, :]) / c", "g / c")),
    kernel("missing term", "gains of streams left out", "mix_streams",
        rewrite("tl.load(c)[:, None] * f[None, :]", "f[None, :]")),
    kernel("partial sum", "gradients of mixing of the last stream and columns alone",
        "mix_streams_backward", rewrite("a += tl.where(q, 1.0, 0.0)[None, :] * x[:, None]",
        "a = tl.where(q, 1.0, 0.0)[None, :] * x[:, None]")),
    # norms
    kernel("missing term", "eps forgotten", "rms_norm", rewrite("a + eps", "a")),
    kernel("missing term", "added rows not added", "add_rms_norm",
        rewrite("x += load_rows(a, ...)", "x += 0 * load_rows(a, ...)")),
    kernel("gradient", "gradient of the root-mean-square forgotten", "rms_norm_backward",
        rewrite("r * (g - x * m)", "r * g")),
    kernel("missing term", "gains of a norm left out", "rms_norm",
        rewrite("x * r * w", "x * r"), place=launched),
    kernel("partial sum", "gradient of gains of the last tile alone", "gained_rms_norm_backward",
        rewrite("s += g * x", "s = g * x"), place=launched),
    kernel("neighbour", "programs of a merged launch take another matrix's arguments",
        "merged_steps", rewrite("t + tl.program_id(1) * WIDTH", "t + 0 * WIDTH")),
    kernel("neighbour", "a merged launch gives all parts of its second kind the first one's",
        "decode_weights", rewrite("(p - q) * SECOND_WIDTH", "0 * SECOND_WIDTH"), scale="T32"),
    kernel("wrong function", "sigmoid in place of silu", "gated_rms_norm",
        rewrite("g * sigmoid(g) * u", "sigmoid(g) * u")),
    kernel("exchange", "gradient of up given to the gate", "gated_rms_norm_backward",
        rewrite("store_rows(p, g * u * s, ...)", "store_rows(p, g * g * s, ...)")),
    kernel("layout", "exponents of packed gates in the half of up", "pack_gates",
        rewrite("(c >> 7) | ((u >> 3) & 240)", "(u >> 7) | ((c >> 3) & 240)")),
    kernel("sign", "packed gates without their signs", "packed_gates_backward",
        rewrite("(s << 16) | ((l & 128) << 24)", "s << 16")),
    # generation
    kernel("correction", "what codes are more than trits not taken back", "row_matmul",
        rewrite("((a[0] << 8) + (a[1] - b[i])).to(tl.float32)",
        "((a[0] << 8) + a[1]).to(tl.float32)")),
    kernel("neighbour", "rows of a text exchanged in pairs", "row_matmul",
        rewrite("tl.minimum(r // 2, ROWS - 1)", "tl.minimum(r // 2 ^ 1, ROWS - 1)")),
    kernel("missing term", "bytes before one that may be taken back not seen", "attend_ahead",
        rewrite("(s >= f) & (s < e)", "(s >= f) & (s < f)")),
    kernel("position", "parts of the first of several bytes averaged for all", "attend_ahead",
        rewrite("tl.cdiv(tl.load(position_ptr) + row + 1, span)",
        "tl.cdiv(tl.load(position_ptr) + 1, span)")),
    kernel("too far", "one byte more kept than was accepted", "keep_accepted",
        rewrite("r < tl.load(accepted_ptr)", "r <= tl.load(accepted_ptr)")),
    kernel("position", "bytes of a check chosen by the numbers of the first", "choose_byte",
        rewrite("tl.load(position_ptr) + r", "tl.load(position_ptr)")),
    kernel("too far", "a byte accepted after one that was not proposed", "accept_ahead",
        rewrite("tl.where(c == p, 8, r + 1)", "tl.where(c == p, 8, r + 2)")),
    kernel("neighbour", "the farthest of the places that a text repeats", "repeat_ahead",
        rewrite("a * SPAN - b", "a * SPAN + b")),
    kernel("left over", "a repetition that goes on after another byte", "choose_byte",
        rewrite("tl.store(p, NONE, mask=c != f)", "tl.store(p, NONE, mask=c != c)")),
    kernel("diagonal", "squares of the neighbouring row", "prepacked_rows",
        rewrite("write_where(t, s, c == r // 2, p)", "write_where(t, s, c == (r // 2 ^ 1), p)")),
    kernel("stack", "every text has the place of the first", "decode_attention",
        rewrite("tl.load(position_ptr + t)", "tl.load(position_ptr)")),
    kernel("position", "the new compressed position not seen", "decode_latent",
        rewrite("tl.where(i[:, None], c[None, :], x)", "tl.where(i[:, None], 0 * c[None, :], x)")),
    kernel("stack", "every text has the random numbers of the first", "choose_bytes",
        rewrite("tl.load(key_ptr + r)", "tl.load(key_ptr)")),
    kernel("neighbour", "an element rotated with another one than its partner", "attend_parts",
        rewrite("ptx.shuffle_xor(w, LANES // 2, PTX)", "ptx.shuffle_xor(w, LANES // 4, PTX)")),
    kernel("missing term", "scales of keys in eight bits forgotten", "decode_attention_8bit",
        rewrite("scale_of_entry(a, E4M3) * scale", "scale")),
    kernel("wrong place", "scale of a new value stored over its key's", "decode_attention_8bit",
        rewrite("tl.cast(HEADS, tl.int64) * W", "tl.cast(HEADS, tl.int64) * 0")),
    # compressed attention
    kernel("layout", "second half of a value taken for its first", "compressed_attention",
        rewrite("tl.dot(p, k1, y1, input_precision=PRECISION)",
        "tl.dot(p, k2, y1, input_precision=PRECISION)")),
    kernel("causality", "entry seen a byte before it is complete", "compressed_attention",
        rewrite("(START + a + 1) // RATIO", "(START + a + 2) // RATIO")),
    kernel("gradient", "weights take nothing from each other", "compressed_attention_backward",
        rewrite("p * (a - b[:, None]) * c", "p * a * c")),
    kernel("cut short", "last group of choices left out", "sum_choices",
        rewrite("tl.load(a, mask=b < NUMBER, other=-1)",
        "tl.load(a, mask=b < NUMBER - 1, other=-1)")),
    kernel("tie", "the first of equal entries chosen", "choose_entries",
        rewrite("tl.sum(e) - tl.cumsum(e) + e", "tl.cumsum(e)")),
    kernel("threshold", "one entry too few above the least", "choose_entries",
        rewrite("(a > 0) & (b <= w)", "(a > 0) & (b < w)")),
    kernel("position", "open entry as of a byte before", "append_position",
        rewrite("tl.where(r == k, a[None, :], v)", "v")),
    kernel("saturation", "scale of an entry by its first half alone", "append_position_8bit",
        rewrite("tl.maximum(tl.max(a, axis=0), tl.max(b, axis=0))", "tl.max(a, axis=0)")),
    kernel("missing term", "scales of entries in eight bits forgotten", "decode_compressed",
        rewrite("scale_of_entry(tl.where(n, a, b), FLOATS)", "scale_of_entry(a, FLOATS)")),
    kernel("left over", "choice of the text before kept", "choose_next",
        rewrite("tl.store(choice_ptr + s, -1, mask=s < SIZE)", "0")),
    module("sink", "indexer's gradient reaches the stream", "families.compressed",
        rewrite("self.query(x.detach(), n)", "self.query(x, n)"), "compressed: whole gradient"),
    module("normaliser", "shares of a group not brought to a sum of 1",
        "families.compressed",
        rewrite("s / s.sum(dim=-1, keepdim=True).clamp(min=TINY)", "s"), "compressed: end to end"),
    module("routing", "one entry too few chosen", "families.compressed",
        rewrite("choose_entries(q, w, a, b, c, s.top_k)",
        "choose_entries(q, w, a, b, c, s.top_k - 1)"), "compressed: end to end"),
    kernel("position", "entries rotated as their second bytes", "compress_blocks",
        rewrite("tl.load(cos_ptr + b * M * HALF + o, ...)",
        "tl.load(cos_ptr + (b * M + 1) * HALF + o, ...)")),
    kernel("gradient", "gates as if nothing was divided by", "compress_blocks_backward",
        rewrite("g1 * (v1 - c1)", "g1 * v1")),
    # loss and rotary positions
    kernel("cut short", "the last class left out", "cross_entropy",
        rewrite("(o < V)[None, :]", "(o < V - 1)[None, :]"), place=launched),
    kernel("gradient", "gradient of the target forgotten", "cross_entropy_backward",
        rewrite("tl.exp(x) / t - h", "tl.exp(x) / t")),
    kernel("too far", "target of another chunk taken for the last symbol", "add_symbols",
        rewrite("(o == t) & i", "(o == tl.minimum(t, N - 1)) & i")),
    kernel("gradient", "gradient of the target forgotten in chunks", "grade_symbols",
        rewrite("tl.exp(x - tl.load(t + m)) - h", "tl.exp(x - tl.load(t + m))")),
    kernel("position", "every head rotated like its position's neighbour", "rotary_norm",
        rewrite("t % T", "(t + 1) % T")),
    kernel("gradient", "result of attention not taken from what a weight gives",
        "causal_attention_backward",
        rewrite("p * (g - d[None, :])", "p * g")),
    kernel("partial sum", "sum of weights not shrunk to a new maximum", "dropped_attention",
        rewrite("t * s + tl.sum(p, axis=1)", "t + tl.sum(p, axis=1)")),
    kernel("gradient", "kept weights not divided by their share", "dropped_attention_backward",
        rewrite("tl.where(w, x * FACTOR, 0.0)", "tl.where(w, x, 0.0)")),
    kernel("sign", "gradient of attention turned on instead of back", "rotary_attention_backward",
        rewrite("a * c + b * s", "a * c - b * s")),
    kernel("sign", "gradient rotated on instead of back", "rotary_norm_backward",
        rewrite("a * c + b * s", "a * c - b * s"), place=launched),
    kernel("missing term", "gains of keys taken from queries", "rotary_heads",
        rewrite("(h >= HEADS).to(tl.int32)", "(h > h).to(tl.int32)")),
    kernel("gradient", "gradient of a gain without the norm", "rotary_heads_backward",
        rewrite("s += a * x", "s += a"), place=launched),
    # rows of tables
    kernel("stride", "stride of the ids of a decoded table ignored", "embedding_rows",
        rewrite("tl.load(i + m * stride_im, mask=o < M, other=0)",
        "tl.load(i + m, mask=o < M, other=0)")),
    kernel("cut short", "last token of every id dropped", "embedding_grad",
        rewrite("m = o < l", "m = o < l - 1", only=1), place=launched),
    kernel("partial sum", "only the last slot kept", "weighted_rows", 
        rewrite("a += (w * s) * t", "a = (w * s) * t")),
    kernel("too far", "chunks take the next group's columns", "weighted_rows_grad_weights",
        rewrite("(w < GROUP) & a", "a")),
    kernel("cut short", "last slot of a row with many dropped", "weighted_rows_grad",
        rewrite("f(a, b, c, d, p, p < e, ...)", "f(a, b, c, d, p, p < e - 1, ...)")),
    kernel("stride", "column stride of a table ignored", "gather_rows",
        rewrite("a * stride_bb", "a"), place=launched),
    kernel("stride", "column stride of values ignored", "scatter_rows",
        rewrite("a * stride_vb", "a"), place=launched),
    # chunks
    kernel("missing term", "positions compared without their projections", "boundary_scores",
        rewrite("x + tl.load(p, ...).to(tl.float32)", "x + 0 * tl.load(p, ...).to(tl.float32)")),
    kernel("gradient", "gradient along the vector itself not taken out",
        "boundary_scores_backward", rewrite("v - tl.sum(u * v, axis=1)[:, None] * u", "v")),
    kernel("missing term", "mean of the tile before forgotten", "smooth_chunks",
        rewrite("s = d * l + t", "s = t")),
    kernel("gradient", "gradient of a share without the mean before", "smooth_chunks_backward",
        rewrite("g * (z - b)", "g * z")),
    kernel("position", "chunks of fixed length begin one late", "route_position",
        rewrite("p % n == 0", "p % n == 1")),
    kernel("threshold", "share not held away from 0 and 1", "take_chunk",
        rewrite("tl.minimum(tl.maximum(s, a), b)", "s")),
    # scans
    kernel("position", "convolution one slot late", "mamba_step",
        rewrite("(p + 1 + i) % t", "(p + i) % t")),
    kernel("missing term", "state of the piece before forgotten", "decay_scan",
        rewrite("tl.exp(e) * s + tl.dot(f, v, input_precision='ieee')",
        "tl.dot(f, v, input_precision='ieee')")),
    kernel("position", "taps one position late", "causal_conv",
        rewrite("t - TAPS + 1 + i", "t - TAPS + i"), place=launched),
    kernel("partial sum", "gradient of taps from the last positions alone", "causal_conv_grad_w",
        rewrite("a += g * tl.load(x, ...).to(tl.float32)",
        "a = g * tl.load(x, ...).to(tl.float32)")),
    # statistics of a gradient
    kernel("normaliser", "mean over one too many", "gradient_gains",
        rewrite("tl.sum(t, axis=0) / c", "tl.sum(t, axis=0) / (c + 1)")),
    kernel("constant", "statistics forget ten times faster", "gradient_gains",
        rewrite("0.99 * a + 0.01 * b", "0.9 * a + 0.1 * b")),
    kernel("bad gradient", "infinite gradients accepted", "gradient_gains",
        rewrite("(t >= SMALLEST) & (t <= LARGEST)", "t >= SMALLEST")),
    kernel("missing term", "gain of the columns forgotten in the root-mean-square", "unit_gain",
        rewrite("u * load_gain(a, ...) * c", "u * load_gain(a, ...)")),
    # symmetric products
    kernel("wrong place", "tile stored below the diagonal only", "gram",
        rewrite("d.store([a, n, m], y.T.reshape(s, b, b))",
        "d.store([a, m, n], y.reshape(s, b, b))")),
    kernel("diagonal", "identity added to every tile", "gram_polynomial",
        rewrite("tl.where(r == c, a, 0.0)", "tl.where(r % 32 == c % 32, a, 0.0)")),
    # steps
    kernel("rounding", "direction truncated, not rounded", "blend_moment",
        rewrite("(x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000", "x.to(tl.int32)")),
    kernel("random bits", "one constant of the random bits mistyped", "blend_moment",
        rewrite("0x7FEB352D", "0x7FEB352F")),
    kernel("random bits", "a quantised gradient rounded down", "quantise_gradient",
        rewrite("x + (y >> 16)", "x")),
    kernel("missing term", "columns mixed before they are sent, and not back", "sum_gradients",
        rewrite("mix_blocks(a, b, c) * column_signs(k)", "a")),
    kernel("missing term", "slopes of a micro-batch without its weight", "add_slopes",
        rewrite("s * (a.to(tl.float32) * UNIT)", "s * 0.125")),
    kernel("layout", "digits of an average in the reverse order", "average_weights",
        rewrite("a > b", "a < b")),
    kernel("missing term", "last column of a moment left out", "moment_squares",
        rewrite("(n < N) & (k < K)", "(n < N) & (k < K - 1)")),
    kernel("saturation", "scales wrap around", "step_scales",
        rewrite("tl.minimum(tl.maximum(v - (s >> 16), a), b)", "v - (s >> 16)")),
    kernel("missing term", "kept elements not divided by their share", "dropout",
        rewrite("tl.where(k, x * FACTOR, 0.0)", "tl.where(k, x, 0.0)")),
    kernel("saturation", "direction does not saturate", "step_by_direction",
        rewrite("tl.minimum(tl.maximum(u, -LIMIT), LIMIT)", "u")),
    kernel(
        "carry", "remainder thrown away when a trit flips", "step_by_direction",
        rewrite("z - n * RADIX", "tl.where(n == 1, z - n * RADIX, 0)"),  # 1 stands for trit 0
    ),
    kernel("random bits", "random bits of a step that are not rotated", "step_by_moment",
        rewrite("(a + b.to(tl.uint32)) & 0xFFFF", "a")),
    kernel("uphill", "step uphill", "step_by_moment",
        rewrite("a + (l << 16) - s + r", "a + (l << 16) + s + r")),
    kernel("unit size", "moment not brought to unit size", "step_by_moment",
        rewrite("tl.sqrt_rn(a, ...)", "a")),
    kernel("unit size", "moment not brought to norm 1", "unit_moment",
        rewrite("tl.sqrt_rn(a, ...)", "a")),
    kernel("threshold", "votes need one more", "cast_trit_votes",
        rewrite("tl.abs(t) >= h", "tl.abs(t) > h")),
    kernel("sign", "signs of gradients flipped", "sign_gradient",
        rewrite("(a > 0).to(tl.int32) - (a < 0).to(tl.int32)",
        "(a < 0).to(tl.int32) - (a > 0).to(tl.int32)")),
    # updates
    module("micro-batch", "moment decays with every micro-batch", "model.rules",
        rewrite("round(a) if f else UNIT", "round(a)"), "update moment sign"),
    module("exchange", "steps of every rule by the P of `moment`", "model.updater",
        rewrite("Pace(t.lr_factor, t.rule.radix, t.rule.blend_units)",
        "Pace(t.lr_factor, 64, t.rule.blend_units)"), "update several trit"),
    module("exchange", "a rule's rate divided by its own, not by that of the model",
        "config.layer_spec",
        rewrite("relative_lr(a, b, c)", "relative_lr(b, a, c)"), "update several all"),
    Fault("constant", "steps clipped too late",
        set_constant("model.step_parameters", "STEP_CLIP", 40), "update moment factored"),
    Fault("constant", "one of two inverses left out", set_constant("model.optimizers.orthogonal",
        "POLAR_WEIGHTS", (0.961939909, 0.00921883, 0.0)), "update moment orthogonal"),
    Fault("bad gradient", "NaN gradients accepted", edit(torch_backend("gradient_gains"),
        rewrite("SMALLEST <= t <= LARGEST", "True")), "update nibble sign"),
    module("wiring", "gain of the columns not handed on", "model.optimizers",
        rewrite("(g.rows, g.columns)", "(g.rows, g.columns[:0])"), "update carry factored"),
    # the dense model
    module("causality", "attention sees later bytes", "model.layers",
        rewrite(f"{ATTENTION}(q, k, v, is_causal=True)", f"{ATTENTION}(q, k, v)"),
        "model: causality"),
    Fault("exchange", "streams read by what they are written by", edit(method(HyperConnection,
        "forward"), rewrite("r, k, w = f(x)", "w, k, r = f(x)")), "streams: output"),
    module("rounding", "rotary table in bf16", "model",
        rewrite("(a.float().to(d), b.float().to(d))",
        "(a.bfloat16().float().to(d), b.bfloat16().float().to(d))"), "model: output"),
    Fault("wiring", "norms before attention and MLP exchanged", edit(method(Block, "forward"),
        rewrite("branch.part(x, branch.norm, ...)",
        "branch.part(x, self.branches[branch is self.branches[0]].norm, ...)")),
        "grouped: gradient"),
    module("loss", "loss summed, not averaged", "model.layers",
        rewrite("f(a, b).mean()", "f(a, b).sum()"), "model: end to end"),
    module("sink", "gradient averaged over rows", "model.layers",
        rewrite("return g.T @ x", "return g.T @ x / len(x)"), "model: gradient"),
    # the graph model
    module("routing", "weights of experts forgotten", "families.experts",
        rewrite("return expert_combine(v, p, g)", "return expert_combine(v, p, None)"),
        "graph: end to end"),
    module("wrong function", "scores of experts without the root", "families.experts",
        rewrite("functional.softplus(x.clamp(min=LEAST_LOGIT)).sqrt()",
        "functional.softplus(x.clamp(min=LEAST_LOGIT))"), "gates: end to end"),
    module("position", "experts hashed by the next bytes", "model.ngrams",
        rewrite("ngram_ids(t, 1 << KEY_BITS, (KEY_ORDER,))",
        "ngram_ids(t.roll(-1, 1), 1 << KEY_BITS, (KEY_ORDER,))"), "hashed: causality"),
    module("gradient", "gradient of one slot only", "families.experts",
        rewrite("expert_combine(g, p, None)", "expert_combine(g, p[:, :1], None)"),
        "graph: whole gradient"),
    module("causality", "n-grams of the next byte", "model.ngrams",
        rewrite("functional.pad(i, (b, 0), value=-1)",
        "functional.pad(i.roll(-1, 1), (b, 0), value=-1)"), "graph: causality"),
    # attention that kernels have not
    module("layout", "heads of keys serve heads of queries in turns", "model.layers",
        rewrite("x[:, :, None].expand(-1, -1, t, -1, -1).flatten(1, 2)", "x.repeat(1, t, 1, 1)"),
        "grouped: output"),
    module("gradient", "gradient of gains multiplied by the gains", "model.layers.gained_norm",
        rewrite("s.collect(None, g)", "s.collect(None, g * self._norm()[0])"),
        "grouped: gradient"),
    # the head beyond the next byte
    module("position", "byte beyond the next one read a position late", "families.ahead.head",
        rewrite("i[:, k:n]", "i[:, k - 1 : n - 1]"), "ahead: end to end"),
    # the model of hidden bytes
    module("cut short", "window to both sides has nothing after a position", "model.parts.window",
        rewrite("(k <= q) if c else (k < q + w)", "k <= q"), "masked: output"),
    module("normaliser", "hidden bytes of all windows count alike", "families.masked.masking",
        rewrite("t.shape[1] / h.sum(dim=1, keepdim=True)", "h.numel() / h.sum()"),
        "masked: end to end"),
    # the composite head
    module("normaliser", "heads averaged over bytes of all kinds", "families.media.head",
        rewrite("total / kind_mask.sum().clamp(min=1)", "total / kind_mask.numel()"),
        "composite: end to end"),
    # the vector quantiser
    module("missing term", "half of a gradient goes through a quantiser", "families.graph",
        rewrite("rows + (z - z.detach())", "rows + 0.5 * (z - z.detach())"),
        "nearest: whole gradient"),
    # the model that fills holes from left to right
    module("normaliser", "bytes of windows without marks count for less", "model.language_model",
        rewrite("self._symbol_losses(f, t).sum() / l.sum().clamp(min=1)",
                "self._symbol_losses(f, t).sum() / l.numel()"), "fill: end to end"),
    # the model of chunks
    module("causality", "window of attention sees later bytes", "model.parts",
        rewrite("(k <= q) if c else (k < q + w)", "k < q + w"), "hnet: causality"),
    module("gradient", "confidence of a position that begins no chunk not inverted",
        "families.hnet", rewrite("torch.where(s >= 0, f, -c)", "torch.where(s >= 0, f, c)"),
        "hnet: whole gradient"),
    module("gradient", "decays' gradient without what they take from later positions",
        "families.mamba", rewrite("running_sum(o, reverse=True)", "o"), "mamba: whole gradient"),
    module("position", "a chunk read where the next one begins", "families.hnet",
        rewrite("torch.searchsorted(c, n.contiguous())",
        "torch.searchsorted(c, n.contiguous() + 1)"), "hnet: end to end"),
    module("neighbour", "rows taken from the first sequence", "families.hnet",
        rewrite("torch.where(i < 0, -1, i + s)", "torch.where(i < 0, -1, i)"), "hnet: end to end"),
    module("wiring", "what goes past the inner network left out", "families.hnet",
        rewrite("m.spread(z, r.p, s.residual(x), c)", "m.spread(z, r.p, 0 * s.residual(x), c)"),
        "hnet: end to end"),
    # blocks of any kind, around chunks and on them
    module("wiring", "experts given the stream that is not normalised", "families.experts",
        rewrite("self.mix(r, r, c, n, v)", "self.mix(r, r, c, None, v)"), "mixed: output"),
    module("neighbour", "experts of chunks hashed by the first bytes", "model.parts.base",
        rewrite("self.grams.gather(1, i)", "self.grams[:, : i.shape[1]]"), "mixed: end to end"),
]  # fmt: skip


def failures(check: str) -> list:
    """Make one check, and list what it finds wrong."""
    kind, _, rest = check.partition(" ")
    if kind not in MODELS:
        return kernel_failures(kind, SCALE_TYPES[scale_type_of(kind, rest) or "T6"])
    return [result for result in MODELS[kind](rest) if not result.passed]


def scale_type_of(kernel: str, named: str) -> str | None:
    """Choose the scale type that faults of a kernel are looked for in; None if it has no scales."""
    (spec,) = find_kernels([kernel])
    return (named or ("T32" if "norm" in kernel else "T6")) if spec.uses_scales else None


def check_one(name: str, check: str) -> list:
    """Make one of the checks of a model, as far as the first result that fails."""
    parts = {"output": "blocks", "gradient": "blocks"}.get(check, "whole")
    config = RAGGED if name == "ragged" else models.MODELS[name]
    subject = Subject(name, config, 2, torch.float32, CPU, "torch", (parts,))
    make = parity._causality if check == "causality" else parity._compare
    with deterministic(), poisoned(warn_only=False):
        failed = (r for r in make(subject) if r.check == check and not r.passed)
        return [*islice(failed, 1)]


def check_update(rule_and_direction: str) -> list:
    """Compare updates of one rule, or of `several` in one model, with their formulas."""
    rule, direction = rule_and_direction.split()
    if rule == "several":
        config = several_rules(direction)
    else:
        config = replace(RAGGED, rule=rule, direction=direction)
    subject = Subject(rule_and_direction, config, 1, torch.float32, CPU, "torch", ("update",))
    return parity.check_model(subject)


MODELS: dict[str, Callable[[str], list]] = {
    "model:": partial(check_one, "ragged"), "streams:": partial(check_one, "4 streams"),
    "graph:": partial(check_one, "graph"), "gates:": partial(check_one, "graph softplus"),
    "hashed:": partial(check_one, "graph hash"), "compressed:": partial(check_one, "compressed"),
    "hnet:": partial(check_one, "hnet"), "mamba:": partial(check_one, "hnet mamba"),
    "mixed:": partial(check_one, "mixed"), "grouped:": partial(check_one, "grouped"),
    "ahead:": partial(check_one, "ahead"), "masked:": partial(check_one, "masked"),
    "fill:": partial(check_one, "fill"), "nearest:": partial(check_one, "graph nearest"),
    "composite:": partial(check_one, "composite"),
    "update": check_update,
}  # fmt: skip
"""Checks of models by the first word of their name."""


def kernel_failures(name: str, group_size: int) -> list:
    """Compare a kernel with its reference as far as the first case of a sample that it fails."""
    (spec,) = find_kernels([name])
    with poisoned():
        for case in sample(list(spec.cases(CPU, group_size))):
            wanted = as_tuple(spec.reference(*copies(case.inputs)))
            peers = peers_of(spec, case, len(wanted))
            for backend, run in (("interpreter", spec.triton), ("torch", spec.torch)):
                with use_backend(backend):
                    got = as_tuple(run(*copies(case.inputs)))
                results = [
                    compare(spec, case.label, *outputs)
                    for outputs in zip(got, wanted, peers, strict=True)
                ]
                if failed_results := [result for result in results if not result.passed]:
                    return failed_results
    return []


OF_KERNELS = {spec.name for spec in KERNELS}
"""Kernels without a fault are tested in tests/kernels/test_every_kernel.py."""
CHECKS = sorted({fault.caught_by for fault in FAULTS})


@pytest.mark.slow  # tests/verify/test_parity.py finds nothing either
def test_nothing_is_found_without_a_fault():
    for check in (check for check in CHECKS if check.split()[0] not in OF_KERNELS):
        assert not failures(check), check


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name.replace(" ", "-"))
def test_planted_fault_is_caught(fault, tmp_path):
    with fault.planted(tmp_path):
        assert failures(fault.caught_by)


def test_every_kernel_has_a_fault():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.caught_by.split()[0] for fault in FAULTS} >= OF_KERNELS
