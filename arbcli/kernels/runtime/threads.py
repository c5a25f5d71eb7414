"""Thread operations that Triton lacks: shuffles, the number of a warp, loads of 16 bytes.

Tensors have one element per thread. The functions are PTX, or plain Triton in the interpreter. The
compiler does not move a load before earlier operations, such as waiting for the kernel that writes
its data.
"""

from arbcli.kernels.runtime._triton import tl, triton

_WARP = tl.constexpr("""{
.reg .b32 warp;
mov.u32 warp, %tid.x;
shr.u32 warp, warp, 5;
shfl.sync.idx.b32 $0, warp, 0, 0x1f, 0xffffffff;
}""")
_LOAD_CONSTANT = tl.constexpr("ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_NEW = tl.constexpr("ld.global.cg.v4.b32 {$0, $1, $2, $3}, [$4];")


@triton.constexpr_function
def _across_ptx(mask):
    return f"shfl.sync.bfly.b32 $0, $1, {mask}, 0x1f, 0xffffffff;"


@triton.constexpr_function
def _load_where_ptx(cached):
    return f"""{{
.reg .pred p;
setp.ne.b32 p, $5, 0;
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
@p ld.global{"" if cached else ".cg"}.v4.b32 {{$0, $1, $2, $3}}, [$4];
}}"""


@triton.jit
def across(value, MASK: tl.constexpr, PTX: tl.constexpr):
    """Fetch an int32 or float32 from the thread of the warp whose number differs by `MASK`."""
    if PTX:
        CODE: tl.constexpr = _across_ptx(MASK)
        REGISTERS: tl.constexpr = "=f,f" if value.dtype == tl.float32 else "=r,r"
        return tl.inline_asm_elementwise(
            CODE, REGISTERS, [value], dtype=value.dtype, is_pure=False, pack=1
        )
    return tl.gather(value, tl.arange(0, value.shape[0]) ^ MASK, 0)


@triton.jit
def warp_number():
    """Return the number of the warp, a scalar that differs by warp; PTX only.

    Warps of a program can branch on it, unlike on tensors. There must be no barrier in a branch.
    """
    return tl.inline_asm_elementwise(_WARP, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _load_words(pointer, mask):
    words, four = pointer.to(tl.pointer_type(tl.int32)), ()
    for i in tl.static_range(4):
        four = four + (tl.load(words + i, mask=mask, other=0),)  # noqa: RUF005
    return four


@triton.jit
def load_constant(pointer, PTX: tl.constexpr):
    """Load four int32 that no kernel writes and that are needed once."""
    if PTX:
        return tl.inline_asm_elementwise(
            _LOAD_CONSTANT, "=r,=r,=r,=r,l", [pointer.to(tl.int64)],
            dtype=(tl.int32,) * 4, is_pure=False, pack=1,
        )  # fmt: skip
    return _load_words(pointer, tl.full(pointer.shape, 1, tl.int1))


@triton.jit
def load_new(pointer, PTX: tl.constexpr):
    """Load four int32 that another kernel may just have written, past the L1 cache."""
    if PTX:
        return tl.inline_asm_elementwise(
            _LOAD_NEW, "=r,=r,=r,=r,l", [pointer.to(tl.int64)],
            dtype=(tl.int32,) * 4, is_pure=False, pack=1,
        )  # fmt: skip
    return _load_words(pointer, tl.full(pointer.shape, 1, tl.int1))


@triton.jit
def load_where(pointer, mask, CACHED: tl.constexpr, PTX: tl.constexpr):
    """Load four int32 where `mask`, by way of the L1 cache if `CACHED`; elsewhere zeros."""
    if PTX:
        CODE: tl.constexpr = _load_where_ptx(CACHED)
        return tl.inline_asm_elementwise(
            CODE, "=&r,=&r,=&r,=&r,l,r", [pointer.to(tl.int64), mask.to(tl.int32)],
            dtype=(tl.int32,) * 4, is_pure=False, pack=1,
        )  # fmt: skip
    return _load_words(pointer, mask)
