"""Make the screenshots of README.md and docs/view.md with Chromium.

README.md, from a folder of finished quickstart runs:

for seed in 1 2 3; do slimectl run quickstart --name grpo-s$seed --seed $seed -s run.dir=quickstart; done
python docs/images/make.py quickstart

docs/view.md, from a folder of runs that keep their samples:

for seed in 1 2 3; do for lr in 2e-4 5e-4; do
  slimectl run quickstart --name grpo-$lr-s$seed -s train.lr=$lr -s run.seed=$seed -s rollout.seed=$seed \\
    -s run.dir=pictures -s run.num_rollout=60 -s eval.interval=20 -s run.keep_samples=train
done; done
python docs/images/make.py pictures

The report of docs/view.md, from one of them:

slimectl report pictures/grpo-5e-4-s1 -o report.html
chromium --headless --hide-scrollbars --window-size=1000,1180 --screenshot=docs/images/report.png file://$PWD/report.html

docs/timeline.md, from a run on two ranks and two servers that samples a round ahead:

slimectl run quickstart --name two-servers --engines 2 -s run.dir=timeline -s run.num_rollout=8 -s run.async_level=1 \\
  -s cluster.actor_num_gpus_per_node=2 -s run.keep_samples=true
python docs/images/make.py timeline

docs/images/branching_agent.py makes the samples file of the tree of branches:

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
SIGNS = {"curves": ".u-wrap", "quickstart": ".u-wrap", "sample": ".token", "branches": ".tree", "timeline": "canvas"}
"""What a page has when it is drawn."""
SIZE = {"width": 1200, "height": 720}


def main(run: str) -> None:
    command = [sys.executable, "-m", "slimectl", "view", run, "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        if Path(run).is_file():
            take({"branches": "group/f0/0"}, address)
        elif Path(run).name == "timeline":
            take({"timeline": "timeline"}, address)
        else:
            take(pages(address), address)
    finally:
        server.terminate()
        server.wait()


def pages(address: str) -> dict[str, str]:
    """Return the address of every page, with the last round and the evaluations of the run that has the most files."""
    with urlopen(f"{address}api/catalogue") as answer:
        run = max(json.load(answer)["runs"], key=lambda run: len(run["files"]))
    rounds = [file["id"] for file in run["files"] if file["kind"] == "round"]
    if not rounds:
        return {"quickstart": "curves"}
    last = rounds[-1]
    with urlopen(f"{address}api/groups?file={last}&sort=spread&order=down&limit=1") as answer:
        group = json.load(answer)["groups"][0]
    first, *_, newest = [file["id"] for file in run["files"] if file["kind"] == "evaluation"]
    with urlopen(f"{address}api/groups?file={first}&limit=1") as answer:
        prompt = json.load(answer)["groups"][0]["hash"]
    with urlopen(f"{address}api/runs") as answer:
        table = json.load(answer)
    names = {row["id"]: row["name"] for row in table["runs"]}
    seeds = [names[member] for seed_group in table["groups"] for member in seed_group["runs"]]
    return {
        "runs": "runs", "curves": f"curves?runs={','.join(seeds)}", "round": f"round/{last}?sort=spread&order=down",
        "group": f"group/{last}/{group['group']}", "sample": f"sample/{last}/{group['rows'][-1]}",
        "prompt": f"prompt/{run['id']}/{prompt}", "compare": f"compare?before={first}&after={newest}",
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
            if name == "timeline":
                page.wait_for_selector("p.legend span")
                page.mouse.move(700, 560)
                page.wait_for_selector(".timeline .tip b")
            page.screenshot(path=FOLDER / f"view-{name}.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
