"""Which implementation an op gets, and what is said when it gets none."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from stoker_kernels.launch import dispatch
from stoker_kernels.launch.dispatch import KernelUnavailable, Target

CPU = torch.device("cpu")


@pytest.fixture
def op() -> Iterator[str]:
    """An op with a GPU implementation for bf16 and a reference, gone after the test."""
    name = "an_op"
    dispatch.register(
        name, "gpu", "stoker_kernels.norm.reference:rms_norm", dispatch.triton_supports(torch.bfloat16, min_sm=80)
    )
    dispatch.register(name, "reference", "stoker_kernels.embedding.reference:embed", dispatch.reference_supports)
    yield name
    dispatch.unpin(name)
    del dispatch._registry[name]


def _choice(op: str, device: str, sm: int, dtype: torch.dtype) -> str:
    return dispatch._choose(op, Target(device, sm, dtype))[0].name


@pytest.mark.parametrize(
    ("device", "sm", "dtype", "expected"),
    [
        ("cpu", 0, torch.bfloat16, "reference"),
        ("cpu", 0, torch.float64, "reference"),
        ("cuda", 90, torch.bfloat16, "gpu"),
        ("cuda", 80, torch.bfloat16, "gpu"),
    ],
)
def test_the_first_that_supports_the_target(op: str, device: str, sm: int, dtype: torch.dtype, expected: str) -> None:
    assert _choice(op, device, sm, dtype) == expected


@pytest.mark.parametrize(
    ("sm", "dtype", "reason"), [(75, torch.bfloat16, "needs sm_80 or newer"), (90, torch.float32, "takes bfloat16")]
)
def test_cuda_never_falls_back_to_the_reference(op: str, sm: int, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(KernelUnavailable) as caught:
        _choice(op, "cuda", sm, dtype)
    message = str(caught.value)
    for part in (op, f"sm_{sm}", dispatch.dtype_name(dtype), reason, "only when pinned"):
        assert part in message
    assert (caught.value.op, caught.value.sm, caught.value.dtype) == (op, sm, dtype)


def test_a_pinned_reference_runs_on_cuda(op: str) -> None:
    dispatch.pin(op, "reference")
    assert _choice(op, "cuda", 90, torch.bfloat16) == "reference"


def test_a_pin_must_fit_the_target(op: str) -> None:
    dispatch.pin(op, "gpu")
    with pytest.raises(KernelUnavailable, match="needs CUDA"):
        dispatch.select(op, CPU, torch.bfloat16)


def test_where_invariance_is_demanded_others_are_not_tried(op: str) -> None:
    dispatch.register_invariant(op, "rows", "stoker_kernels.norm.rows:rms_norm", dispatch.cpu_supports(torch.float32))
    assert "rows" not in dispatch.implementations(op)
    with pytest.raises(ValueError, match="no implementation 'rows'"):
        dispatch.pin(op, "rows")
    assert _choice(op, "cpu", 0, torch.float32) == "reference"
    dispatch.demand_invariance(True)
    try:
        assert _choice(op, "cpu", 0, torch.float32) == "rows"
        with pytest.raises(KernelUnavailable, match="reference: is not batch-invariant; rows: needs a CPU"):
            _choice(op, "cuda", 90, torch.bfloat16)
    finally:
        dispatch.demand_invariance(False)
    assert _choice(op, "cpu", 0, torch.float32) == "reference"


def test_pinning_forgets_earlier_choices(op: str) -> None:
    assert dispatch.select(op, CPU, torch.float32).__name__ == "embed"
    assert dispatch.chosen()[op] == "reference"
    dispatch.pin(op, "gpu")
    assert op not in dispatch.chosen()


def test_unknown_names_are_answered_with_known_ones(op: str) -> None:
    with pytest.raises(ValueError, match="did you mean an_op"):
        dispatch.pin("an_opp", "gpu")
    with pytest.raises(ValueError, match="it has gpu, reference"):
        dispatch.pin(op, "cuda")
    with pytest.raises(ValueError, match="already has"):
        dispatch.register(op, "gpu", "stoker_kernels.embedding.reference:embed", dispatch.reference_supports)


def test_the_nearest_names_are_given(op: str) -> None:
    import stoker_kernels.gemm

    assert stoker_kernels.gemm.linear
    with pytest.raises(ValueError, match=r"did you mean linear\?"):
        dispatch.pin("lineer", "cublas")
    with pytest.raises(ValueError, match=r"no implementation 'cublass', did you mean cublas\?; it has table, cublas"):
        dispatch.pin("linear", "cublass")
    with pytest.raises(ValueError, match=r"unknown op 'zzz'; there are .*linear"):
        dispatch.pin("zzz", "x")


@pytest.mark.parametrize("folder", dispatch.MAIN_OPS)
def test_a_folder_stands_for_its_main_op(folder: str) -> None:
    import_module(f"stoker_kernels.{folder}")
    main = dispatch.MAIN_OPS[folder]
    assert folder not in dispatch.ops()
    dispatch.pin(folder, "reference")
    try:
        assert dispatch.require(CPU, torch.float32, (main,)) == {main: "reference"}
        with pytest.raises(ValueError, match=f"op {main} has no implementation 'zzz'"):
            dispatch.pin(folder, "zzz")
    finally:
        dispatch.unpin(folder)
    assert main not in dispatch._pins


def test_the_log_names_dtypes_where_they_differ(op: str) -> None:
    dispatch._selected[op, CPU, torch.float32] = (dispatch._registry[op]["reference"], print, {})
    dispatch._selected[op, CPU, torch.bfloat16] = (dispatch._registry[op]["gpu"], print, {})
    assert dispatch.chosen()[op] == "reference (float32), gpu (bfloat16)"
    assert dispatch.require(CPU, torch.float32, (op,)) == {op: "reference"}


def test_every_op_has_a_way_on_every_device_that_loads() -> None:
    """A reference, or `split`, which is made of other ops."""
    folders = {path.parent.name for path in dispatch.PACKAGE.glob("*/op.py")}
    found = set()
    for name in dispatch.ops():
        ways = dispatch._registry[name]
        everywhere = ways["reference" if "reference" in ways else "split"]
        assert everywhere.supports(dispatch.Target("cpu", torch.float32, 0)) is None
        assert callable(everywhere.load())
        found.add(everywhere.path.split(".")[1])
    assert found == folders
