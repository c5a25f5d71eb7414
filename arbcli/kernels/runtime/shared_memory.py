"""Shared memory, and asynchronous copies to it from global memory, per warp.

Triton does not expose this, so it is PTX: `cp.async`, from compute capability 8.0, copies without
passing through registers. Kernels that are bound by memory use it: with ordinary loads, the data in
flight would need more registers than there are, and the compiler would delay the loads.

A warp starts copies, commits them as a group, and waits for all but its latest groups; other warps
are not involved. Addresses are int32, one a thread.

Copies do not run in the interpreter. Functions with a parameter `PTX` do: without it, addresses
point to the launch's own global memory, which `memory_of` returns in place of shared memory.
"""

from arbcli.kernels.runtime._triton import tl, triton

_COMMIT = tl.constexpr("cp.async.commit_group; mov.b32 $0, $1;")
_FENCE = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, $1;")
_WRITE = tl.constexpr("st.shared.b32 [$1], $2; mov.b32 $0, $1;")
_WRITE_WHERE = tl.constexpr("""{
.reg .pred p;
setp.ne.b32 p, $3, 0;
@p st.shared.b32 [$1], $2;
mov.b32 $0, $1;
}""")
_WRITE_TWO = tl.constexpr("st.shared.v2.b32 [$1], {$2, $3}; mov.b32 $0, $1;")
_WRITE_FOUR = tl.constexpr("st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, $1;")
_READ = tl.constexpr("ld.shared.b32 $0, [$1];")
_READ_FOUR = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
_READ_FOUR_WHERE = tl.constexpr("""{
.reg .pred p;
setp.ne.b32 p, $5, 0;
@p ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];
}""")


@triton.constexpr_function
def _allocate_ptx(size):
    return f".shared .align 16 .b8 staged[{size}];\nmov.b32 $0, staged;"


@triton.constexpr_function
def _copy_ptx(cached):
    return f"""{{
.reg .pred p;
setp.ne.b32 p, $4, 0;
mov.b32 $0, 0;
@p cp.async.{"ca" if cached else "cg"}.shared.global [$1], [$2], 16, $3;
}}"""


@triton.constexpr_function
def _wait_ptx(latest):
    return f"cp.async.wait_group {latest}; bar.warp.sync 0xffffffff; mov.b32 $0, $1;"


@triton.jit
def _execute(PTX: tl.constexpr, thread):
    tl.inline_asm_elementwise(PTX, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def allocate(SIZE: tl.constexpr):
    """Reserve up to 48 KB for a program, once in a kernel: the start address, a scalar.

    The compiler may compute a tensor again for another layout, with several elements per thread,
    and the memory must be declared only once: the address is a scalar.
    """
    PTX: tl.constexpr = _allocate_ptx(SIZE)
    return tl.inline_asm_elementwise(PTX, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def memory_of(instead_ptr, thread, SIZE: tl.constexpr, PTX: tl.constexpr):
    """Reserve memory like `allocate`; return its start, the same in all threads.

    Args:
        instead_ptr: global memory without PTX, `SIZE` bytes for each program of the launch; unused
            with PTX.
        thread: indices of the threads.
        SIZE: size in bytes, a multiple of 16.
        PTX: whether to use PTX.
    """
    if PTX:
        start = allocate(SIZE)
    else:
        program = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
        start = instead_ptr + program.to(tl.int64) * SIZE
    return start + tl.zeros_like(thread)


@triton.jit
def copy(target, source, there, some, CACHED: tl.constexpr):
    """Start copying 16 bytes per thread where `some`; write zeros where not `there`."""
    PTX: tl.constexpr = _copy_ptx(CACHED)
    tl.inline_asm_elementwise(
        PTX, "=r,r,l,r,r", [target, source, tl.where(there, 16, 0), some.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def commit(thread):
    """Commit the copies since the last commit as a group, for `wait_for_copies`."""
    _execute(_COMMIT, thread)


@triton.jit
def wait_for_copies(LATEST: tl.constexpr, thread):
    """Wait for all copies of the warp except those of its latest `LATEST` groups."""
    PTX: tl.constexpr = _wait_ptx(LATEST)
    _execute(PTX, thread)


@triton.jit
def wait_for_warp(thread):
    """Wait for all threads of the warp, so that what they have read can be overwritten."""
    _execute(_FENCE, thread)


@triton.jit
def _words(address, DTYPE: tl.constexpr):
    return address.to(tl.pointer_type(DTYPE))


@triton.jit
def write(address, value, PTX: tl.constexpr):
    """Write an int32 or float32."""
    if PTX:
        REGISTERS: tl.constexpr = "=r,r,f" if value.dtype == tl.float32 else "=r,r,r"
        tl.inline_asm_elementwise(
            _WRITE, REGISTERS, [address, value], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(_words(address, value.dtype), value)


@triton.jit
def write_where(address, value, mask, PTX: tl.constexpr):
    """Write an int32 or float32 where `mask`."""
    if PTX:
        REGISTERS: tl.constexpr = "=r,r,f,r" if value.dtype == tl.float32 else "=r,r,r,r"
        tl.inline_asm_elementwise(
            _WRITE_WHERE, REGISTERS, [address, value, mask.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(_words(address, value.dtype), value, mask=mask)


@triton.jit
def write_two(address, a, b, PTX: tl.constexpr):
    """Write two int32, side by side."""
    if PTX:
        tl.inline_asm_elementwise(
            _WRITE_TWO, "=r,r,r,r", [address, a, b], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(_words(address, tl.int32), a)
        tl.store(_words(address, tl.int32) + 1, b)


@triton.jit
def write_four(address, words, PTX: tl.constexpr = True):
    """Write four int32; other threads of the warp may read them after `wait_for_warp`."""
    if PTX:
        tl.inline_asm_elementwise(
            _WRITE_FOUR, "=r,r,r,r,r,r", [address, words[0], words[1], words[2], words[3]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        for i in tl.static_range(4):
            tl.store(_words(address, tl.int32) + i, words[i])


@triton.jit
def read_float(address, PTX: tl.constexpr):
    """Read a float32."""
    if PTX:
        value = tl.inline_asm_elementwise(
            _READ, "=f,r", [address], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        value = tl.load(_words(address, tl.float32))
    return value


@triton.jit
def read_four(address, PTX: tl.constexpr = True):
    """Read four int32."""
    if PTX:
        four = tl.inline_asm_elementwise(
            _READ_FOUR, "=r,=r,=r,=r,r", [address], dtype=(tl.int32,) * 4, is_pure=False, pack=1
        )
    else:
        four = ()
        for i in tl.static_range(4):
            four = four + (tl.load(_words(address, tl.int32) + i),)  # noqa: RUF005
    return four


@triton.jit
def read_four_where(address, mask, old, PTX: tl.constexpr = True):
    """Read four int32 where `mask`; elsewhere keep those of `old`."""
    if PTX:
        four = tl.inline_asm_elementwise(
            _READ_FOUR_WHERE, "=r,=r,=r,=r,r,r,0,1,2,3",
            [address, mask.to(tl.int32), old[0], old[1], old[2], old[3]],
            dtype=(tl.int32,) * 4, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        four = ()
        for i in tl.static_range(4):
            word = tl.load(_words(address, tl.int32) + i, mask=mask, other=0)
            four = four + (tl.where(mask, word, old[i]),)  # noqa: RUF005
    return four
