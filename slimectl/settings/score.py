"""Settings of scoring."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slimectl.settings.base import Section


class ScoreSettings(Section):
    """Samples in, rewarded samples out."""

    rm_type: str | None = None
    """Verifier: math, dapo, gpqa, code, exact, numeric, …. A prompt's metadata.rm_type overrides it."""

    rm_options: dict[str, Any] = {}
    """Options of the verifier, e.g. {pattern = "Answer: (.*)"} for regex."""

    rm: list[dict[str, Any]] = []
    """A weighted sum instead of rm_type: [{type = "math", weight = 1.0}, {type = "length_penalty", weight = -0.1, limit
    = 4096}, {path = "my_rewards.py:format", weight = 0.2}]. A part has the `type` of a verifier and its options, or the
    `path` of your own function, which takes the parameters of custom_rm_path. `name` is the part's key in the dict.
    `key` selects the number of a part that is a dict itself."""

    custom_rm_path: str | None = None
    """Path of your own reward function, instead of rm_type and rm. Of these three, a later layer of settings replaces
    earlier ones, and two in one layer are refused. A function that takes `samples` rather than `sample` gets a list and
    returns a list."""

    allow_paths_in_records: bool = False
    """Let a sample name its own reward function (custom_rm_path), which overrides all of these. It runs code, so use it
    only for files that you trust."""

    custom_reward_post_process_path: str | None = None
    """Path of a function (args, samples) that returns two lists for a round: the rewards to log, and the rewards to use
    as advantages without a comparison within groups."""

    none_reward: Literal["error", "skip"] = "error"
    """What None from your own reward function means. error: stop and report the sample. skip: no opinion, so a sum
    leaves this part out. If no function has an opinion, the sample gets no reward. It is left out of training, of its
    group's baseline and of evaluations."""

    group_rm: bool = False
    """Pass all samples of a prompt to the reward function in one call (or to remote_rm in one request)."""

    batch_size: Annotated[int, Field(ge=1)] = 64
    """Maximum samples per call of a function that takes `samples`. Groups are never split."""

    rm_url: str | None = None
    """Address of the server of remote_rm or of the judge (…/v1), unless their options have a `url`."""

    concurrency: Annotated[int, Field(ge=1)] = 64
    """Maximum rewards to wait for at the same time, from servers and async functions."""

    reward_key: str | None = None
    """Key of the number to train on if a reward is a dict."""

    explain: bool = False
    """Write into metadata.explanation what was extracted from where, and why it did or did not match."""

    timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """CPU time limit in seconds of one call in a worker process (of a verifier: one sample). A call that exceeds it is
    retried once, alone. If it times out again, the reward is 0, with metadata.reward_error. Servers, and the programs
    that `code` runs, have their own limits among their options. Your own reward functions have no limit unless you set
    one here or in wall_timeout_s, or set workers."""

    wall_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Wall-clock limit in seconds of one call, for busy machines. Default: 12 times timeout_s. The time limits of
    servers, and of programs that `code` runs, are added."""

    workers: Annotated[int, Field(ge=0)] | None = None
    """Worker processes. 0 grades in this process, without the time limits. Default: one per core, at most 4, for
    verifiers that do symbolic mathematics or run programs, even if only a prompt selects one (metadata.rm_type). The
    same holds for your own functions if you set a time limit. Everything else is graded in this process."""

    @property
    def own_functions(self) -> list[str]:
        """Paths of your own reward functions."""
        types = self.rm_options.get("types")
        entries = list(types.values()) if self.rm_type == "by_column" and isinstance(types, dict) else []
        listed = [part for entry in (*entries, self.rm) for part in (entry if isinstance(entry, list) else [entry])]
        parts = [str(p["path"]) for p in listed if isinstance(p, dict) and "path" in p and "type" not in p]
        return [self.custom_rm_path] if self.custom_rm_path else parts

    @property
    def limits_calls(self) -> bool:
        """Whether a time limit other than the default is set."""
        return self.wall_timeout_s is not None or self.timeout_s != type(self).model_fields["timeout_s"].default

    @property
    def wall_limit_s(self) -> float:
        """Wall-clock limit of one call."""
        return self.wall_timeout_s or 12.0 * self.timeout_s
