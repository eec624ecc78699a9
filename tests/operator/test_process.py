"""process.py: the health endpoint says what is wrong, and for whom it is."""

from __future__ import annotations

import aiohttp

from stoker_operator.process import serve_health


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
