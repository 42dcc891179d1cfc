"""Thresholds of the detectors, with a reason each. `benchmarks/diagnosis.py` measures what they find and miss."""

from __future__ import annotations

BASELINE = 5
"""First rounds, whose median describes the start of the run. Fewer are too noisy, more would include learning."""
SHOWN = 10
"""Rounds of evidence in a finding: enough to see a trend, few enough to read."""

# --- signal and learning ---------------------------------------------------------------------------------------------

NO_SIGNAL_ROUNDS = 3
"""Rounds in a row. A healthy run with few groups has a round without signal once in a while, hardly three."""
EQUAL_GROUPS = 0.9
"""Share of groups with equal rewards. A step then learns from a tenth of the samples."""
SOLVED_GROUPS = 0.9
"""Share of groups in which every response succeeds."""
FLAT_ROUNDS = 60
"""Rounds without any gain of the reward or of an evaluation. Healthy runs of small models show one within 40."""
FLAT_ADVANTAGES = 0.5
"""Absolute mean advantage where the algorithm centres advantages. Lengths alone move the mean over tokens by 0.3."""
LARGE_ADVANTAGES = 3.0
"""Deviation of advantages where the algorithm divides by it."""
GAMING_SHARE = 0.25
"""Part of the training reward's gain that an evaluation shows at least, unless the policy games the reward."""
GAMING_ERRORS = 2.0
"""Standard errors of an evaluation that are given to its change as the benefit of the doubt."""
FLAT_EVALUATIONS = 5
"""Evaluations without a better one than the first, in at least FLAT_ROUNDS rounds. Five within 25 rounds say little:
an evaluation of 256 responses is off by 0.03, as much as a slow run gains in that time."""

# --- policy ----------------------------------------------------------------------------------------------------------

ENTROPY_COLLAPSE = 0.1
"""Share of the first rounds' entropy that is left. Healthy runs that learn fall to a third."""
ENTROPY_FLOOR = 0.02
"""Entropy in nats below which a policy is deterministic for practical purposes."""
ENTROPY_EXPLOSION = 2.0
"""Times the first rounds' entropy, while the reward falls. Healthy runs double their entropy, but gain reward."""
ENTROPY_NOISE = 4.0
"""The same without regard to the reward."""
KL_PER_TOKEN = 1.5
"""KL divergence from the reference in nats per token that is large if it still rises. Healthy small runs reach 0.9."""
KL_RISING = 1.3
"""Ratio of two successive windows of rounds above which the KL divergence still rises."""
KL_LARGE = 5.0
"""KL divergence that is large in any case: a sampled token is 150 times as likely as under the reference."""
STEP_KL = 0.5
"""Mean squared log-ratio / 2 of a step, the k2 estimate. Large models stay below 0.05, healthy tiny ones below 0.5."""
RATIO_LARGE = 100.0
"""Largest importance ratio of a trained token. Healthy tiny runs with four steps per round reach 60."""
SPIKE = 10.0
"""Times the median gradient norm of the rounds before. Healthy rounds stay within a factor of 3."""
SPIKES, SPIKE_WINDOW = 3, 20
"""Spikes in a window of rounds that make a finding. Fewer are bad luck: late in a run few groups have a gradient."""
HUGE_SPIKE = 100.0
"""Times the median that makes a finding at once."""
GRADIENT_GROWTH = 8.0
"""Times the gradient norm of the first rounds, by the median of the last ones."""
FROZEN = 0.1
"""Share of the first rounds' gradient norm that is left, while the entropy is at least half of theirs. Healthy runs
keep 0.5. With everything but the last norm frozen, 0.02 are left."""
CLIPPED = 0.3
"""Share of tokens without a gradient because they are clipped. Healthy runs have 0 to 0.2."""
OUT_OF_RANGE = 0.6
"""Share of tokens whose ratio is outside the clip range, whatever their advantage: about half of them lose gradient."""

# --- responses -------------------------------------------------------------------------------------------------------

LENGTH_GROWTH, LENGTH_SHRINKAGE = 2.5, 0.5
"""Times the first rounds' length. Healthy runs pass through a factor of 2.35 before their reward rises."""
TRUNCATED = 0.5
"""Share of truncated responses. Healthy runs pass through 0.3."""
FOLLOWS_LENGTH = 0.9
"""Correlation of reward and length within groups. It is exactly 1 for a reward that pays length."""
DUPLICATES = 0.9
"""Share of responses that repeat another one of their group while the reward is low, or the entropy at least half of
the first rounds'. Right answers may be equal. Healthy runs reach 0.67 at such an entropy."""
REPETITION = 0.5
"""Share of 4-grams that occurred before in the response. Prose has below 0.1, tables and code up to 0.3."""

# --- grading ---------------------------------------------------------------------------------------------------------

TIMEOUTS = 0.02
"""Share of samples whose grading timed out. A single one happens on a busy machine."""
FAILED = 0.1
"""Share of attempts that failed, or of samples without a reward."""
DOMINATES = 50.0
"""Ratio of the deviations of two components of the reward. The smaller one then does not change any ranking."""

# --- engine ----------------------------------------------------------------------------------------------------------

MISMATCH_GROWTH = 5.0
"""Times the first rounds' difference between engine and trainer."""
MISMATCH_SMALL = 0.01
"""Difference in nats that does not matter even if it grows: precision of 16 bits."""
MISMATCH_EXACT = 0.005
"""Difference of an embedded engine in float32, which computes the trainer's numbers. Healthy runs have 1e-6."""
STALE = 2.0
"""Versions beyond what run.async_level and sync.update_weights_interval explain."""
OLD_ROUNDS = 3.0
"""Rounds between sampling and training that matter if the policy has moved meanwhile. Two rounds ahead are usual."""
OLD_KL = 0.2
"""KL divergence (k3) in nats per token between the weights that sampled and those in training. It is below 0.05 for
samples that are one or two rounds old."""

# --- speed and resources ---------------------------------------------------------------------------------------------

WAIT = 0.3
"""Share of a round in which training waits for samples."""
WAIT_IN_TURNS = 0.85
"""The same for an engine that takes turns with the trainer in one process. Such runs generate in up to 0.7 of the time
while all is well, and working ahead would not free the processor."""
WORTHWHILE_S = 60.0
"""Seconds lost so far. Less is not worth a change of settings."""
GRADING = 0.4
"""Share of a round that waits for graders."""
GRADING_S = 0.05
"""Seconds of grading per round below which a share means nothing."""
LOG_PROBS = 1.0
"""Time of a pass for log-probabilities in units of the training time. A forward pass is a third of a training step."""
LOG_PROBS_SHARE = 0.25
"""Share of a round."""
PUSHING, SAVING = 0.3, 0.3
"""Shares of the time in which weights are sent, and in which checkpoints are written."""
STRAGGLER = 1.5
"""Own time of the slowest rank or engine in units of the median."""
LONGEST = 4.0
"""Length of the longest response in units of the median, while training waits."""
MEMORY = 0.95
"""Share of the memory of a GPU or a machine. The allocator fragments, and packs differ."""
DISK = 0.95
"""Share of the disk in use."""
UTILIZATION = 0.25
"""Share of the FLOP/s that `slimectl plan` assumes by default (35 % of the peak)."""
PLANNED_MFU = 0.35
