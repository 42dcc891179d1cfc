"""Make the screenshots of docs/view.md from a run, with Chromium.

slimectl run quickstart --name pictures -s run.keep_samples=train -s eval.interval=50
python docs/images/make.py runs/pictures

The tree of branches is a samples file's, which docs/images/branching_agent.py makes:

python docs/images/make.py branches.jsonl
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent
SIGNS = {"curves": ".u-title", "sample": ".token", "branches": ".tree"}
"""What a page has when it is drawn."""
SIZE = {"width": 1200, "height": 720}


def main(run: str) -> None:
    command = [sys.executable, "-m", "slimectl", "view", run, "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        if Path(run).is_file():
            take({"branches": "sample/f0/1"}, address)
        else:
            take(pages(address), address)
    finally:
        server.terminate()
        server.wait()


def pages(address: str) -> dict[str, str]:
    """Return the place of every page, over the last round and the evaluations of the run."""
    with urlopen(f"{address}api/catalogue") as answer:
        files = json.load(answer)["runs"][0]["files"]
    last = [file for file in files if file["kind"] == "round"][-1]["id"]
    with urlopen(f"{address}api/groups?file={last}&sort=spread&order=down&limit=1") as answer:
        group = json.load(answer)["groups"][0]
    evaluation = next(file["id"] for file in files if file["kind"] == "evaluation")
    with urlopen(f"{address}api/groups?file={evaluation}&limit=1") as answer:
        prompt = json.load(answer)["groups"][0]["hash"]
    return {
        "curves": "curves", "round": f"round/{last}?sort=spread&order=down", "group": f"group/{last}/{group['group']}",
        "sample": f"sample/{last}/{group['rows'][-1]}", "prompt": f"prompt/n0/{prompt}", "compare": "compare",
    }  # fmt: skip


def take(places: dict[str, str], address: str) -> None:
    """Take a picture of every place, by its name."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        for name, place in places.items():
            page.goto("about:blank")
            page.goto(f"{address}#/{place}")
            page.wait_for_selector(SIGNS.get(name, "tbody tr, article"))
            if name == "sample":
                page.keyboard.press("4")
                page.locator(".token").last.hover()
            if name == "branches":
                page.keyboard.press("2")
                page.locator(".tree").first.scroll_into_view_if_needed()
            page.screenshot(path=FOLDER / f"view-{name}.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
