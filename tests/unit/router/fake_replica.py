"""A replica that only sleeps: `python fake_replica.py NAME READY_FILE`."""

import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web

SEEN = ("X-Session-Id", "X-Min-Version", "Authorization")


async def main() -> None:
    name, ready = sys.argv[1], Path(sys.argv[2])
    counts = {"started": 0, "finished": 0, "running": 0}

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        counts["started"] += 1
        counts["running"] += 1
        try:
            await asyncio.sleep(body.get("sleep_s", 0.0))
        finally:
            counts["running"] -= 1
        counts["finished"] += 1
        headers = {"Retry-After": "7"} if body.get("status") == 503 else {}
        return web.json_response(
            {"by": name, "headers": {n: request.headers[n] for n in SEEN if n in request.headers}},
            status=body.get("status", 200),
            headers=headers,
        )

    async def read_counts(request: web.Request) -> web.Response:
        return web.json_response(counts)

    app = web.Application(client_max_size=1 << 28)
    app.add_routes([web.post("/generate", generate), web.get("/counts", read_counts)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    fresh = ready.with_name(ready.name + ".new")
    fresh.write_text(json.dumps({"url": f"http://{host}:{port}", "pid": os.getpid()}))
    fresh.rename(ready)
    await asyncio.Event().wait()


asyncio.run(main())
