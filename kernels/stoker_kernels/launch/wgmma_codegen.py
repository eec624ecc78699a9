"""Writes csrc/wgmma.cuh: one wrapper per wgmma shape, whose operand lists are too long to keep by hand.

Invariants: the committed header equals what this module writes (a test compares them).
Does not know: descriptors, swizzles, tiles.
"""

from __future__ import annotations

from pathlib import Path

HEADER = Path(__file__).parent / "csrc" / "wgmma.cuh"
REGISTER_ELEMENTS = {"__nv_bfloat16": "bf16", "__half": "f16"}
# Per element: (width, whether columns are contiguous). Attention takes 64 and 128 of both, products with integer
# weights rows of tokens.
REGISTER_SHAPES = {
    "__nv_bfloat16": (
        *((8, False), (16, False), (32, False), (64, False), (128, False), (256, False)), (128, True), (256, True),
    ),
    "__half": ((64, False), (128, True), (256, True)),
}
COLUMN_SHAPES = {"__nv_bfloat16": (256,), "__half": (256,)}  # latent attention's
TOKENS = (8, 16, 24, 32, 48, *range(64, 145, 8), *range(160, 257, 16))
# Of integers it multiplies 8, 24 or a multiple of 16.
INTEGER_TOKENS = tuple(n for n in TOKENS if n in (8, 24) or n % 16 == 0)
SHAPES = {"__nv_bfloat16": TOKENS, "e4m3": TOKENS, "__half": (64,), "s8": INTEGER_TOKENS}
ELEMENTS = {
    "__nv_bfloat16": ("k16.f32.bf16.bf16", ", 1, 1, 0, 0"),
    "__half": ("k16.f32.f16.f16", ", 1, 1, 0, 0"),
    "e4m3": ("k32.f32.e4m3.e4m3", ", 1, 1"),
    "s8": ("k32.s32.s8.s8", ""),
}

TOP = """\
// Written by wgmma_codegen.py. D[64, N] (+)= A[64, K] · B[N, K]ᵀ, both operands K-major in shared memory.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace stoker {

struct e4m3 {};  // tag of the 8-bit float; the kernels never touch single values
struct s8 {};    // of the 8-bit integer with a sign, whose products are summed in 32 bits

template <typename T, int N>
struct Wgmma;

// A [64, 16] in registers, B [16, N] with N contiguous where `columns`, else B [N, 16]ᵀ with K contiguous.
template <typename T, int N, bool columns>
struct WgmmaRegisters;

// B [16, N] with N contiguous; A as in Wgmma.
template <typename T, int N>
struct WgmmaColumns;
"""


def wrapper(element: str, tokens: int, *, columns: bool = False) -> str:
    """The specialisation for one element type and one number of tokens; `columns`: of WgmmaColumns."""
    shape, flags = ELEMENTS[element]
    if columns:
        flags = ", 1, 1, 0, 1"
    sums, register = ("int32_t", "r") if element == "s8" else ("float", "f")
    count = tokens // 2
    operands = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+{register}"(d[{i}])' for i in range(count))
    return f"""
template <>
struct Wgmma{"Columns" if columns else ""}<{element}, {tokens}> {{
  static __device__ __forceinline__ void multiply({sums} (&d)[{count}], uint64_t a, uint64_t b, bool accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{tokens}{shape} "
        "{{{operands}}}, %{count}, %{count + 1}, p{flags};\\n}}"
        : {outputs}
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }}
}};
"""


def register_wrapper(element: str, width: int, columns: bool) -> str:
    """A from registers: attention's P · V, whose B has its columns contiguous (MN-major), and its Q · Kᵀ."""
    count = width // 2
    name = REGISTER_ELEMENTS[element]
    operands = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a, b, flag = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}", count + 4, count + 5
    return f"""
template <>
struct WgmmaRegisters<{element}, {width}, {str(columns).lower()}> {{
  static __device__ __forceinline__ void multiply(float (&d)[{count}], const uint32_t (&a)[4], uint64_t b, bool accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{flag}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{name}.{name} {{{operands}}}, {a}, %{b}, p, 1, 1, {int(columns)};\\n}}"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
  }}
}};
"""  # noqa: E501


def header() -> str:
    """The whole text of wgmma.cuh."""
    wrappers = "".join(wrapper(element, tokens) for element, sizes in SHAPES.items() for tokens in sizes)
    registers = "".join(
        register_wrapper(element, *shape) for element, shapes in REGISTER_SHAPES.items() for shape in shapes
    )
    columns = "".join(wrapper(element, n, columns=True) for element, sizes in COLUMN_SHAPES.items() for n in sizes)
    return f"{TOP}{wrappers}{registers}{columns}\n}}  // namespace stoker\n"


if __name__ == "__main__":
    HEADER.write_text(header())
