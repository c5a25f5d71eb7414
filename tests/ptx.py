"""Execute compiled kernels without a GPU: their PTX, all threads of a program in step.

Triton's interpreter shows whether a kernel is right, and this whether it is right once it is
compiled, PTX that it contains included. It knows the instructions that kernels are compiled to for
an H200, and no more; not the matrix units of a warp group, nor the copy engine. Where threads of a
program part, those that are after go on first, and all meet at a barrier. What is copied to shared
memory is there when it has been waited for, and not before. Addresses have to be somebody's, and
aligned.
"""

import ctypes
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from arbcli.verify.variants import Launch, recorded_launches, type_of

SLACK = 16
"""Bytes around a tensor that may be read: words are whole where rows begin at any byte."""
TYPES = {
    f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}")
    for kind in "bsu"
    for bits in (8, 16, 32, 64)
} | {"f32": np.dtype("f4"), "f64": np.dtype("f8")}
OPERATORS = {
    "add": np.add, "sub": np.subtract, "min": np.fmin, "max": np.fmax,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": lambda a, b: ~(a == b),
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
}  # fmt: skip
"""Comparisons that end in u are true where a number is none."""


def parse(ptx: str, shared_bytes: int) -> tuple:
    """Find parameters, bytes of shared memory by name, instructions, and where labels are.

    A thread's local memory is found by name alone: it has `LOCAL_BYTES`.
    """
    ptx = re.sub(r"//[^\n]*|\.(file|loc|pragma)\b[^\n]*", "", ptx)
    shared = re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)\[(\d*)\]", ptx)
    entry = ptx.partition(".entry")[2].partition(".section")[0]
    head, _, body = entry.partition("{")
    parameters = re.findall(r"(\w+_param_\d+)", head)
    instructions, labels = [], {}
    for statement in body.split(";"):
        text = statement
        while begin := re.match(r"[\s{}]+|(\$\w+):", text):
            if begin[1]:
                labels[begin[1]] = len(instructions)
            text = text[begin.end() :]
        if not text or text.startswith("."):
            continue
        guard, inverted, name, rest = re.match(
            r"(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)", text, re.DOTALL
        ).group(2, 1, 3, 4)
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}]+", rest)
        instructions.append((name.split("."), operands, guard, bool(inverted)))
    sizes = {name: int(size or shared_bytes) for name, size in shared}
    return parameters, sizes, instructions, labels


def names(operand: str) -> list[str]:
    """Split a vector of registers; a single one is a vector too."""
    return [name.strip() for name in operand.strip("{}").split(",")]


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype("u4") << 16).view("f4")


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype("f4").view("u4").astype("u8")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u2")


LOCAL, LOCAL_BYTES, PARAMETERS = 1 << 30, 4096, 1 << 31
"""Addresses of a thread's own memory and of parameters, which no other space has."""


class Program:
    """A program of a launch; registers are arrays of uint64, or of bool, one element a thread."""

    def __init__(
        self, parsed: tuple, threads: int, grid: tuple, index: tuple, arguments: list, memory: list
    ):
        self.grid = grid
        parameters, shared, self.instructions, self.labels = parsed
        self.threads, self.index, self.memory = threads, index, memory
        self.parameters = dict(zip(parameters, [*arguments, 0, 0], strict=False))
        self.registers: dict[str, np.ndarray] = {}
        self.shared = np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8)
        self.symbols = {name: 4096 + 65536 * i for i, name in enumerate(shared)}
        self.symbols |= {"__local_depot0": LOCAL}
        self.symbols |= {name: PARAMETERS + i for i, name in enumerate(self.parameters)}
        self.local = np.full((threads, LOCAL_BYTES), 255, "u1")
        self.ranges = [(self.symbols[name], self.symbols[name] + shared[name]) for name in shared]
        self.copies, self.commits = [], []

    def run(self) -> None:
        end = len(self.instructions)
        going = {0: np.ones(self.threads, bool)}  # threads by the instruction they are at
        while going:
            at = min(going)
            here = going.pop(at)
            if at == end:
                continue
            (name, *how), operands, guard, inverted = self.instructions[at]
            self.mask = here & (self.registers[guard] ^ inverted) if guard else here
            if name in ("bra", "ret"):
                target = self.labels[operands[0]] if name == "bra" else end
                turns = ((target, self.mask), (at + 1, here & ~self.mask))
            else:
                parted = name == "bar" and how[0] != "warp" and going
                assert not parted, "not all threads meet at a barrier"
                with np.errstate(all="ignore"):
                    getattr(self, f"_{name}", self._operate)(name, how, operands)
                turns = ((at + 1, here),)
            for place, some in turns:
                if some.any():
                    going[place] = going[place] | some if place in going else some

    def read(self, operand: str, kind: str = "b64") -> np.ndarray:
        if operand in self.registers:
            value = self.registers[operand]
        elif operand in self.symbols:
            value = np.full(self.threads, self.symbols[operand], "u8")
        elif operand == "%tid.x":
            value = np.arange(self.threads, dtype="u8")
        elif operand.startswith(("%ctaid", "%nctaid")):
            of = self.index if operand[1] == "c" else self.grid
            value = np.full(self.threads, of["xyz".index(operand[-1])], "u8")
        elif operand.startswith("%"):  # never written: half of a word that nobody reads
            value = np.full(self.threads, 0xBAD0BAD0BAD0BAD0, "u8")
        else:
            number = int(re.sub(r"^0[fd]", "0x", operand).rstrip("U"), 0)
            value = np.full(self.threads, number & (2**64 - 1), "u8")
        if value.dtype == bool:
            return value
        dtype = TYPES[kind]
        return value.astype(f"u{dtype.itemsize}").view(dtype)

    def write(self, operand: str, value: np.ndarray) -> None:
        if value.dtype != bool:
            sign = value.dtype.kind == "i" and value.dtype.itemsize < 4
            value = value.astype("i4") if sign else value
            value = value.view(f"u{value.dtype.itemsize}").astype("u8")
        unknown = value ^ value.dtype.type(0xBAD if value.dtype != bool else True)
        old = self.registers.get(operand, unknown)
        self.registers[operand] = np.where(self.mask, value, old)

    def _operate(self, name, how, operands):
        kind = how[-1]
        if name == "setp":
            value = OPERATORS[how[0]](self.read(operands[1], kind), self.read(operands[2], kind))
        elif kind in ("s16x2", "u16x2"):
            halves = "i2" if kind == "s16x2" else "u2"
            a, b = (self.read(operand, "b32").view(halves) for operand in operands[1:])
            value = OPERATORS[name](a, b).view("u4")
        elif kind == "bf16x2":
            assert name == "max"
            assert how[0] == "NaN"
            a, b = (self.read(operand, "b32").view("u2") for operand in operands[1:])
            value = np.where(np.isnan(from_bf16(a)) | np.isnan(from_bf16(b)), np.nan,
                             np.fmax(from_bf16(a), from_bf16(b)))  # fmt: skip
            value = to_bf16(value).view("u4")
        elif kind == "pred":
            value = OPERATORS[name](self.registers[operands[1]], self.registers[operands[2]])
        else:
            value = OPERATORS[name](self.read(operands[1], kind), self.read(operands[2], kind))
            value = value.astype(TYPES[kind])
        self.write(operands[0], value)

    def _mov(self, name, how, operands):
        kind, (target, source) = how[-1], operands
        if kind == "pred":
            value = self.registers.get(source)
            self.write(target, np.full(self.threads, source != "0") if value is None else value)
        elif target[0] == "{":
            bits = 8 * TYPES[kind].itemsize // len(names(target))
            for i, part in enumerate(names(target)):
                self.write(part, self.read(source) >> np.uint64(bits * i) & np.uint64(2**bits - 1))
        elif source[0] == "{":
            bits = 8 * TYPES[kind].itemsize // len(names(source))
            parts = (self.read(part, f"b{bits}").astype("u8") for part in names(source))
            value = np.zeros(self.threads, "u8")
            for i, part in enumerate(parts):
                value |= part << np.uint64(bits * i)
            self.write(target, value)
        else:
            self.write(target, self.read(source, kind))

    def _cvta(self, name, how, operands):
        self.write(operands[0], self.read(operands[1]))  # a space has addresses of its own

    def _cvt(self, name, how, operands):
        to, of = how[-2:]
        if to == "bf16x2":
            high, low = (to_bf16(self.read(operand, "f32")) for operand in operands[1:])
            self.write(operands[0], high.astype("u4") << 16 | low)
        elif to == "bf16":
            self.write(operands[0], to_bf16(self.read(operands[1], of)))
        elif of == "bf16":
            self.write(operands[0], from_bf16(self.read(operands[1], "b16")))
        else:
            value = self.read(operands[1], of)
            rounded = {"rmi": np.floor, "rzi": np.trunc}.get(how[0], np.array)(value)
            self.write(operands[0], rounded.astype(TYPES[to]))

    def _unary(self, name, how, operands):
        operator = {"neg": np.negative, "not": np.invert, "abs": np.abs}[name]
        self.write(operands[0], operator(self.read(operands[1], how[-1])))

    _neg = _not = _abs = _unary

    def _selp(self, name, how, operands):
        a, b = (self.read(operand, how[-1]) for operand in operands[1:3])
        self.write(operands[0], np.where(self.registers[operands[3]], a, b))

    def _shl(self, name, how, operands):
        value, by = self.read(operands[1], how[-1]), self.read(operands[2], "b32")
        shift = np.left_shift if name == "shl" else np.right_shift
        self.write(operands[0], shift(value, by.astype(value.dtype)))

    _shr = _shl

    def _shf(self, name, how, operands):
        low, high, by = (self.read(operand, "b32").astype("u8") for operand in operands[1:])
        self.write(operands[0], ((high << np.uint64(32) | low) >> (by & 31)).astype("u4"))

    def _bfe(self, name, how, operands):
        value, begin, bits = (self.read(operand, "b32") for operand in operands[1:])
        left = value << (32 - begin - bits)
        self.write(operands[0], left.view(TYPES[how[-1]]) >> (32 - bits).astype(TYPES[how[-1]]))

    def _mul(self, name, how, operands):
        if how[-1] == "bf16":
            a, b = (from_bf16(self.read(operand, "b16")) for operand in operands[1:])
            self.write(operands[0], to_bf16(a * b))
            return
        dtype = TYPES[how[-1]]
        if how[0] in ("wide", "hi"):
            dtype = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        a, b = (self.read(operand, how[-1]).astype(dtype) for operand in operands[1:3])
        value = a * b
        if how[0] == "hi":
            value = (value >> 4 * dtype.itemsize).astype(TYPES[how[-1]])
        if name == "mad":
            kind = next(kind for kind, found in TYPES.items() if found == value.dtype)
            value = value + self.read(operands[3], kind)
        self.write(operands[0], value)

    _mad = _mul

    def _fma(self, name, how, operands):
        if how[-1] == "bf16x2":
            a, b, c = (self.read(operand, "b32") for operand in operands[1:])
            halves = [
                to_bf16(from_bf16(x & 0xFFFF).astype("f8") * from_bf16(y & 0xFFFF)
                        + from_bf16(z & 0xFFFF))
                for x, y, z in ((a, b, c), (a >> 16, b >> 16, c >> 16))
            ]  # fmt: skip
            self.write(operands[0], halves[1].astype("u4") << 16 | halves[0])
        elif how[-1] == "bf16":
            a, b, c = (from_bf16(self.read(operand, "b16")) for operand in operands[1:])
            self.write(operands[0], to_bf16(a.astype("f8") * b + c))
        else:
            kind = how[-1]
            a, b, c = (self.read(operand, kind).astype("f8") for operand in operands[1:])
            self.write(operands[0], (a * b + c).astype(TYPES[kind]))

    def _div(self, name, how, operands):
        a, b = (self.read(operand, how[-1]) for operand in operands[1:])
        if a.dtype.kind == "f":
            self.write(operands[0], a / b)
            return
        b = np.where(b == 0, b.dtype.type(1), b)  # of threads that take no part
        rest = np.fmod(a, b)
        self.write(operands[0], rest if name == "rem" else (a - rest) // b)

    _rem = _div

    def _function(self, name, how, operands):
        function = {
            "rsqrt": lambda x: x**-0.5, "sqrt": np.sqrt, "ex2": np.exp2, "lg2": np.log2,
            "rcp": np.reciprocal,
        }[name]  # fmt: skip
        value = self.read(operands[1], how[-1])
        self.write(operands[0], function(value.astype("f8")).astype(value.dtype))

    _rsqrt = _sqrt = _ex2 = _lg2 = _rcp = _function

    def _popc(self, name, how, operands):
        bits = self.read(operands[1], how[-1]).view("u1").reshape(self.threads, -1)
        self.write(operands[0], np.unpackbits(bits, axis=1).sum(1).astype("u4"))

    def _redux(self, name, how, operands):
        value = self.read(operands[1], how[-1]).reshape(-1, 32)
        total = {"add": np.sum, "max": np.max, "min": np.min}[how[1]](value, axis=1)
        self.write(operands[0], total.astype(value.dtype).repeat(32))

    def _atom(self, name, how, operands):
        dtype = TYPES[how[-1]]
        old, added = np.zeros(self.threads, dtype), self.read(operands[2], how[-1])
        for thread, data in self._bytes(how, operands[1], dtype.itemsize):
            old[thread] = data.view(dtype)[0]
            data.view(dtype)[:] += added[thread]
        self.write(operands[0], old)

    def _matrices(self, name, how, registers, operand):
        """Give to threads, or take from them, 8 by 8 matrices of 16 bits, a row an address."""
        lane, warp = np.arange(self.threads) % 32, np.arange(self.threads) // 32 * 32
        addresses = self._addresses(operand)
        for i, register in enumerate(names(registers)):
            first = warp + 8 * i
            if "trans" in how:
                rows = [addresses[first + 2 * (lane % 4) + half] for half in range(2)]
                at = np.stack([row + 2 * (lane // 4) + j for row in rows for j in range(2)], 1)
            else:
                at = (addresses[first + lane // 4] + 4 * (lane % 4))[:, None] + np.arange(4)
            if name == "ldmatrix":
                words = self.shared[at]
                self.write(register, np.ascontiguousarray(words).view("u4")[:, 0])
            else:
                self.shared[at] = self.read(register, "b32").view("u1").reshape(-1, 4)

    def _ldmatrix(self, name, how, operands):
        self._matrices(name, how, *operands)

    def _stmatrix(self, name, how, operands):
        self._matrices(name, how, *operands[::-1])

    def _lop3(self, name, how, operands):
        a, b, c = (self.read(operand, "b32") for operand in operands[1:4])
        table, value = int(operands[4], 0), np.zeros(self.threads, "u4")
        for i in range(8):
            if table >> i & 1:
                value |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        self.write(operands[0], value)

    def _prmt(self, name, how, operands):
        a, b, selector = (self.read(operand, "b32").astype("u8") for operand in operands[1:])
        value = np.zeros(self.threads, "u8")
        for i in range(4):
            which = selector >> np.uint64(4 * i)
            byte = (b << np.uint64(32) | a) >> (8 * (which & 7)) & 255
            byte = np.where(which & 8, 255 * (byte >> 7), byte)  # its sign alone
            value |= byte << np.uint64(8 * i)
        self.write(operands[0], value)

    def _shfl(self, name, how, operands):
        value, lane, limits = (self.read(operand, "b32") for operand in operands[1:4])
        thread = np.arange(self.threads, dtype="u4")
        fixed = limits >> 8 & 31
        source = thread & fixed | lane & ~fixed & 31
        if "bfly" in how:
            source = (thread ^ lane) & 31
        elif "up" in how:
            source = np.where((thread & 31) >= lane, (thread - lane) & 31, thread & 31)
        self.write(operands[0], value[thread & ~np.uint32(31) | source])

    def _dp4a(self, name, how, operands):
        assert how == ["s32", "s32"]
        a, b = (self.read(part, "b32").view("i1").reshape(-1, 4) for part in operands[1:3])
        self.write(operands[0], (a.astype("i4") * b).sum(1, "i4") + self.read(operands[3], "s32"))

    def _multiply_bytes(self, operands, of_first):
        lane = np.arange(self.threads) % 32
        warp, g, c = np.arange(self.threads) // 32, lane // 4, lane % 4
        target, *parts = map(names, operands)
        a, b = (np.zeros((self.threads // 32, *size), "i4") for size in ((16, 32), (32, 8)))
        sums = np.zeros((self.threads // 32, 16, 8), "i4")
        for byte in range(4):
            for i, part in enumerate(parts[0]):
                value = self.read(part, "b32").view(of_first).reshape(-1, 4)[:, byte]
                a[warp, g + 8 * (i % 2), 4 * c + 16 * (i // 2) + byte] = value
            for i, part in enumerate(parts[1]):
                value = self.read(part, "b32").view("i1").reshape(-1, 4)[:, byte]
                b[warp, 4 * c + 16 * i + byte, g] = value
        for i, part in enumerate(parts[2]):
            sums[warp, g + 8 * (i // 2), 2 * c + i % 2] = self.read(part, "s32")
        sums += (a.astype("f4") @ b.astype("f4")).astype("i4")  # below 2**24, so exact
        for i, part in enumerate(target):
            self.write(part, sums[warp, g + 8 * (i // 2), 2 * c + i % 2])

    def _mma(self, name, how, operands):
        if "m16n8k32" in how:
            assert how[-4] == how[-1] == "s32"
            assert how[-2] == "s8"
            self._multiply_bytes(operands, {"u8": "u1", "s8": "i1"}[how[-3]])
            return
        single = "m16n8k8" in how
        assert how[-4:] == ["f32", "tf32", "tf32", "f32"] if single else "m16n8k16" in how
        lane = np.arange(self.threads) % 32
        warp, g, c = np.arange(self.threads) // 32, lane // 4, lane % 4
        target, *parts = map(names, operands)
        inner = 8 if single else 16
        a, b = (np.zeros((self.threads // 32, *size)) for size in ((16, inner), (inner, 8)))
        sums = np.zeros((self.threads // 32, 16, 8))
        for half in range(1 if single else 2):

            def numbers(part: str, half: int = half) -> np.ndarray:
                bits = self.read(part, "b32")
                if single:  # 13 bits of a float32 are not looked at
                    return (bits & 0xFFFFE000).astype("u4").view("f4")
                return from_bf16(bits >> 16 * half & 0xFFFF)

            step = 1 if single else 2
            for i, part in enumerate(parts[0]):
                a[warp, g + 8 * (i % 2), step * c + inner // 2 * (i // 2) + half] = numbers(part)
            for i, part in enumerate(parts[1]):
                b[warp, step * c + inner // 2 * i + half, g] = numbers(part)
        for i, part in enumerate(parts[2]):
            sums[warp, g + 8 * (i // 2), 2 * c + i % 2] = self.read(part, "f32")
        sums = (sums + a @ b).astype("f4")
        for i, part in enumerate(target):
            self.write(part, sums[warp, g + 8 * (i // 2), 2 * c + i % 2])

    def _bar(self, name, how, operands):
        """Threads are in step anyway."""

    def _cp(self, name, how, operands):
        if how[1] == "commit_group":
            self.commits.append(self.copies)
            self.copies = []
        elif how[1] == "wait_group":
            while len(self.commits) > int(operands[0]):
                for at, data in self.commits.pop(0):
                    self.shared[at : at + len(data)] = data
        else:
            (target, source), size = map(self._addresses, operands[:2]), int(operands[2], 0)
            some = self.read((operands[3:] or operands[2:])[0], "b32")
            for thread in np.flatnonzero(self.mask):
                at, data = int(target[thread]), np.zeros(size, "u1")
                assert any(begin <= at <= end - size for begin, end in self.ranges)
                assert at % size == 0, "not aligned"
                if some[thread]:
                    data[: some[thread]] = self._global(int(source[thread]), int(some[thread]))
                self.shared[at : at + size] = 255  # nobody's before it is waited for
                self.copies.append((at, data))

    def _addresses(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[] ").partition("+")
        return self.read(base.strip()).astype("i8") + int(offset.replace(" ", "") or 0)

    def _global(self, address: int, size: int) -> np.ndarray:
        assert address % min(size, 16) == 0, f"{address:#x} is not aligned"
        for begin, data in self.memory:
            if begin <= address and address + size <= begin + len(data):
                return data[address - begin : address - begin + size]
        raise IndexError(f"{size} bytes at {address:#x} are nobody's")

    def _bytes(self, how: list[str], operand: str, size: int) -> Iterator[tuple[int, np.ndarray]]:
        addresses = self._addresses(operand)
        for thread in np.flatnonzero(self.mask):
            address = int(addresses[thread])
            if any(space.startswith("shared") for space in how):
                assert address % min(size, 16) == 0
                yield thread, self.shared[address : address + size]
            elif LOCAL <= address < LOCAL + LOCAL_BYTES:
                yield thread, self.local[thread, address - LOCAL : address - LOCAL + size]
            else:
                yield thread, self._global(address, size)

    def _ld(self, name, how, operands):
        target, source = operands
        if how[0] == "param":
            values = np.array([*self.parameters.values()], "u8")
            self.write(
                target, values[np.clip(self._addresses(source) - PARAMETERS, 0, len(values) - 1)]
            )
            return
        dtype = TYPES[how[-1]]
        loaded = np.zeros((self.threads, len(names(target)) * dtype.itemsize), "u1")
        for thread, data in self._bytes(how, source, loaded.shape[1]):
            loaded[thread] = data
        for part, value in zip(names(target), loaded.view(dtype).T, strict=True):
            self.write(part, np.ascontiguousarray(value))

    def _st(self, name, how, operands):
        target, source = operands
        values = np.stack([self.read(part, how[-1]) for part in names(source)], 1)
        values = values.view("u1").reshape(self.threads, -1)
        for thread, data in self._bytes(how, target, values.shape[1]):
            data[:] = values[thread]


def _execute(launch: Launch) -> None:
    """Compile a launch for an H200 and execute all of its programs."""
    function, grid, named, constants, options = launch
    signature = {
        name: "constexpr" if name in constants else type_of(named[name])
        for name in function.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(function.arg_names)
        if signature[name][0] == "*" and named[name].data_ptr() % 16 == 0
    }
    source = ASTSource(function, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    memory, arguments = {}, []
    for name in function.arg_names:
        value = named.get(name)
        if isinstance(value, torch.Tensor) and value.numel() == 0:
            arguments.append(0)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            at, size = storage.data_ptr(), storage.nbytes()
            if at not in memory:
                there = np.frombuffer((ctypes.c_uint8 * size).from_address(at), np.uint8)
                memory[at] = (len(memory) + 1) << 40, there, np.pad(there, SLACK)
            arguments.append(memory[at][0] + SLACK + value.data_ptr() - at)
        elif name in named:
            real = isinstance(value, float)
            arguments.append(int(np.float32(value).view("u4")) if real else value & (2**64 - 1))
    parsed = parse(compiled.asm["ptx"], compiled.metadata.shared)
    for index in np.ndindex(*grid):
        regions = [(begin, data) for begin, _, data in memory.values()]
        threads = 32 * options.get("num_warps", 4)
        Program(parsed, threads, grid, index, arguments, regions).run()
    for _, there, data in memory.values():
        there[:] = data[SLACK:-SLACK]


def emulated() -> AbstractContextManager[None]:
    """Let launches of kernels be executed here."""
    return recorded_launches(_execute)
