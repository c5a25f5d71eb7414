"""Every kernel there is, by its spec: what `arb verify-kernels`, tests and timings go through."""

from arbcli.kernels.attention.append_position import APPEND_POSITION, APPEND_POSITION_8BIT
from arbcli.kernels.attention.attend_ahead import ATTEND_AHEAD, KEEP_ACCEPTED
from arbcli.kernels.attention.attend_parts import ATTEND_PARTS
from arbcli.kernels.attention.causal_attention_backward import CAUSAL_ATTENTION_BACKWARD
from arbcli.kernels.attention.choose_entries import CHOOSE_ENTRIES
from arbcli.kernels.attention.choose_next import CHOOSE_NEXT
from arbcli.kernels.attention.compress_blocks import COMPRESS_BLOCKS, COMPRESS_BLOCKS_BACKWARD
from arbcli.kernels.attention.compressed_attention import COMPRESSED_ATTENTION
from arbcli.kernels.attention.compressed_attention_backward import COMPRESSED_ATTENTION_BACKWARD
from arbcli.kernels.attention.decode_attention import DECODE_ATTENTION
from arbcli.kernels.attention.decode_attention_8bit import DECODE_ATTENTION_8BIT
from arbcli.kernels.attention.decode_attention_rows import DECODE_ATTENTION_ROWS
from arbcli.kernels.attention.decode_compressed import DECODE_COMPRESSED
from arbcli.kernels.attention.decode_latent import DECODE_LATENT
from arbcli.kernels.attention.rotary_norm import ROTARY_NORM, ROTARY_NORM_BACKWARD
from arbcli.kernels.attention.sum_choices import SUM_CHOICES
from arbcli.kernels.chunks.boundary_scores import BOUNDARY_SCORES, BOUNDARY_SCORES_BACKWARD
from arbcli.kernels.chunks.find_chunks import FIND_CHUNKS
from arbcli.kernels.chunks.gather_chunks import GATHER_CHUNKS
from arbcli.kernels.chunks.route_position import ROUTE_POSITION, TAKE_CHUNK
from arbcli.kernels.chunks.smooth_chunks import SMOOTH_CHUNKS, SMOOTH_CHUNKS_BACKWARD
from arbcli.kernels.chunks.spread_chunks import SPREAD_CHUNKS, SPREAD_CHUNKS_BACKWARD
from arbcli.kernels.codec.decode_digits import DECODE_DIGITS
from arbcli.kernels.codec.decode_e4m3 import DECODE_E4M3
from arbcli.kernels.codec.decode_weight import DECODE_WEIGHT
from arbcli.kernels.codec.packing import PACK_TRITS, UNPACK_TRITS
from arbcli.kernels.matmul.digits_matmul import DIGITS_MATMUL
from arbcli.kernels.matmul.fp8_matmul import FP8_MATMUL
from arbcli.kernels.matmul.grouped_matmul import GROUPED_GRAD_W, GROUPED_MATMUL
from arbcli.kernels.matmul.nvfp4_matmul import NVFP4_MATMUL
from arbcli.kernels.matmul.prepacked_rows import PREPACKED_ROWS
from arbcli.kernels.matmul.quantise_rows import QUANTISE_ROWS
from arbcli.kernels.matmul.round_nvfp4 import ROUND_NVFP4
from arbcli.kernels.matmul.row_by_row import ROW_BY_ROW
from arbcli.kernels.matmul.row_matmul import ROW_MATMUL
from arbcli.kernels.matmul.scaled_nvfp4 import ENCODE_NVFP4, SCALED_NVFP4_MATMUL
from arbcli.kernels.matmul.ternary_matmul import TERNARY_MATMUL, TERNARY_MATMUL_GRAD_X
from arbcli.kernels.norm.gated_rms_norm import GATED_RMS_NORM, GATED_RMS_NORM_BACKWARD
from arbcli.kernels.norm.norm_e4m3 import (
    ADD_RMS_NORM_E4M3,
    GATED_RMS_NORM_E4M3,
    RMS_NORM_E4M3,
)
from arbcli.kernels.norm.rms_norm import ADD_RMS_NORM, RMS_NORM, RMS_NORM_BACKWARD
from arbcli.kernels.output.choose_ahead import ACCEPT_AHEAD, CHOOSE_AHEAD
from arbcli.kernels.output.choose_byte import CHOOSE_BYTE
from arbcli.kernels.output.choose_bytes import CHOOSE_BYTES
from arbcli.kernels.output.cross_entropy import CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD
from arbcli.kernels.output.symbol_losses import ADD_SYMBOLS, GRADE_SYMBOLS
from arbcli.kernels.rows.expert_combine import EXPERT_COMBINE, EXPERT_COMBINE_BACKWARD
from arbcli.kernels.rows.table_rows import GATHER_ROWS, SCATTER_ROWS
from arbcli.kernels.rows.ternary_embedding import EMBEDDING_GRAD, EMBEDDING_ROWS
from arbcli.kernels.rows.weighted_rows import (
    WEIGHTED_ROWS,
    WEIGHTED_ROWS_GRAD,
    WEIGHTED_ROWS_GRAD_WEIGHTS,
)
from arbcli.kernels.runtime.operation import Operation
from arbcli.kernels.scan.causal_conv import CAUSAL_CONV, CAUSAL_CONV_GRAD_W
from arbcli.kernels.scan.decay_scan import DECAY_SCAN
from arbcli.kernels.scan.mamba_step import MAMBA_STEP
from arbcli.kernels.streams.mix_streams import MIX_STREAMS, MIX_STREAMS_BACKWARD
from arbcli.kernels.streams.stream_weights import STREAM_WEIGHTS, STREAM_WEIGHTS_BACKWARD
from arbcli.kernels.update.blend_moment import BLEND_MOMENT
from arbcli.kernels.update.cast_votes import CAST_SCALE_VOTES, CAST_TRIT_VOTES
from arbcli.kernels.update.gradient_gains import GRADIENT_GAINS
from arbcli.kernels.update.gradient_statistics import GRADIENT_STATISTICS
from arbcli.kernels.update.last_bits import LAST_BITS, TAKE_LAST_BITS
from arbcli.kernels.update.merged_steps import MERGED_STEPS
from arbcli.kernels.update.newton_schulz import GRAM, GRAM_POLYNOMIAL
from arbcli.kernels.update.quantise_gradient import QUANTISE_GRADIENT
from arbcli.kernels.update.sign_gradient import SIGN_GRADIENT
from arbcli.kernels.update.step_scales import STEP_SCALES
from arbcli.kernels.update.step_trits import STEP_BY_DIRECTION, STEP_BY_MOMENT
from arbcli.kernels.update.sum_gradients import SUM_GRADIENTS
from arbcli.kernels.update.unit_gain import UNIT_GAIN
from arbcli.kernels.update.unit_rows import UNIT_ROWS

KERNELS: tuple[Operation, ...] = (
    PACK_TRITS,
    UNPACK_TRITS,
    DECODE_WEIGHT,
    DECODE_DIGITS,
    DECODE_E4M3,
    QUANTISE_ROWS,
    FP8_MATMUL,
    ROUND_NVFP4,
    NVFP4_MATMUL,
    ENCODE_NVFP4,
    SCALED_NVFP4_MATMUL,
    TERNARY_MATMUL,
    TERNARY_MATMUL_GRAD_X,
    ROW_MATMUL,
    ROW_BY_ROW,
    PREPACKED_ROWS,
    DIGITS_MATMUL,
    GROUPED_MATMUL,
    GROUPED_GRAD_W,
    EXPERT_COMBINE,
    EXPERT_COMBINE_BACKWARD,
    RMS_NORM,
    ADD_RMS_NORM,
    RMS_NORM_BACKWARD,
    GATED_RMS_NORM,
    GATED_RMS_NORM_BACKWARD,
    RMS_NORM_E4M3,
    ADD_RMS_NORM_E4M3,
    GATED_RMS_NORM_E4M3,
    ROTARY_NORM,
    ROTARY_NORM_BACKWARD,
    CAUSAL_ATTENTION_BACKWARD,
    DECODE_ATTENTION,
    ATTEND_PARTS,
    ATTEND_AHEAD,
    KEEP_ACCEPTED,
    DECODE_ATTENTION_8BIT,
    DECODE_ATTENTION_ROWS,
    COMPRESS_BLOCKS,
    COMPRESS_BLOCKS_BACKWARD,
    COMPRESSED_ATTENTION,
    COMPRESSED_ATTENTION_BACKWARD,
    CHOOSE_ENTRIES,
    SUM_CHOICES,
    APPEND_POSITION,
    APPEND_POSITION_8BIT,
    CHOOSE_NEXT,
    DECODE_COMPRESSED,
    DECODE_LATENT,
    CHOOSE_BYTE,
    CHOOSE_BYTES,
    CHOOSE_AHEAD,
    ACCEPT_AHEAD,
    CROSS_ENTROPY,
    CROSS_ENTROPY_BACKWARD,
    ADD_SYMBOLS,
    GRADE_SYMBOLS,
    EMBEDDING_ROWS,
    EMBEDDING_GRAD,
    WEIGHTED_ROWS,
    WEIGHTED_ROWS_GRAD_WEIGHTS,
    WEIGHTED_ROWS_GRAD,
    GATHER_ROWS,
    SCATTER_ROWS,
    BOUNDARY_SCORES,
    BOUNDARY_SCORES_BACKWARD,
    FIND_CHUNKS,
    GATHER_CHUNKS,
    SMOOTH_CHUNKS,
    SMOOTH_CHUNKS_BACKWARD,
    SPREAD_CHUNKS,
    SPREAD_CHUNKS_BACKWARD,
    ROUTE_POSITION,
    TAKE_CHUNK,
    DECAY_SCAN,
    CAUSAL_CONV,
    CAUSAL_CONV_GRAD_W,
    STREAM_WEIGHTS,
    STREAM_WEIGHTS_BACKWARD,
    MIX_STREAMS,
    MIX_STREAMS_BACKWARD,
    MAMBA_STEP,
    GRADIENT_STATISTICS,
    SIGN_GRADIENT,
    GRADIENT_GAINS,
    UNIT_GAIN,
    UNIT_ROWS,
    GRAM,
    GRAM_POLYNOMIAL,
    STEP_SCALES,
    MERGED_STEPS,
    BLEND_MOMENT,
    STEP_BY_MOMENT,
    STEP_BY_DIRECTION,
    CAST_TRIT_VOTES,
    CAST_SCALE_VOTES,
    QUANTISE_GRADIENT,
    SUM_GRADIENTS,
    LAST_BITS,
    TAKE_LAST_BITS,
)
BY_NAME = {operation.name: operation for operation in KERNELS}
