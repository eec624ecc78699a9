"""A kernel that did not come precompiled is compiled once without a C compiler, and serves every later launch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.runtime.build
from triton.compiler.errors import CompilationError

from stoker_kernels.launch import aot, aot_index, at_need
from stoker_kernels.launch.aot_index import Cubin, Wanted, cached_index, find_cubin
from stoker_kernels.launch.at_need import CompileFailed, compile_missing, compile_one, variant_of
from stoker_kernels.launch.rehearsal import Missing
from stoker_kernels.rope.triton_rope import _qk_norm_rope_kv_write_kernel as rope_kernel
from stoker_kernels.slots.triton_slots import _commit_tokens_kernel as commit_kernel

SM = 86


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, nothing precompiled, and no C compiler."""
    monkeypatch.setenv("STOKER_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("STOKER_AOT_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    def no_compiler(*_: object) -> str:
        raise AssertionError("a C compiler was asked for")

    monkeypatch.setattr(triton.runtime.build, "_build", no_compiler)
    for index in (aot_index.read_index, aot_index.cached_index):
        index.cache_clear()
    yield tmp_path / "cache"
    for index in (aot_index.read_index, aot_index.cached_index):
        index.cache_clear()


def wanted_commit(rows: int = 3) -> Wanted:
    """What a launch of `commit_tokens` for some rows needs."""
    ints = torch.zeros(256, dtype=torch.int32)
    arguments = [rows if name == "rows" else ints for name in commit_kernel.arg_names if name not in ("ROWS",)]
    named = [name for name in commit_kernel.arg_names if name.isupper()]
    arguments = arguments[: len(commit_kernel.arg_names) - len(named)]
    constants = {"LAUNCH_PDL": False} | {name: 16 for name in named if name != "LAUNCH_PDL"}
    return commit_kernel.wanted(commit_kernel.kinds(arguments), constants)


def test_it_is_compiled_kept_and_found_by_the_next_process(cache: Path) -> None:
    wanted = wanted_commit()
    assert find_cubin(SM, wanted) is None
    compile_one(Missing(commit_kernel, wanted, SM, "none came"))
    path, cubin = find_cubin(SM, wanted) or (None, None)
    assert path is not None
    assert path.parent == cache / f"sm_{SM}"
    assert path.read_bytes().startswith(b"\x7fELF")
    cached_index.cache_clear()
    assert find_cubin(SM, wanted) == (path, cubin)
    assert not list(cache.rglob("*.partial"))


def test_what_changes_from_step_to_step_is_not_assumed(cache: Path) -> None:
    """Sixteen tokens at the rehearsal, seventeen in traffic: one kernel."""
    specs = [variant for variant in aot.variants(SM) if variant.spec.kernel is rope_kernel]
    arguments = {
        name: ("none", False) if constant is None and name in rope_kernel.arg_names else (constant, False)
        for name, constant in specs[0].constants.items()
        if constant is None
    }
    arguments |= {name: (kind.split(":")[0], True) for name, kind in specs[0].arguments.items()}
    constants = {name: value for name, value in specs[0].constants.items() if value is not None} | {"HALF": 512}
    wanted = Wanted(rope_kernel.identity, rope_kernel.source, arguments, constants, specs[0].spec.options)
    variant = variant_of(Missing(rope_kernel, wanted, SM, "heads of 1,024"))
    assert variant.arguments["tokens"] == "i32"
    assert variant.arguments["page_stride"] == "i32:16"
    odd = {**arguments, "tokens": ("i32", False)}
    cubin = Cubin("", wanted.kernel, wanted.source, "", 0, 0, False, variant.arguments, variant.constants,
                  variant.spec.options)
    assert cubin.fits(Wanted(wanted.kernel, wanted.source, odd, constants, wanted.options)) >= 0


def test_all_that_is_missing_is_compiled_and_counted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers that begin while a slow disk lists the cache write to the one index that launches ask."""
    listed = aot_index.cache_folder

    def slowly() -> Path:
        time.sleep(0.2)
        return listed()

    monkeypatch.setattr(aot_index, "cache_folder", slowly)
    said: list[tuple[int, int, str]] = []
    wants = [wanted_commit(), Wanted(*(getattr(wanted_commit(), field) for field in ("kernel", "source", "arguments")),
                                     {**wanted_commit().constants, "ROWS": 32}, {})]
    compile_missing((Missing(commit_kernel, each, SM, "") for each in wants), lambda *step: said.append(step))
    assert [step[:2] for step in said] == [(1, 2), (2, 2)]
    assert all(find_cubin(SM, each) for each in wants)


def test_ranks_share_what_they_all_miss(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins at another place, and what another one has compiled meanwhile is not compiled again."""
    monkeypatch.setattr(at_need, "MOST_COMPILERS", 1)
    wants = [replace(wanted_commit(), constants=wanted_commit().constants | {"ROWS": rows}) for rows in (8, 16, 32, 64)]
    compiled: list[int] = []
    compiling = aot.compile_variant

    def counted(variant: aot.Variant) -> Any:
        compiled.append(variant.constants["ROWS"])
        if len(compiled) == 1:  # meanwhile the other rank has compiled two, each in a cache of its own eyes
            for each in wants[:2]:
                write(variant_of(Missing(commit_kernel, each, SM, "")), cache / f"sm_{SM}")
        return compiling(variant)

    write = aot.write_variant
    monkeypatch.setattr(aot, "compile_variant", counted)
    said: list[str] = []
    missing = [Missing(commit_kernel, each, SM, "") for each in wants]
    compile_missing(missing, lambda done, total, name: said.append(f"{done}/{total}"), index=1, among=2)
    assert compiled == [32, 8, 16, 64], "the other rank's two within the first of its own, and then its own second"
    assert said == ["1/4", "2/4", "3/4", "4/4"]
    assert all(find_cubin(SM, each) for each in wants)


def test_one_that_does_not_compile_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Path:
        raise CompilationError("", None, "too much shared memory")

    monkeypatch.setattr(at_need.aot, "write_variant", fails)
    with pytest.raises(CompileFailed, match=r"commit_tokens_kernel does not compile for sm_86.*"):
        compile_one(Missing(commit_kernel, wanted_commit(), SM, ""))


def test_a_count_that_the_interpreter_lost_is_no_reason_to_give_up(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPython 3.11 before 3.11.5, where threads parse at once: another try, but not for ever."""
    write, lost = aot.write_variant, iter([True, True, False])

    def loses(*args: Any) -> Path:
        if next(lost):
            raise SystemError("AST constructor recursion depth mismatch (before=39, after=33)")
        return write(*args)

    monkeypatch.setattr(at_need.aot, "write_variant", loses)
    assert compile_one(Missing(commit_kernel, wanted_commit(), SM, "")).kernel
    lost = iter([True] * 100)
    with pytest.raises(CompileFailed, match="depth mismatch"):
        compile_one(Missing(commit_kernel, wanted_commit(), SM, ""))


def test_a_file_of_another_release_is_passed_over(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = cache / f"sm_{SM}"
    folder.mkdir(parents=True)
    (folder / "old-0.json").write_text(json.dumps({"file": "old-0.cubin", "grid": 3}))
    (folder / "torn-0.json").write_text('{"file": ')
    assert find_cubin(SM, wanted_commit()) is None
    assert caplog.text.count("is not a description of a kernel") == 2
