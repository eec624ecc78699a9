"""fp32 → e4m3 inside kernels, bit for bit against torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker_kernels.launch.triton_fp8 import fp8_storage, store_rounded


@triton.jit
def _convert_kernel(x, out, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    store_rounded(out + index, tl.load(x + index, mask=index < count, other=0.0), index < count)


def _converted(x: torch.Tensor, *, as_bytes: bool) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    target = out.view(torch.uint8) if as_bytes else fp8_storage(out)
    _convert_kernel[(triton.cdiv(x.numel(), 4096),)](x, target, x.numel(), BLOCK=4096)
    return out.view(torch.uint8)


def test_every_rounding_case(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = codes[~codes.isnan()].sort().values
    middles = (exact[1:] + exact[:-1]) / 2
    around = torch.cat([torch.nextafter(middles, torch.tensor(s * torch.inf)) for s in (-1, 1)])
    x = torch.cat([exact, middles, around, 200 * torch.randn(20000), 0.02 * torch.randn(20000)])
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    for as_bytes in (True, False):
        assert torch.equal(_converted(x.to(device), as_bytes=as_bytes).cpu(), expected)


def test_saturation_and_nan(device: torch.device) -> None:
    x = torch.tensor([1e30, -1e30, 449.0, torch.inf, -torch.inf, torch.nan], device=device)
    got = _converted(x, as_bytes=True).view(torch.float8_e4m3fn).float().tolist()
    assert got[:5] == [448.0, -448.0, 448.0, 448.0, -448.0]
    assert got[5] != got[5]
