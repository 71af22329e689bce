# SPDX-License-Identifier: Apache-2.0
"""Real tool schemas: installs public MCP servers from npm, asks each for its tools, writes them to one JSON file.

`python bench/mcp_tools.py build/mcp` needs node and npm. Nothing is called and no key is needed: the servers only say
what they offer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PINS = Path(__file__).with_name("mcp_servers.txt")
_ANSWER_S = 40.0
_DUMMY = "x" * 40


def main() -> int:
    """Install, ask, write tools.json; says what each server offers."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/mcp").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"private": true}')
    found: dict[str, list[dict[str, Any]]] = {}
    for line in PINS.read_text().splitlines():
        package, _, arguments = line.partition(" ")
        install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder), package]
        if not (folder / "node_modules" / _name(package)).exists():
            subprocess.run(install, check=True, capture_output=True)
        tools = tools_of(_entry(folder, package), [part.format(folder=folder) for part in arguments.split()])
        print(f"{package:<58} {len(tools):>4} tools")
        found[package] = tools
    (folder / "tools.json").write_text(json.dumps(found, indent=1))
    print(f"{sum(map(len, found.values()))} tools of {len(found)} servers: {folder / 'tools.json'}")
    return 0


def tools_of(entry: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """The tools that a server offers, over its standard input and output; none when it does not answer."""
    named = {"GITHUB_PERSONAL_ACCESS_TOKEN": _DUMMY, "GITLAB_PERSONAL_ACCESS_TOKEN": _DUMMY, "SLACK_BOT_TOKEN": _DUMMY}
    named |= {"SLACK_TEAM_ID": _DUMMY, "BRAVE_API_KEY": _DUMMY, "GOOGLE_MAPS_API_KEY": _DUMMY, "EXA_API_KEY": _DUMMY}
    named |= {"FIRECRAWL_API_KEY": _DUMMY, "TAVILY_API_KEY": _DUMMY, "NOTION_TOKEN": _DUMMY}
    process = subprocess.Popen(
        ["node", str(entry), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **named},
    )
    watch = threading.Timer(_ANSWER_S, process.kill)
    watch.start()
    try:
        client = {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        _say(process, {"id": 1, "method": "initialize", "params": client})
        _answer(process, 1)
        _say(process, {"method": "notifications/initialized"})
        _say(process, {"id": 2, "method": "tools/list", "params": {}})
        return list(_answer(process, 2).get("tools", []))
    except (BrokenPipeError, EOFError):
        return []
    finally:
        watch.cancel()
        process.kill()
        process.wait()


def _say(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str], number: int) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if message.get("id") == number:
            return dict(message.get("result") or {})
    raise EOFError


def _name(package: str) -> str:
    return package[: package.rindex("@")] if package.rfind("@") > 0 else package


def _entry(folder: Path, package: str) -> Path:
    home = folder / "node_modules" / _name(package)
    programs = json.loads((home / "package.json").read_text()).get("bin") or {}
    path = programs if isinstance(programs, str) else next(iter(programs.values()))
    return home / path


if __name__ == "__main__":
    sys.exit(main())
