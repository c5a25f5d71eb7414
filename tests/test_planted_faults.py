"""Every class of mistake, planted once on purpose in kernels, updates and models: caught.

The author of a check of `arb verify-kernels` wants to know that it would notice, also after it is
made cheaper. `FAULTS` has one of each class, one for every kernel that its cases notice, and one
for every check of a model. `planting` says how.
"""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from apparatus.planting import Fault
from apparatus.sampling import sample

from arbcli.config.layer_spec import SCALE_TYPES
from arbcli.kernels.runtime._triton import HAS_TRITON
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic
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

FAULTS = [
    # products in eight bits
    Fault("quantise_rows", "to_e4m3", "(bits >> 20) & 1", "1"),
    Fault("decode_e4m3", "_decode_planes", "width * digit", "32 * digit"),
    Fault("fp8_matmul", "_multiply", ".float().T) * (scale * weight_scale)",
        ".float().T) * scale"),
    Fault("transpose_quantised", "_transpose_quantised_kernel", "offs_m < padded", "offs_m < M"),
    Fault("transpose_quantised", "_prepare", "scale / shared", "shared / scale"),
    Fault("fp8_grad_w", "_multiply", "(grad_scale * scale)", "scale"),
    # products in four bits, emulated
    Fault("round_nvfp4", "_nvfp4_kernel", "264", "266"),
    Fault("round_nvfp4", "_nvfp4_kernel", "size > 2.5 * s", "size >= 2.5 * s"),
    # packing and scales
    Fault("unpack_trits", "plane_offsets", "width * digit", "32 * digit"),
    Fault("gradient_statistics T32", "take_trit", "0x40000000", "0xC0000000"),
    Fault("decode_digits", "add_low", "(low << 28) >> 28", "low & 15"),
    Fault("decode_e4m3", "_decode_e4m3_kernel", "6 if INT8 else 7", "7"),
    Fault("int8_matmul", "_add_int8", "16 * row", "0 * row"),
    Fault("nearest_codes", "_nearest_codes_kernel", "mine > best", "mine >= best"),
    Fault("unit_rows", "_unit_rows_kernel", "square * share", "square"),
    Fault("pack_trits", "_pack_trits_kernel", "k[None, :] * stride_tk", "k[None, :]"),
    Fault("pack_trits", "_pack_trits_kernel", "offs_b < row_bytes", "offs_b < row_bytes - 1"),
    Fault("decode_weight", "scale_of", "exponent.to(tl.int32) - 1", "exponent.to(tl.int32) - 2"),
    Fault("ternary_matmul_grad_x", "decode_digits_torch", "scale[:, whole]", "scale[:, whole - 1]"),
    Fault("ternary_matmul", "decode_digits_torch", "scale[:, whole]", "scale[:, whole - 1]"),
    Fault("decode_weight T32", "_decode_blocks", "8 * skew", "0 * skew"),
    # experts
    Fault("grouped_matmul", "_grouped_matmul_kernel", "begin + (block - before)", "block"),
    Fault("grouped_grad_w", "_grouped_grad_w_kernel", "< last", "< S"),
    Fault("expert_combine", "_expert_combine_kernel", "j * stride_gj", "j // 2 * stride_gj"),
    Fault("expert_combine_backward", "_expert_combine_backward_kernel", "products += grad_y",
        "products = grad_y"),
    # streams
    Fault("stream_weights", "_stream_weights_kernel", "_begin(z), rounds", "_begin(z), rounds - 1"),
    Fault("stream_weights", "_stream_weights_kernel",
        " + row_lacks[:, :, None] * (column_lacks / lacking[:, None])[:, None, :]", ""),
    Fault("stream_weights_backward", "_back_through",
        " - tl.sum(g * p / column_sums, axis=1)[:, None, :]", ""),
    Fault("mix_streams", "_mix_streams_kernel",
        "tl.load(gains_ptr + m * stride_cm + i * stride_ci)[:, None] * ", ""),
    Fault("mix_streams_backward", "_mix_streams_backward_kernel", "grad_weights += tl.where",
        "grad_weights = tl.where"),
    # norms
    Fault("rms_norm", "_rms_norm_kernel", " / D + eps", " / D"),
    Fault("add_rms_norm", "_rms_norm_kernel", "load_rows(added_ptr", "0 * load_rows(added_ptr"),
    Fault("rms_norm_backward", "_rms_norm_backward_kernel", "grad_xhat - xhat * mean", "grad_xhat"),
    Fault("rms_norm", "_rms_norm_kernel", "x * r * weight", "x * r"),
    Fault("gained_rms_norm_backward", "_gained_rms_norm_backward_kernel",
        "grad_gain += grad_y * xhat", "grad_gain = grad_y * xhat"),
    Fault("merged_steps", "_merged_kernel", "tl.program_id(1)", "0"),
    Fault("decode_weights T32", "_paired_kernel", "part - parts", "0"),
    Fault("gated_rms_norm", "_gated_rms_norm_kernel", "gate * sigmoid(gate)", "sigmoid(gate)"),
    Fault("gated_rms_norm_backward", "_gated_rms_norm_backward_kernel", "grad * up", "grad * grad"),
    Fault("pack_gates", "_store_packed", "code >> 7", "code_up >> 7"),
    Fault("packed_gates_backward", "_unpack", "(size << 16) | ((low & 128) << 24)", "size << 16"),
    # generation
    Fault("row_matmul", "_multiply_block", "four[1] - totals[i]", "four[1]"),
    Fault("row_matmul", "_read_rows", "tl.minimum(r // 2, ROWS - 1)",
        "tl.minimum(r // 2 ^ 1, ROWS - 1)"),
    Fault("attend_ahead", "_put_row", "start + STRIDE * len(keys)", "start"),
    Fault("attend_ahead", "_average_parts_kernel", "tl.load(position_ptr) + row",
        "tl.load(position_ptr)"),
    Fault("keep_accepted", "_keep_accepted_kernel", "row < tl.load(accepted_ptr)",
        "row <= tl.load(accepted_ptr)"),
    Fault("choose_byte", "_choose_byte_kernel", "tl.load(position_ptr) + row",
        "tl.load(position_ptr)"),
    Fault("accept_ahead", "_accept_ahead_kernel", "8, row + 1", "8, row + 2"),
    Fault("repeat_ahead", "_repeat_ahead_kernel", "length * SPAN - back", "length * SPAN + back"),
    Fault("choose_byte", "_choose_byte_kernel", "choice != favoured", "choice != choice"),
    Fault("prepacked_rows", "_prepacked_rows_kernel", "c == r // 2", "c == r // 2 ^ 1"),
    Fault("decode_attention", "_decode_attention_kernel", "position_ptr + text", "position_ptr"),
    Fault("decode_latent", "_decode_latent_kernel", "c[None, :]", "0 * c[None, :]"),
    Fault("choose_bytes", "_choose_bytes_kernel", "key_ptr + row", "key_ptr"),
    Fault("attend_parts", "rotate", "LANES // 2", "LANES // 4"),
    Fault("decode_attention_8bit", "_decode_attention_kernel",
        "scale_of_entry(key_exponents, E4M3) * ", ""),
    Fault("decode_attention_8bit", "_decode_attention_kernel", "tl.cast(HEADS, tl.int64) * W",
        "tl.cast(HEADS, tl.int64) * 0"),
    # compressed attention
    Fault("compressed_attention", "_compressed_attention_kernel", "tl.dot(p, k1, y1",
        "tl.dot(p, k2, y1"),
    Fault("compressed_attention", "_compressed_attention_kernel", "+ 1) // RATIO", "+ 2) // RATIO"),
    Fault("compressed_attention_backward", "_slopes", "dp - delta[:, None]", "dp"),
    Fault("sum_choices", "_sum_choices_kernel", "g < NUMBER", "g < NUMBER - 1"),
    Fault("choose_entries", "store_best", "tl.sum(equal) - tl.cumsum(equal) + equal",
        "tl.cumsum(equal)"),
    Fault("choose_entries", "store_best", "later_ties <= remaining", "later_ties < remaining"),
    Fault("append_position", "_entry_half", "rows == kept", "rows < 0"),
    Fault("append_position_8bit", "quantise_halves",
        "tl.maximum(tl.max(first, axis=0), tl.max(second, axis=0))", "tl.max(first, axis=0)"),
    Fault("decode_compressed", "_decode_compressed_kernel", "tl.where(near, e1, e2)", "e1"),
    Fault("choose_next", "_choose_next_kernel", "tl.store(choice_ptr + s, -1, mask=s < SIZE)", "0"),
    Fault("compressed: whole gradient", "Indexer.queries", "x.detach()", "x"),
    Fault("compressed: end to end", "Indexer.divergence",
        " / shares.sum(dim=-1, keepdim=True).clamp(min=TINY)", ""),
    Fault("compressed: end to end", "Indexer.choose", "self.top_k", "self.top_k - 1"),
    Fault("compress_blocks", "_compress_blocks_kernel", "cos_ptr + block * M * HALF",
        "cos_ptr + (block * M + 1) * HALF"),
    Fault("compress_blocks_backward", "_compress_blocks_backward_kernel", "v1 - c1", "v1"),
    # loss and rotary positions
    Fault("cross_entropy", "_cross_entropy_kernel", "offs_v < V", "offs_v < V - 1"),
    Fault("cross_entropy_backward", "_cross_entropy_backward_kernel", "/ total[:, None] - here",
        " / total[:, None]"),
    Fault("add_symbols", "_add_symbols_kernel", "offs_n == target",
        "offs_n == tl.minimum(target, N - 1)"),
    Fault("grade_symbols", "_grade_symbols_kernel", "(total_ptr + m)) - here", "(total_ptr + m))"),
    Fault("rotary_norm", "_rotary_norm_kernel", "token % T", "(token + 1) % T"),
    Fault("causal_attention_backward", "_add_queries", "grad_p - delta[None, :]", "grad_p"),
    Fault("dropped_attention", "_dropped_attention_kernel", "total * shrink", "total"),
    Fault("dropped_attention_backward", "drop_weights", "x * FACTOR", "x"),
    Fault("rotary_attention_backward", "_store_turned", "one * cos + other * sin",
        "one * cos - other * sin"),
    Fault("rotary_norm_backward", "_rotary_norm_backward_kernel", "first * grad_first +",
        "first * grad_first -"),
    Fault("rotary_heads", "_rotary_heads_kernel", "head >= HEADS", "head > head"),
    Fault("rotary_heads_backward", "_rotary_heads_backward_kernel", "first_sums += first * x_first",
        "first_sums += first"),
    # rows of tables
    Fault("embedding_rows", "_table_rows_kernel", "offs_m * stride_im", "offs_m"),
    Fault("embedding_grad", "_embedding_grad_kernel", "offs_m < last", "offs_m < last - 1"),
    Fault("weighted_rows", "_weighted_rows_kernel", "+= (weight", "= (weight"),
    Fault("weighted_rows_grad_weights", "_chunk_columns", "(within < GROUP) & (k < D)", "k < D"),
    Fault("weighted_rows_grad", "_weighted_rows_grad_kernel", "place < end", "place < end - 1"),
    Fault("gather_rows", "_gather_rows_kernel", "to(tl.int64) * stride_bb", "to(tl.int64)"),
    Fault("scatter_rows", "_scatter_rows_kernel", "columns * stride_vb", "columns"),
    # chunks
    Fault("boundary_scores", "_load_sum", "tl.load(qk_ptrs, mask=", "0 * tl.load(qk_ptrs, mask="),
    Fault("boundary_scores_backward", "_boundary_scores_backward_kernel",
        " - tl.sum(u * v, axis=1)[:, None] * u", ""),
    Fault("smooth_chunks", "_smooth_chunks_kernel", "decay * last + total", "total"),
    Fault("smooth_chunks_backward", "_smooth_chunks_backward_kernel", "z - before", "z"),
    Fault("route_position", "_route_position_kernel", "position % LENGTH == 0",
        "position % LENGTH == 1"),
    Fault("take_chunk", "_take_chunk_kernel",
        "tl.minimum(tl.maximum(tl.load(p_ptr + text), _LEAST), _MOST)", "tl.load(p_ptr + text)"),
    # scans
    Fault("mamba_step", "_convolve", "position + 1", "position"),
    Fault("decay_scan", "_decay_scan_kernel",
        "tl.exp(end) * state + ", ""),
    Fault("causal_conv", "_causal_conv_kernel", "t - TAPS + 1", "t - TAPS"),
    Fault("causal_conv_grad_w", "_causal_conv_grad_w_kernel", "total += grad", "total = grad"),
    # statistics of a gradient
    Fault("gradient_gains", "_average", "tl.sum(total, axis=0) / count",
        "tl.sum(total, axis=0) / (count + 1)"),
    Fault("gradient_gains", "_average", "0.99", "0.9"),
    Fault("gradient_gains", "_gradient_gains_kernel", "(total >= SMALLEST) & (total <= LARGEST)",
        "total >= SMALLEST"),
    Fault("unit_gain", "_direction_squares_kernel",
        " * load_gain(row_gain_ptr, n, mask_n, HAS_ROWS)", ""),
    # symmetric products
    Fault("gram", "_store_tile", "[matrix, n, m]", "[matrix, m, n]"),
    Fault("gram_polynomial", "_store_tile", "rows == columns", "rows % 32 == columns % 32"),
    # steps
    Fault("blend_moment", "round_to_int",
        "(x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000", "x.to(tl.int32)"),
    Fault("blend_moment", "mix_word", "0x7FEB352D", "0x7FEB352F"),
    Fault("quantise_gradient", "_quantised", "whole + (part >> 16)", "whole"),
    Fault("sum_gradients", "_sum_gradients_kernel",
        "mix_blocks(total, BLOCK, STAGES) * column_signs(k)", "total"),
    Fault("add_slopes", "_add_slopes_kernel", "tl.load(weight_ptr).to(tl.float32) * UNIT", "0.125"),
    Fault("average_weights", "_average_weights_kernel", "digit > plane", "digit < plane"),
    Fault("moment_squares", "_moment_squares_kernel", "k < K", "k < K - 1"),
    Fault("step_scales", "_step_scales_kernel",
        "tl.minimum(tl.maximum(v - (step >> 16), LOWEST), HIGHEST)", "v - (step >> 16)"),
    Fault("dropout", "_dropout_kernel", "x * FACTOR", "x"),
    Fault("step_by_direction", "fixed_point", "tl.minimum(tl.maximum(u, -LIMIT), LIMIT)", "u"),
    Fault("step_by_direction", "_step", "z - new * RADIX",
        "tl.where(new == 1, z - new * RADIX, 0)"),
    Fault("step_by_moment", "_step_block", "(even_random + shift.to(tl.uint32)) & 0xFFFF",
        "even_random"),
    Fault("step_by_moment", "_step", "(low << 16) -", "(low << 16) +"),
    Fault("step_by_moment", "_gain", "tl.sqrt_rn(mean_square)", "mean_square"),
    Fault("unit_moment", "_unit_moment_kernel", "tl.sqrt_rn(squares.to(tl.float32))", "squares"),
    Fault("cast_trit_votes", "_cast_trit_votes_kernel", "tl.abs(total) >= threshold",
        "tl.abs(total) > threshold"),
    Fault("sign_gradient", "_sign_gradient_kernel", "grad > 0", "grad < 0"),
    # updates
    Fault("update moment sign", "Moment.update_moment", " if control.first else UNIT", ""),
    Fault("update several trit", "_pace", "tensor.rule.radix", "64"),
    Fault("update several all", "LayerSpec.lr_factor", "(self.rule, run_rule",
        "(run_rule, self.rule"),
    Fault("update moment factored", "step_limits", "STEP_CLIP *", "40 *"),
    Fault("update moment orthogonal", "approximate_polar", "POLAR_WEIGHTS",
        "(0.961939909, 0.00921883, 0.0)"),
    Fault("update nibble sign", "_judge", "SMALLEST <= total <= LARGEST", "True"),
    Fault("update carry factored", "Direction.factors", "gains.columns", "gains.columns[:0]"),
    # the dense model
    Fault("ragged: causality", "attend_causally", ", is_causal=True", ""),
    Fault("4 streams: output", "HyperConnection.forward", "read, keep, write =",
        "write, keep, read ="),
    Fault("ragged: output", "_tables", ".float()", ".bfloat16().float()"),
    Fault("grouped: gradient", "Block.forward", "branch.norm",
        "self.branches[branch is self.branches[0]].norm"),
    Fault("ragged: end to end", "_CrossEntropy.forward", ".mean()", ".sum()"),
    Fault("ragged: gradient", "Product.gradient", "grad_y.T @ source",
        "grad_y.T @ source / len(source)"),
    # the graph model
    Fault("graph: end to end", "_Combine.forward", "values, positions, gates",
        "values, positions, None"),
    Fault("graph softplus: end to end", "root_softplus", ").sqrt()", ")"),
    Fault("graph hash: causality", "ngram_keys", "ngram_ids(text", "ngram_ids(text.roll(-1, 1)"),
    Fault("graph: whole gradient", "_Dispatch.backward", "grad, positions",
        "grad, positions[:, :1]"),
    Fault("graph: causality", "ngram_ids", "pad(ids", "pad(ids.roll(-1, 1)"),
    # attention that kernels have not
    Fault("grouped: output", "repeat_heads",
        "[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)", ".repeat(1, times, 1, 1)"),
    Fault("grouped: gradient", "GainedRMSNorm.backward", "collect(None, grad",
        "collect(None, grad * self._norm()[0]"),
    # the head beyond the next byte
    Fault("ahead: end to end", "Ahead.losses", "k:length", "k - 1:length - 1"),
    # the model of hidden bytes
    Fault("masked: output", "attend_in_window",
        "(key <= query) if causal else (key < query + window)", "key <= query"),
    Fault("masked: end to end", "bound_weights", "targets.shape[1]", "hidden.numel()"),
    # the composite head
    Fault("composite: end to end", "CompositeHead.losses", "kind_mask.sum().clamp(min=1)",
        "kind_mask.numel()"),
    # the vector quantiser
    Fault("graph nearest: whole gradient", "Quantiser.forward", "z - z.detach()",
        "0.5 * (z - z.detach())"),
    # the model that fills holes from left to right
    Fault("fill: end to end", "LanguageModel._mean_loss", "learnt.sum().clamp(min=1)",
        "learnt.numel()"),
    # the model of chunks
    Fault("hnet: causality", "attend_in_window",
        "(key <= query) if causal else (key < query + window)", "key < query + window"),
    Fault("hnet: whole gradient", "_Spread.backward", "-grad_c", "grad_c"),
    Fault("hnet mamba: whole gradient", "_DecayScan.backward",
        "running_sum(grad_sums, reverse=True)", "grad_sums"),
    Fault("hnet: end to end", "find_chunks", "numbers.contiguous()", "numbers.contiguous() + 1"),
    Fault("hnet: end to end", "_gather", "index + starts", "index"),
    Fault("hnet: end to end", "Stage.forward", "self.residual(x)", "0 * self.residual(x)"),
    # blocks of any kind, around chunks and on them
    Fault("mixed: output", "Experts.forward", "rows, rows, chosen, norm",
        "rows, rows, chosen, None"),
    Fault("mixed: end to end", "BlockInputs.select_positions", "self.grams.gather(1, index)",
        "self.grams[:, :index.shape[1]]"),
]  # fmt: skip


def failures(check: str) -> list:
    """Make one check, and list what it finds wrong."""
    model, colon, part = check.partition(": ")
    if colon:
        return check_one(model, part)
    kind, *about = check.split()
    return check_update(*about) if kind == "update" else kernel_failures(kind, *about)


def check_one(name: str, check: str) -> list:
    """Make one of the checks of a model, as far as the first result that fails."""
    parts = {"output": "blocks", "gradient": "blocks"}.get(check, "whole")
    config = RAGGED if name == "ragged" else models.MODELS[name]
    subject = Subject(name, config, 2, torch.float32, CPU, "torch", (parts,))
    make = parity._causality if check == "causality" else parity._compare
    with deterministic(), poisoned(warn_only=False):
        failed = (r for r in make(subject) if r.check == check and not r.passed)
        return [*islice(failed, 1)]


def check_update(rule: str, direction: str) -> list:
    """Compare updates of one rule, or of `several` in one model, with their formulas."""
    if rule == "several":
        config = several_rules(direction)
    else:
        config = replace(RAGGED, rule=rule, direction=direction)
    subject = Subject(rule, config, 1, torch.float32, CPU, "torch", ("update",))
    return [result for result in parity.check_model(subject) if not result.passed]


def kernel_failures(name: str, scale_type: str = "") -> list:
    """Compare a kernel with its reference as far as the first case of a sample that it fails.

    With the scales that test_every_kernel.py finds nothing with: T6, in which groups straddle
    everything, T32 for norms; or with those that are named.
    """
    (spec,) = find_kernels([name])
    usual = "T32" if spec.uses_scales and "norm" in name else "T6"
    group_size = SCALE_TYPES[scale_type or usual]
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


@pytest.mark.slow  # tests/verify/test_parity.py finds nothing either
def test_nothing_is_found_without_a_fault():
    for check in {fault.caught_by for fault in FAULTS}:
        assert check.split()[0] in OF_KERNELS or not failures(check), check


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.caught_by}: {fault.old}")
def test_planted_fault_is_caught(fault, tmp_path):
    with fault.planted(tmp_path):
        assert failures(fault.caught_by)


def test_every_kernel_has_a_fault():
    assert len({*FAULTS}) == len(FAULTS)
    assert {fault.caught_by.split()[0] for fault in FAULTS} >= OF_KERNELS
