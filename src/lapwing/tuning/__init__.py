"""Choosing prior and noise: by the evidence, or by validation."""

from lapwing.tuning.by_evidence import tune_by_evidence
from lapwing.tuning.by_validation import tune_by_validation
from lapwing.tuning.groups import Groups
from lapwing.tuning.result import Tuning

__all__ = ["Groups", "Tuning", "tune_by_evidence", "tune_by_validation"]
