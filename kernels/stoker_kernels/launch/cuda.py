"""CUDA kernels from cubins: loading, tensor maps and launches by the driver API, with no compiler and no extension.

Invariants: a launch goes to torch's current stream of the tensor's device, never synchronises, and can be captured;
cubins come from `_aot/` (or STOKER_AOT_DIR), written by `python -m stoker_kernels.launch.nvcc`, or from the user's
cache, built at a start; a kernel is loaded once per process, at its first `kernel()`, which has to come before a graph
capture.
Does not know: what any kernel computes.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker_kernels.launch import nvcc
from stoker_kernels.launch.aot_index import aot_folder
from stoker_kernels.launch.rehearsal import rehearsing

TENSOR_MAP_BYTES = 128
FREE_SHARED_BYTES = 48 * 1024  # dynamic shared memory that a kernel has without asking
_BFLOAT16, _UINT8 = 9, 0  # CUtensorMapDataType
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle, by bytes of a box's line
_PROMOTION_256B = 3  # CUtensorMapL2promotion


class CudaError(RuntimeError):
    """A driver call that failed, with its name and the driver's own words."""


class CubinMissing(RuntimeError):
    """A kernel's cubin is not there; says how to make it."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A loaded kernel with its launch shape: dynamic shared memory in bytes, threads per CTA."""

    name: str
    handle: Any
    shared_bytes: int
    threads: int


def cubin_path(stem: str, arch: str) -> Path:
    """Where the cubin of csrc/`stem`.cu for `arch` ("sm_90a") lies: among those that came, else in the user's cache."""
    came = aot_folder() / nvcc.cubin_name(stem, arch)
    return came if came.exists() else nvcc.cache() / came.name


def missing_cubin(stem: str, arch: str) -> str | None:
    """None where the cubin is there, else what is missing and the command that makes it."""
    path = cubin_path(stem, arch)
    return None if path.exists() else f"{path.name} is not built: run python -m stoker_kernels.launch.nvcc"


@functools.cache
def _library(stem: str, arch: str) -> Any:
    from cuda.bindings import driver

    missing = missing_cubin(stem, arch)
    if missing is not None:
        raise CubinMissing(missing)
    image = cubin_path(stem, arch).read_bytes()
    return checked("cuLibraryLoadData", driver.cuLibraryLoadData(image, [], [], 0, [], [], 0))


@functools.cache
def kernel(stem: str, arch: str, name: str, shared_bytes: int, threads: int, device: int) -> Kernel:
    """Kernel `name` of a cubin, ready to launch on CUDA device `device`. Raises CubinMissing or CudaError."""
    from cuda.bindings import driver

    optin = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    largest = checked("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(optin, device))
    found = checked("cuLibraryGetKernel", driver.cuLibraryGetKernel(_library(stem, arch), name.encode()))
    function = checked("cuKernelGetFunction", driver.cuKernelGetFunction(found))
    attributes = driver.CUfunction_attribute
    for attribute, value in (
        (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, largest),
        # An SM changes its carve-out only when idle: all of it shared, or no CTA of a next kernel fits beside ours.
        (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
    ):
        checked("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, attribute, value))
    return Kernel(name, function, shared_bytes, threads)


@functools.cache
def load_cubin(path: Path, entry: str, shared_bytes: int, device: int) -> Any:
    """Kernel `entry` of the cubin at `path`, allowed `shared_bytes` of dynamic shared memory on CUDA device `device`.

    Raises CudaError. For kernels whose carve-out the driver chooses.
    """
    from cuda.bindings import driver

    library = checked("cuLibraryLoadData", driver.cuLibraryLoadData(path.read_bytes(), [], [], 0, [], [], 0))
    found = checked("cuLibraryGetKernel", driver.cuLibraryGetKernel(library, entry.encode()))
    function = checked("cuKernelGetFunction", driver.cuKernelGetFunction(found))
    if shared_bytes > FREE_SHARED_BYTES:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, limit, shared_bytes))
    return function


@functools.cache
def resident_clusters(chosen: Kernel, cluster: int, shared_bytes: int) -> int:
    """How many clusters of `cluster` CTAs the device holds at once if each CTA takes `shared_bytes`."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = chosen.threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.attrs, config.numAttrs = [_cluster_attribute(cluster)], 1
    count = checked("cuOccupancyMaxActiveClusters", driver.cuOccupancyMaxActiveClusters(chosen.handle, config))
    return int(count)


def address_of(tensor: torch.Tensor | None) -> int:
    """Where a tensor starts; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def current_stream(device: torch.device) -> int:
    """The handle of the stream that is current on CUDA device `device`, without an object around it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)


def launch(
    chosen: Kernel, grid: int, arguments: list[Any], device: torch.device, *, pdl: bool, cluster: int = 1
) -> None:
    """Launch `grid` CTAs on the current stream. `arguments`: one ctypes buffer per kernel parameter, passed by value.

    With `pdl` the kernel may start while its predecessor drains (it has to wait by itself). `cluster` CTAs in a row
    make a cluster; `grid` is a multiple of it. In a rehearsal nothing is launched.
    """
    from cuda.bindings import driver

    if rehearsing():
        return
    config = _config(chosen, grid, pdl, cluster)
    config.hStream = current_stream(device)
    pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
    checked("cuLaunchKernelEx", driver.cuLaunchKernelEx(config, chosen.handle, ctypes.addressof(pointers), 0))


@functools.cache
def _config(chosen: Kernel, grid: int, pdl: bool, cluster: int) -> Any:
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = chosen.threads, 1, 1
    config.sharedMemBytes = chosen.shared_bytes
    attributes = [_cluster_attribute(cluster)] if cluster > 1 else []
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config.numAttrs = len(attributes)
    if attributes:
        config.attrs = attributes
    return config


def _cluster_attribute(cluster: int) -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
    return attribute


def tensor_map(tensor: torch.Tensor, box_rows: int) -> ctypes.Array[ctypes.c_char]:
    """A TMA map of a row-major [rows, columns] matrix: boxes of `box_rows` × 128 bytes in the 128-byte swizzle.

    bf16, or any 1-byte dtype. Rows outside read as zero. Returns 128 bytes on a multiple of 64, valid as long as the
    tensor's memory is; raises CudaError where pointer or stride are not multiples of 16 bytes.
    """
    size = tensor.element_size()
    return tensor_map_at(tensor.data_ptr(), tensor.shape[0], tensor.shape[1], tensor.stride(0), size, box_rows)


def tensor_map_at(
    address: int, rows: int, columns: int, row_stride: int, element_size: int, box_rows: int
) -> ctypes.Array[ctypes.c_char]:
    """`tensor_map` from numbers: address in bytes, the rest in elements."""
    return _encoded(address, (columns, rows), (row_stride,), element_size, (box_rows,))


def lines_map_at(address: int, rows: int, row_bytes: int, line: int, box_rows: int) -> ctypes.Array[ctypes.c_char]:
    """A TMA map of rows of bytes: boxes of `box_rows` × `line` bytes (32, 64, 128) in the swizzle of such lines."""
    return _encoded(address, (row_bytes, rows), (row_bytes,), 1, (box_rows,), line)


def tensor_map_3d(tensor: torch.Tensor, box: tuple[int, int]) -> ctypes.Array[ctypes.c_char]:
    """A TMA map of `[outer, middle, columns]`, columns contiguous: boxes of box[0] × box[1] × 128 bytes, as above."""
    outer, middle, columns = tensor.shape
    strides = (tensor.stride(1), tensor.stride(0))
    return _encoded(tensor.data_ptr(), (columns, middle, outer), strides, tensor.element_size(), (box[1], box[0]))


def tensor_map_4d(tensor: torch.Tensor, box: tuple[int, int, int]) -> ctypes.Array[ctypes.c_char]:
    """A TMA map of four dimensions, columns contiguous: boxes of box[0] × box[1] × box[2] × 128 bytes, as above.

    Strides may be any multiples of 16 bytes.
    """
    strides = tuple(tensor.stride(dim) for dim in (2, 1, 0))
    return _encoded(tensor.data_ptr(), tuple(reversed(tensor.shape)), strides, tensor.element_size(), box[::-1])


def paired_map_at(
    address: int, rows: int, columns: int, element_size: int, box_rows: int, stacked: int = 1
) -> ctypes.Array[ctypes.c_char]:
    """A TMA map of [rows, columns], contiguous, whose boxes alternate by eight rows between its first and second half.

    Dimensions: column, row of eight, half, eights of a half; `box_rows` counts both halves' rows, a multiple of 16, as
    `rows` is. Of `stacked` such matrices the next one starts rows / 8 eights further. Otherwise as `tensor_map`.
    """
    eights = (stacked - 1) * rows // 8 + rows // 16
    sizes, strides = (columns, 8, 2, eights), (columns, columns * rows // 2, columns * 8)
    return _encoded(address, sizes, strides, element_size, (8, 2, box_rows // 16))


def _encoded(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], element_size: int, box: tuple[int, ...],
    line: int = 128,
) -> ctypes.Array[ctypes.c_char]:  # fmt: skip
    """Sizes innermost first, in elements; strides and box without the innermost dimension, of which a box has `line`
    bytes.
    """
    rank = len(sizes)
    storage = (ctypes.c_char * (TENSOR_MAP_BYTES + 64))()
    offset = -ctypes.addressof(storage) % 64
    encoded = (ctypes.c_char * TENSOR_MAP_BYTES).from_buffer(storage, offset)
    status = _encode_tiled()(
        ctypes.c_void_p(ctypes.addressof(encoded)),
        ctypes.c_int(_BFLOAT16 if element_size == 2 else _UINT8),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*(stride * element_size for stride in strides)),
        (ctypes.c_uint32 * rank)(line // element_size, *box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(0),
        ctypes.c_int(_SWIZZLES[line]),
        ctypes.c_int(_PROMOTION_256B),
        ctypes.c_int(0),
    )
    if status != 0:
        raise CudaError(f"cuTensorMapEncodeTiled gave {status} for address {address:#x}, sizes {sizes}, "
                        f"strides {strides}, {element_size}-byte elements, a box of {box} lines of {line} bytes")
    return encoded


@functools.cache
def _encode_tiled() -> Any:
    # By ctypes: the driver wants the map on a multiple of 64 bytes, which the bindings' own object is not.
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    function.restype = ctypes.c_int
    return function


def checked(call: str, answer: tuple[Any, ...]) -> Any:
    """What a driver call gave beside its status. Raises CudaError with the name of the call."""
    if int(answer[0]) != 0:
        raise CudaError(f"{call} failed: {answer[0].name}")
    return answer[1] if len(answer) > 1 else None
