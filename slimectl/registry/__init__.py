"""Tables of engines, policies, trackers, verifiers, environments, executors; other packages add by entry points."""

from __future__ import annotations

from slimectl.registry.registry import Part, Registry

ENGINES = Registry(
    "engine",
    "slimectl.engines",
    {
        "embedded": Part("slimectl.builders.engines:EmbeddedBackend", in_process=True),
        "sglang": Part("slimectl.builders.installed_engines:SglangBackend", in_process=False),
        "vllm": Part("slimectl.builders.installed_engines:VllmBackend", in_process=False, takes_router=False),
    },
)
POLICIES = Registry(
    "policy",
    "slimectl.policies",
    {
        "fsdp": Part("slimectl.builders.trainers:FsdpBackend"),
        "megatron": Part("slimectl.builders.trainers:MegatronBackend"),
    },
)
EXECUTORS = Registry(
    "executor",
    "slimectl.executors",
    {
        "local": Part("slimectl.builders.executors:LocalBackend"),
        "ray": Part("slimectl.builders.executors:RayBackend"),
    },
)
ENVIRONMENTS = Registry(
    "environment",
    "slimectl.environments",
    {
        "gymnasium": Part("slimectl.environments.gymnasium:Gymnasium"),
        "harbor": Part("slimectl.environments.harbor:Harbor", library=None),
        "mcp": Part("slimectl.environments.mcp:Mcp"),
        "openenv": Part("slimectl.environments.openenv:OpenEnv", library=None),
        "python": Part("slimectl.environments.user:user_environment", library=None),
        "reasoning_gym": Part(
            "slimectl.environments.reasoning_gym:ReasoningGymTasks", package="reasoning-gym", extra="quickstart"
        ),
        "textarena": Part("slimectl.environments.textarena:TextArena"),
        "verifiers": Part("slimectl.environments.verifiers:Verifiers"),
    },
)
TRACKERS = Registry(
    "tracker",
    "slimectl.trackers",
    {
        "jsonl": Part("slimectl.trackers.jsonl:JsonlTracker"),
        "mlflow": Part("slimectl.trackers.mlflow:MlflowTracker", library="mlflow", files=r"mlflow/.+"),
        "stdout": Part("slimectl.trackers.stdout:console_tracker", renames=True),
        "swanlab": Part(
            "slimectl.trackers.swanlab:SwanlabTracker", library="swanlab", files=r"swanlab/(run-[^/]+/.+|\.gitignore)"
        ),
        "tensorboard": Part(
            "slimectl.trackers.tensorboard:TensorboardTracker",
            library="tensorboard",
            files=r"tensorboard/events\.out\.tfevents\.[^/]+",
        ),
        "trackio": Part("slimectl.trackers.trackio:TrackioTracker", library="trackio"),
        "wandb": Part(
            "slimectl.trackers.wandb:WandbTracker",
            library="wandb",
            files=r"wandb/((rank-[^/]+/wandb/)?(offline-)?run-[^/]+/.+|(rank-[^/]+/wandb/)?debug[^/]*\.log|(rank-[^/]+/wandb/)?latest-run)",
        ),
    },
)
VERIFIERS = Registry(
    "verifier",
    "slimectl.verifiers",
    {
        "code": Part("slimectl.rewards.code:Code"),
        "contains": Part("slimectl.rewards.text:Contains"),
        "dapo": Part("slimectl.rewards.math.dapo:Dapo"),
        "deepscaler": Part("slimectl.rewards.math.verifier:Deepscaler"),
        "exact": Part("slimectl.rewards.text:Exact"),
        "f1": Part("slimectl.rewards.text:F1"),
        "gpqa": Part("slimectl.rewards.gpqa:Gpqa"),
        "ifbench": Part("slimectl.rewards.instruction_following.ifbench:IfBench"),
        "ifeval": Part("slimectl.rewards.instruction_following.ifeval:IfEval"),
        "judge": Part("slimectl.rewards.judge:Judge"),
        "length_penalty": Part("slimectl.rewards.shaping:LengthPenalty"),
        "math": Part("slimectl.rewards.math.verifier:Math"),
        "numeric": Part("slimectl.rewards.text:Numeric"),
        "overlong": Part("slimectl.rewards.shaping:Overlong"),
        "random": Part("slimectl.rewards.shaping:Random"),
        "reasoning_gym": Part("slimectl.rewards.reasoning_gym:ReasoningGym"),
        "regex": Part("slimectl.rewards.text:Regex"),
        "remote_rm": Part("slimectl.rewards.remote:RemoteRm"),
        "repetition": Part("slimectl.rewards.shaping:Repetition"),
        "reward_model": Part("slimectl.rewards.reward_model:RewardModel"),
    },
)

__all__ = ["ENGINES", "ENVIRONMENTS", "EXECUTORS", "POLICIES", "TRACKERS", "VERIFIERS", "Part", "Registry"]
