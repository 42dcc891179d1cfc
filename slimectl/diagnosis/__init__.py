"""What goes wrong in a run, found in its records: findings with evidence, causes and remedies."""

from slimectl.diagnosis.diagnosis import Diagnosis, diagnose_run
from slimectl.diagnosis.finding import Evidence, Finding

__all__ = ["Diagnosis", "Evidence", "Finding", "diagnose_run"]
