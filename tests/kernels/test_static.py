"""Mistakes that no interpreter and no small case can show, read off the sources of all kernels.

The interpreter counts in Python's integers or numpy's, and knows no alignment; a GPU wraps around
at 2**31 and refuses to load what is not aligned.
"""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from syntax import children, parsed, walk

from arbcli.kernels.sources import kernel_files

FILES = kernel_files()
OF_A_ROW = {"k", "offs_b", "offs_g", "block", "j", "kv", "h", "g"}
"""Names of columns, their bytes and groups, and heads: products of them stay in one row or
position, and are int32."""
NARROW = {"decode_weight"}
"""Files whose kernels are given matrices of fewer than 2**31 weights."""
OF_A_STEP = {
    "append_position", "attend_ahead", "attend_parts", "decode_attention", "decode_compressed",
    "decode_latent", "mamba_step", "prepacked_rows", "route_position", "row_by_row", "row_matmul",
    "choose_byte",
}  # fmt: skip
"""Files whose kernels step at most 64 texts: numbers of theirs are products of int32."""
OF_PROGRAMS = {"merged", "newton_schulz", "shared_memory"}
"""Files whose kernels multiply numbers of programs by what each of these has: tables and parts."""
FITTING = {
    "t[:, None] * HALF", "width * digit", "width * (4 - plane)",
    "tl.program_id(0) * (16 * HEIGHT * N_WARPS)",
}  # fmt: skip
"""Places in a table of angles, whose positions are below 2**24, columns of a block, and the first
row of a tile."""
TILE = re.compile("BLOCK|STEPS|ROWS|TILES|GROUP|LANES|HEIGHT|ABREAST")
"""Beginnings of the names of sizes of tiles."""
ADDRESS = re.compile("(^|_)ptrs?$|pointer")
NUMBERS = {"tl.load", "tl.sum", "tl.max"}
"""These return what is in tensors, of a type that is chosen elsewhere."""


def kernels_of(tree: ast.Module) -> list[ast.FunctionDef]:
    """Find the functions that Triton compiles."""
    return [
        node
        for node in walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


@cache
def kernels_in(file: Path) -> list[ast.FunctionDef]:
    return kernels_of(parsed(file))


@cache
def all_kernels() -> dict[str, ast.FunctionDef]:
    files = (file for file in FILES if file.stem not in NARROW)
    return {f"{f.stem}: {k.name}": k for f in files for k in kernels_in(f)}


def is_cast(node: ast.AST) -> bool:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return called and node.func.attr == "to" and "tl.int64" in map(ast.unparse, node.args)


def is_wide(node: ast.AST, names: set[str]) -> bool:
    """Whether an int64 is in an expression, which is one then."""
    inside = [*walk(node)]
    return any(map(is_cast, inside)) or any(
        isinstance(part, ast.Name) and part.id in names for part in inside
    )


def is_narrow(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression counts by the number of a program, an int32."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.program_id":
        return True
    if isinstance(node, ast.Compare) or (
        isinstance(node, ast.Call) and ast.unparse(node.func) in NUMBERS
    ):
        return False
    if isinstance(node, ast.Name):
        return node.id in names
    return any(is_narrow(part, names) for part in children(node))


@cache
def assigned(kernel: ast.FunctionDef) -> list[tuple[str, ast.AST]]:
    """List (name, expression) of assignments, in the order of the source."""
    found = []
    for node in walk(kernel):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = zip(target.elts, node.value.elts) if several else [(target, node.value)]  # noqa: B905
            found += [(to.id, value) for to, value in pairs if isinstance(to, ast.Name)]
    return found


def names_of(kernel: ast.FunctionDef, given: set[str]) -> tuple[set[str], set[str]]:
    """Find the (narrow, wide) names of a kernel, some of whose arguments are narrow."""
    return _names_of(kernel, frozenset(given))


@cache
def _names_of(kernel: ast.FunctionDef, given: frozenset[str]) -> tuple[set[str], set[str]]:
    narrow, wide, pairs = {*given}, set(), assigned(kernel)
    for _ in range(3):  # as deep as names follow from one another
        wide |= {name for name, value in pairs if is_wide(value, wide)}
        narrow |= {name for name, value in pairs if is_narrow(value, narrow)} - wide
    return narrow - wide - OF_A_ROW, wide


def is_tile(node: ast.AST) -> bool:
    """Whether an expression is a size of tiles, or of a grid: products of it count rows."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "tl.num_programs"
    parts = [part for part in walk(node) if isinstance(part, ast.Name | ast.Call)]
    return all(isinstance(part, ast.Name) and TILE.match(part.id) for part in parts)


def is_address(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and ADDRESS.search(node.id) is not None


def is_value(node: ast.AST) -> bool:
    """Whether an expression loads, compares or chooses: it is no longer the number of a place."""
    return any(isinstance(part, ast.Call | ast.Compare) for part in walk(node))


def products_in(node: ast.AST, narrow: set[str], wide: set[str]) -> set[str]:
    """Find products of int32 numbers by program with anything but sizes of tiles."""
    return {
        ast.unparse(part)
        for part in walk(node)
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult)
        for one, other in ((part.left, part.right), (part.right, part.left))
        if is_narrow(one, narrow) and not is_tile(other) and not is_wide(part, wide)
    }


def narrow_addresses(kernel: ast.FunctionDef, given: set[str]) -> set[str]:
    """List such products that addresses are made of, whatever they are multiplied by."""
    narrow, wide = names_of(kernel, given)
    made = {
        name: products
        for name, value in assigned(kernel)
        if not is_address(ast.Name(name)) and (products := products_in(value, narrow, wide))
    }
    for _ in range(3):  # as deep as addresses follow from one another
        for name, value in assigned(kernel):
            parts = {part.id for part in walk(value) if isinstance(part, ast.Name)}
            of_parts = {each for part in parts & made.keys() for each in made[part]}
            if of_parts and not (is_address(ast.Name(name)) or is_value(value)):
                made[name] = made.get(name, set()) | of_parts
    found: set[str] = set()
    for node in walk(kernel):
        added = node.value if isinstance(node, ast.AugAssign) and is_address(node.target) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            added = node if any(map(is_address, walk(node))) else None
        if added is not None:
            found |= products_in(added, narrow, wide)
            names = {part.id for part in walk(added) if isinstance(part, ast.Name)}
            found |= {each for name in names & made.keys() for each in made[name]}
    return found - FITTING


def narrow_arguments(kernels: list[ast.FunctionDef]) -> dict[str, set[str]]:
    """Find which arguments are given int32 numbers by program, by the name of the function."""
    named = {kernel.name: [argument.arg for argument in kernel.args.args] for kernel in kernels}
    found: dict[str, set[str]] = {name: set() for name in named}
    for _ in range(2):  # as deep as they call one another
        for kernel in kernels:
            narrow, wide = names_of(kernel, found[kernel.name])
            for node in walk(kernel):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in named:
                    name = ast.unparse(node.func)
                    found[name] |= {
                        argument
                        for argument, value in zip(named[name], node.args, strict=False)
                        if is_narrow(value, narrow) and not is_wide(value, wide)
                    }
    return found


def narrow_products(kernel: ast.FunctionDef, given: set[str]) -> list[str]:
    """List products of strides and int32 numbers of rows, texts, experts .. by program."""
    narrow, wide = names_of(kernel, given)
    return [
        ast.unparse(node)
        for node in walk(kernel)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
        for one, other in ((node.left, node.right), (node.right, node.left))
        if "stride" in ast.unparse(other) and not is_wide(node, wide) and is_narrow(one, narrow)
    ]


def test_rows_are_counted_in_64_bits():
    """A stack, or a table, of more than 2**31 numbers fits into a GPU, and is read by rows."""
    given = narrow_arguments([*all_kernels().values()])
    products = {
        name: narrow_products(kernel, given[kernel.name]) for name, kernel in all_kernels().items()
    }
    assert {name: found for name, found in products.items() if found} == {}
    assert len(products) > 200


def test_addresses_are_made_of_64_bits():
    """By constants too, such as widths of heads: those of 2**31 numbers are not a large batch."""
    found = {}
    for file in (f for f in FILES if f.stem not in OF_A_STEP | OF_PROGRAMS | NARROW):
        kernels = kernels_in(file)
        given = narrow_arguments(kernels)
        for kernel in kernels:
            found[f"{file.stem}: {kernel.name}"] = narrow_addresses(kernel, given[kernel.name])
    assert {name: products for name, products in found.items() if products} == {}
    assert len(found) > 200


@pytest.mark.parametrize(("line", "found"), [
    ("n = tl.program_id(0)\n    tl.load(p_ptr + n * WIDTH)", {"n * WIDTH"}),
    ("n = tl.program_id(0).to(tl.int64)\n    tl.load(p_ptr + n * WIDTH)", set()),
    ("n = tl.program_id(0) * BLOCK_N + tl.arange(0, 8)\n    tl.load(p_ptr + n)", set()),
    ("at = tl.program_id(0) // H * WIDTH\n    tl.load(p_ptr + at)",
     {"tl.program_id(0) // H * WIDTH"}),
    ("n = tl.program_id(0) * WIDTH\n    at = n + 1\n    tl.load(p_ptr + at)",
     {"tl.program_id(0) * WIDTH"}),
    ("p_ptr += tl.program_id(1) * (3 * WIDTH)", {"tl.program_id(1) * (3 * WIDTH)"}),
])  # fmt: skip
def test_an_address_that_is_not_widened_is_found(line, found):
    (kernel,) = kernels_of(ast.parse(f"@triton.jit\ndef kernel(p_ptr, H, WIDTH):\n    {line}"))
    assert narrow_addresses(kernel, set()) == found


@pytest.mark.parametrize(("line", "found"), [
    ("n = tl.program_id(0)\n    tl.load(p + n * stride_n)", ["n * stride_n"]),
    ("n = tl.program_id(0).to(tl.int64)\n    tl.load(p + n * stride_n)", []),
    ("a = (tl.program_id(0) // 2) * 8\n    n = a + tl.arange(0, 8)\n    tl.load(p + n * stride_n)",
     ["n * stride_n"]),
    ("k = tl.program_id(0) * 8\n    tl.load(p + k * stride_k)", []),
    ("p += tl.program_id(1) * stride_b", ["tl.program_id(1) * stride_b"]),
    ("n, e = tl.program_id(0), tl.program_id(1).to(tl.int64)\n    p += e * stride_b", []),
])  # fmt: skip
def test_a_number_that_is_not_widened_is_found(line, found):
    (kernel,) = kernels_of(
        ast.parse(f"@triton.jit\ndef kernel(p, stride_n, stride_b):\n    {line}")
    )
    assert narrow_products(kernel, set()) == found


def test_a_number_that_another_function_multiplies_is_found():
    outer = "@triton.jit\ndef outer(p, stride_n):\n    inner(p, tl.program_id(0){}, stride_n)\n"
    inner = "@triton.jit\ndef inner(p, n, stride_n):\n    tl.load(p + n * stride_n)\n"
    for cast, found in (("", ["n * stride_n"]), (".to(tl.int64)", [])):
        kernels = kernels_of(ast.parse(outer.format(cast) + inner))
        given = narrow_arguments(kernels)
        assert narrow_products(kernels[1], given["inner"]) == found


APART = {"decode_latent: _decode_latent_kernel"}
"""Kernels that leave out of what they load what they have stored."""


def pointer_of(address: ast.AST, made_of: dict[str, str]) -> str | None:
    """Find the pointer that an address is made of."""
    names = [part.id for part in walk(address) if isinstance(part, ast.Name)]
    found = [made_of.get(name, name) for name in names if ADDRESS.search(name) or name in made_of]
    return found[0] if found else None


def vectors_of(kernel: ast.FunctionDef) -> set[str]:
    """List names whose values threads may have each for itself, arguments among them."""
    found = {name.arg for name in kernel.args.args if not ADDRESS.search(name.arg)}
    for _ in range(4):
        for name, value in assigned(kernel):
            one = isinstance(value, ast.Call) and ast.unparse(value.func) in NUMBERS - {"tl.load"}
            names = {part.id for part in walk(value) if isinstance(part, ast.Name)}
            if not one and ("tl.arange" in ast.unparse(value) or names & found):
                found.add(name)
    return found


def missing_barriers(kernel: ast.FunctionDef) -> list[str]:
    """List what threads of a program may do to memory before others have done what must be first.

    A load of what was stored; a store of what every thread loads and computes with; and a
    semaphore, or a flag, that tells of stores.
    """
    vectors, made_of = vectors_of(kernel), dict[str, str]()
    for name, value in assigned(kernel):
        pointer = pointer_of(value, made_of)
        if pointer and "tl.load" not in ast.unparse(value):  # which is no longer an address
            made_of[name] = pointer
    calls = [node for node in walk(kernel) if isinstance(node, ast.Call)]
    calls.sort(key=lambda node: (node.end_lineno, node.end_col_offset))
    inside = {id(part) for call in calls for each in call.args for part in walk(each)}
    stored, loaded, told, found = set[str | None](), set[str](), False, list[str]()
    for call in calls:
        name, text = ast.unparse(call.func), ast.unparse(call.args[0]) if call.args else ""
        if name == "tl.debug_barrier":
            stored, loaded, told = set(), set(), True
        elif name == "tl.store":
            if text in loaded:
                found.append(f"{text} is stored")
            stored, told = stored | {pointer_of(call.args[0], made_of)}, False
        elif name == "tl.load":
            if pointer_of(call.args[0], made_of) in stored:
                found.append(f"{text} is loaded")
            names = {part.id for part in walk(call.args[0]) if isinstance(part, ast.Name)}
            loaded |= set() if names & vectors or id(call) in inside else {text}
        elif name.startswith("tl.atomic"):
            how = [ast.unparse(word.value) for word in call.keywords if word.arg == "sem"]
            if how in (["'release'"], ["'acq_rel'"]) and not told:
                found.append(f"{text} tells")
    return found


def test_threads_wait_for_each_other():
    """Races show rarely, and never in an interpreter."""
    found = {name: missing_barriers(kernel) for name, kernel in all_kernels().items()}
    assert {name for name, missing in found.items() if missing} == APART


@pytest.mark.parametrize(("before", "after", "found"), [
    ("tl.store(p_ptr + n, 1)", "x = tl.load(p_ptr + 2)", ["p_ptr + 2 is loaded"]),
    ("at = p_ptr + n\n    tl.store(at, 1)", "x = tl.load(p_ptr + 2)", ["p_ptr + 2 is loaded"]),
    ("tl.store(p_ptr + n, 1)", "x = tl.load(q_ptr + 2)", []),
    ("x = tl.load(p_ptr)", "tl.store(p_ptr, x + 1)", ["p_ptr is stored"]),
    ("x = tl.load(p_ptr + n)", "tl.store(p_ptr + n, x + 1)", []),
    ("tl.store(p_ptr + n, 1)", "tl.atomic_xchg(q_ptr, 1, sem='release')", ["q_ptr tells"]),
    ("tl.store(p_ptr + n, 1)", "tl.atomic_add(q_ptr, 1, sem='relaxed')", []),
])  # fmt: skip
def test_missing_barrier_is_found(before, after, found):
    source = "@triton.jit\ndef kernel(p_ptr, q_ptr):\n    n = tl.arange(0, 8)\n    {}\n{}    {}\n"
    for barrier, wanted in (("", found), ("    tl.debug_barrier()\n", [])):
        (kernel,) = kernels_of(ast.parse(source.format(before, barrier, after)))
        assert missing_barriers(kernel) == wanted


WAITS = ("tl.debug_barrier", "wait_for_warp", "wait_for_copies", "commit")
BARRIER, WARP = "tl.debug_barrier()", "wait_for_warp(thread)"
COUNTED = {
    "attend_ahead: _attend_ahead_kernel": {BARRIER: 2},
    "attend_parts: _attend_parts_kernel": {BARRIER: 1},
    "decode_weight: _store_staged": {WARP: 2},
    "prepacked_rows: _prepacked_rows_kernel": {
        BARRIER: 1, WARP: 1, "commit(thread)": 2, "wait_for_copies(0, thread)": 2,
        "wait_for_copies(STAGES - 1, thread)": 1,
    },
    "prepacked_rows: _write_units": {WARP: 1},
    "route_position: _route_position_kernel": {BARRIER: 2},
    "row_by_row: _do_rows": {BARRIER: 2},
    "row_by_row: _row_by_row_kernel": {BARRIER: 1},
    "row_matmul: _row_matmul_kernel": {BARRIER: 2},
}  # fmt: skip
"""Waits that the rule does not see: most are between what threads write to shared memory and what
others read there. Tests that execute PTX run all threads in step, and miss none."""


def test_waits_that_the_rule_does_not_see_are_all_there():
    for file in FILES:
        for kernel in kernels_in(file):
            name = f"{file.stem}: {kernel.name}"
            calls = (node for node in walk(kernel) if isinstance(node, ast.Call))
            found = Counter(ast.unparse(call) for call in calls if ast.unparse(call.func) in WAITS)
            assert name in COUNTED or {*found} <= {BARRIER}, name
            assert found == COUNTED.get(name, found), name


BEFORE = {
    "attend_ahead: _attend_ahead_kernel": "cos instead keys position sin values",
    "attend_ahead: _average_parts_kernel": "position",
    "attend_ahead: _keep_accepted_kernel": "addresses sizes",
    "attend_parts: _attend_parts_kernel": "cos instead keys position sin values",
    "decode_attention: load_rotated": "cos sin",
    "decode_latent: _decode_latent_kernel": "cos position sin",
    "route_position: _route_position_kernel": "active encoder last mean x",
    "route_position: _take_chunk_kernel": "begins mean p residual",
    "digits_matmul: _digits_matmul_kernel": "pieces scales",
    "prepacked_rows: _prepacked_rows_kernel": "instead pieces",
    "row_by_row: _row_by_row_kernel": "instead pieces",
    "row_matmul: _row_matmul_kernel": "instead pieces position",
    "choose_bytes: _choose_bytes_kernel": "temperature top_k top_p",
    "mamba_step: _mamba_step_kernel": "bias position rate ring skip state taps",
}
"""Arguments that kernels read before they wait for the kernel before: `overlap` says why."""


def test_results_of_the_kernel_before_are_read_after_the_wait():
    found = {}
    for file in FILES:
        for kernel in kernels_in(file):
            made_of, before = dict[str, str](), set[str]()
            for name, value in assigned(kernel):
                of, text = pointer_of(value, made_of), ast.unparse(value)
                if of and "load" not in text and "dtype" not in text:
                    made_of[name] = of
            calls = [node for node in walk(kernel) if isinstance(node, ast.Call)]
            waits = [call.lineno for call in calls if ast.unparse(call.func) == "wait_for_last"]
            for call in calls if waits else ():
                if call.lineno < waits[0]:
                    assert ast.unparse(call.func) != "tl.store", file.stem
                    before |= {of for each in call.args if (of := pointer_of(each, made_of))}
            if before:
                read = " ".join(sorted(of.removesuffix("_ptr") for of in before))
                found[f"{file.stem}: {kernel.name}"] = read
    assert found == BEFORE


def weak_atomics(kernel: ast.FunctionDef) -> list[str]:
    """List atomic operations that decide something, or tell, without the order of memory for it."""
    alone = {id(node.value) for node in walk(kernel) if isinstance(node, ast.Expr)}
    found = []
    for call in (node for node in walk(kernel) if isinstance(node, ast.Call)):
        if ast.unparse(call.func).startswith("tl.atomic"):
            how = [ast.literal_eval(word.value) for word in call.keywords if word.arg == "sem"]
            enough = {"release", "acq_rel"} if id(call) in alone else {"acquire", "acq_rel"}
            if not enough.issuperset(how or ["acq_rel"]):  # which is Triton's default
                found.append(ast.unparse(call))
    return found


def test_atomics_order_the_stores_before_them():
    """A count of programs that is relaxed may be seen before the sums that it counts."""
    assert {n: w for n, k in all_kernels().items() if (w := weak_atomics(k))} == {}
    source = "@triton.jit\ndef kernel(p_ptr):\n    {}tl.atomic_add(p_ptr, 1, sem='{}')\n"
    for used, sem in (("x = ", "relaxed"), ("x = ", "release"), ("", "relaxed"), ("", "acquire")):
        (kernel,) = kernels_of(ast.parse(source.format(used, sem)))
        assert weak_atomics(kernel)


SECOND = {
    "3", "batch * heads", "batch * kv", "batch", "experts", "heads", "len(qs)", "len(wave)",
    "parts", "position.numel()", "rows", "splits", "taps", "tile.parts", "tile.splits",
    "triton.cdiv(chunks, tile['CHUNKS'])", "triton.cdiv(len(x), 8 * octets)",
    "triton.cdiv(num_bytes, PLANE)", "triton.cdiv(number, blocks)", "triton.cdiv(number, tile)",
    "triton.cdiv(out_features, 32)", "triton.cdiv(outputs, tile[1])",
    "triton.cdiv(packed.in_features, 256)", "triton.cdiv(rows, each)",
    "triton.cdiv(width, 256)", "triton.cdiv(width, 32)",
    "triton.cdiv(width, block)", "triton.cdiv(width, block_d)",
    "triton.cdiv(x.shape[1], BLOCK * blocks)",
}  # fmt: skip
"""Lengths of second and third axes of grids, which a GPU ends at 65,535: texts, heads, columns, and
`rows` of at most eight positions. Longer axes, as of positions and entries, come first."""


def test_only_first_axes_of_grids_may_be_long():
    found = set[str]()
    functions = (each for file in FILES for each in parsed(file).body)
    for function in (each for each in functions if isinstance(each, ast.FunctionDef)):
        calls = (node for node in walk(function) if isinstance(node, ast.Call))
        for call in (call for call in calls if isinstance(call.func, ast.Subscript)):
            grid = call.func.slice
            grid = dict(assigned(function)).get(getattr(grid, "id", ""), grid)
            tuples = (part for part in walk(grid) if isinstance(part, ast.Tuple))
            found |= {ast.unparse(axis) for each in tuples for axis in each.elts[1:]}
    assert found - SECOND == set()
    assert len(found) > 20


def test_rings_are_counted_in_64_bits():
    """Those of 64 texts may have more than 2**31 numbers, where all else of a step is small."""
    found = set()
    for file in (file for file in FILES if file.stem in OF_A_STEP):
        kernels = kernels_in(file)
        given = narrow_arguments(kernels)
        for kernel in kernels:
            found |= narrow_addresses(kernel, given[kernel.name])
    assert len(found) > 20
    assert {product for product in found if re.search(r"\b[WE]\b", product)} == set()


def test_rows_of_a_tile_are_multiplied_by_strides_in_64_bits():
    """Also where they come of a loop over tiles, and not of a program's number."""
    products = 0
    for file in FILES:
        for kernel in kernels_in(file):
            (_, wide), own = names_of(kernel, set()), {name for name, _ in assigned(kernel)}
            for node in walk(kernel):
                if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
                    continue
                rows = set(re.findall(r"\boffs_[mnr]\b", ast.unparse(node.left)))
                if rows & own and ast.unparse(node.right).startswith("stride_"):
                    products += 1
                    is_long = rows <= wide or is_wide(node.left, wide)
                    assert is_long, f"{file.stem}: {kernel.name}: {ast.unparse(node)}"
    assert products > 30


def test_kernels_that_overlap_wait():
    """Themselves, or in a function that they tell so."""
    waits = 0
    for file in FILES:
        for kernel in kernels_in(file):
            if "OVERLAP" not in {argument.arg for argument in kernel.args.args}:
                continue
            calls = (node for node in walk(kernel) if isinstance(node, ast.Call))
            told = any(ast.unparse(arg) == "OVERLAP" for call in calls for arg in call.args)
            used = kernel.name == "wait_for_last"
            assert told or used, f"{file.stem}: {kernel.name}"
            waits += told
    assert waits > 15


UNDEFINED = {"rotary_norm: _rotary_norm_backward_kernel": 2, "decode_weight: _decode_blocks": 1}
"""Loads whose masked elements are stored nowhere and enter no sum."""


def test_masked_loads_have_a_value():
    """In the interpreter it is 0, on a GPU whatever a register has."""
    found = Counter[str]()
    for file in FILES:
        for kernel in kernels_in(file):
            for call in (node for node in walk(kernel) if isinstance(node, ast.Call)):
                given = {key.arg for key in call.keywords}
                if ast.unparse(call.func) == "tl.load" and "mask" in given and "other" not in given:
                    found[f"{file.stem}: {kernel.name}"] += 1
    assert found == UNDEFINED


LOADS = re.compile("LOAD|_load_ptx|read_ptx")
"""Names of PTX that loads from memory, and of functions that write some."""
PURE = {"load_int", "_load_eight"}
"""Functions that load weights in PTX, or x in a kernel that waits for none: nothing of both is
written meanwhile, so that a compiler may move what they do."""


def test_load_in_ptx_is_not_moved_before_the_wait():
    found = {}
    for file in FILES:
        for kernel in kernels_in(file):
            nodes = [*walk(kernel)]
            codes = {
                ast.unparse(node.target): ast.unparse(node.value)
                for node in nodes
                if isinstance(node, ast.AnnAssign) and node.value
            }
            for call in (node for node in nodes if isinstance(node, ast.Call)):
                if ast.unparse(call.func) != "tl.inline_asm_elementwise":
                    continue
                code = ast.unparse(call.args[0])
                if LOADS.search(code) or LOADS.search(codes.get(code, "")):
                    (pure,) = (key.value for key in call.keywords if key.arg == "is_pure")
                    found[kernel.name] = ast.unparse(pure)
    assert {name for name, pure in found.items() if pure == "True"} == PURE
    assert found["load_eight_over"] == "not WRITTEN"
    assert len(found) > len(PURE) + 1


def test_kernel_in_ptx_says_how_its_data_lies_and_why():
    found = {}
    for file in FILES:
        source = file.read_text()
        if re.search(r"\bPTX: tl\.constexpr", source) and re.search(r"def \w+_kernel\(", source):
            said = ast.get_docstring(ast.parse(source))
            found[file.stem] = "Reason: " in said and bool(re.search(r"\n\n    \S", said))
    assert len(found) > 7
    assert all(found.values()), found
