"""process.py: the health endpoint says what is wrong, and for whom it is; work goes on until everybody has left."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from stoker_operator.process import serve_health, work_until


async def test_liveness_and_readiness_have_reasons_of_their_own() -> None:
    wrong = {"sick": "", "unready": "it warms up"}
    runner = await serve_health("127.0.0.1", 0, sick=lambda: wrong["sick"], unready=lambda: wrong["unready"])
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:

            async def said(path: str) -> tuple[int, str]:
                async with client.get(path) as answer:
                    return answer.status, await answer.text()

            assert await said("/healthz") == (200, "ok\n")
            assert await said("/readyz") == (503, "it warms up\n")
            wrong |= {"sick": "it hangs", "unready": ""}
            assert await said("/healthz") == (500, "it hangs\n")
            assert await said("/readyz") == (200, "ok\n")
            assert "python_info" in (await said("/metrics"))[1]
    finally:
        await runner.cleanup()


async def test_work_goes_on_while_the_process_leaves_and_is_cancelled_then() -> None:
    stop, seen = asyncio.Event(), []

    async def work() -> None:
        try:
            while True:
                seen.append("worked")
                await asyncio.sleep(0.01)
        finally:
            seen.append("cancelled")

    async def leave() -> None:
        seen.clear()
        await asyncio.sleep(0.05)
        seen.append("left")

    asyncio.get_running_loop().call_later(0.03, stop.set)
    await asyncio.wait_for(work_until(stop, work(), leave=leave), 10)
    assert seen[0] == "worked"
    assert seen[-2:] == ["left", "cancelled"]


async def test_work_that_fails_ends_all_of_it_at_once() -> None:
    ended = []

    async def fail() -> None:
        raise ValueError("it broke")

    async def other() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("other")

    async def leave() -> None:
        ended.append("left")

    with pytest.raises(ValueError, match="it broke"):
        await asyncio.wait_for(work_until(asyncio.Event(), other(), fail(), leave=leave), 10)
    assert ended == ["other"]
