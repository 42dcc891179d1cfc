"""The typer application: registers all commands in the order of the help."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from slimectl import __version__
from slimectl.cli.ask import ask
from slimectl.cli.bench import bench
from slimectl.cli.chat import chat
from slimectl.cli.completion import completion
from slimectl.cli.convert import convert
from slimectl.cli.diagnose import diagnose
from slimectl.cli.diff import diff
from slimectl.cli.doctor import doctor
from slimectl.cli.engines import ListsByDefault, engines
from slimectl.cli.evaluate import evaluate
from slimectl.cli.init import init
from slimectl.cli.inspect import inspect
from slimectl.cli.launch import launch
from slimectl.cli.metrics import metrics
from slimectl.cli.models import models
from slimectl.cli.options import with_messages
from slimectl.cli.plan import plan
from slimectl.cli.report import report
from slimectl.cli.rollout import rollout
from slimectl.cli.run import run
from slimectl.cli.runs import runs
from slimectl.cli.score import score
from slimectl.cli.serve import serve
from slimectl.cli.settings import settings
from slimectl.cli.signals import end_at_once
from slimectl.cli.sweep import sweep
from slimectl.cli.train import train
from slimectl.cli.view import view
from slimectl.errors import (
    EXIT_INTERRUPTED,
    EXIT_READER_GONE,
    HookError,
    SlimectlError,
    Terminated,
    missing_library,
)
from slimectl.system import stdio

OLD_OPTIONS = {"policy": "backend"}
"""Old names of options. They are still accepted, but not shown."""

NAMES = {"evaluate": "eval", "from_": "from", "list_": "list"}
"""Names of commands that differ from the names of their functions."""

app = typer.Typer(
    name="slimectl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: OLD_OPTIONS.get(name, name),
    },
)


def guarded(command: Callable[..., None], *, runs_user_code: bool = False) -> Callable[..., None]:
    """Wrap a command so that an exception prints a message to stderr and exits with the code documented in errors.py.

    With `runs_user_code`, stdout is reserved for the command's records.
    """

    @functools.wraps(command)
    def body(*args: Any, **kwargs: Any) -> None:
        try:
            if runs_user_code:
                stdio.reserve_stdout()
            command(*args, **kwargs)
            stdio.flush()
        except SlimectlError as error:
            for line in str(error).splitlines():
                stdio.say(f"slimectl: {line}")
            leave(error.exit_code)
        except ModuleNotFoundError as error:
            missing = missing_library(error, wanted_by=f"`slimectl {NAMES.get(command.__name__, command.__name__)}`")
            if missing is None:
                raise
            stdio.say(f"slimectl: {missing}")
            leave(missing.exit_code)
        except BrokenPipeError:  # the reader left (`| head -1`)
            leave(EXIT_READER_GONE)
        except KeyboardInterrupt as error:
            stdio.say(f"slimectl: {error if isinstance(error, Terminated) else 'interrupted'}")
            leave(error.exit_code if isinstance(error, Terminated) else EXIT_INTERRUPTED)
        except SystemExit as error:  # raised by a task or library that a user's function started, not by slimectl
            stdio.say(
                f"slimectl: a user's function called sys.exit({error.code!r:.40}){_location(error)}. Fix it there."
            )
            leave(HookError.exit_code)

    return body


def _location(error: BaseException) -> str:
    """Return (FILE:LINE) of the statement that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def leave(code: int) -> NoReturn:
    """Exit, ignoring further interrupts so that they do not break the interpreter's clean-up."""
    end_at_once()
    raise typer.Exit(code)


def _version(value: bool) -> None:
    if value:
        print(f"slimectl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """RL post-training of language models as composable stages.

    To get started, run `slimectl run quickstart`. It trains a small model on this machine's CPU in a few minutes.
    """


STAGES = "Stages (each also works on its own with files and pipes)"
command: Callable[..., None]
for command in (run, rollout, score, train, evaluate, convert, serve):
    app.command(name=NAMES.get(command.__name__), rich_help_panel=STAGES)(
        guarded(with_messages(command), runs_user_code=command not in (convert, serve))
    )

TALK = "Talk to a model"
for command in (ask, chat):
    app.command(rich_help_panel=TALK)(guarded(with_messages(command)))

ABOUT = "Settings, models and records"
for command in (
    init, sweep, launch, plan, doctor, bench, inspect, diagnose, diff, view, report,
    runs, metrics, models, completion,
):  # fmt: skip
    app.command(rich_help_panel=ABOUT)(guarded(with_messages(command), runs_user_code=command is bench))
settings_app = typer.Typer(
    no_args_is_help=True, help="Show, validate and explain settings, or convert them from another stack."
)
for command in settings:
    # In `explain --eps-clip`, the option of another program is the name to look up.
    context = {"ignore_unknown_options": True} if command.__name__ == "explain" else None
    settings_app.command(name=NAMES.get(command.__name__), context_settings=context)(guarded(with_messages(command)))
app.add_typer(settings_app, name="settings", rich_help_panel=ABOUT)
engines_app = typer.Typer(
    no_args_is_help=True, cls=ListsByDefault, help="List the engines of a running run, add some, or remove some."
)
for command in engines:
    engines_app.command(name=NAMES.get(command.__name__))(guarded(with_messages(command)))
app.add_typer(engines_app, name="engines", rich_help_panel=ABOUT)
