"""From predictions to decisions: whom to answer, what to distrust, what to label next, and sets with a guarantee."""

from lapwing.decisions.acquisition import Batch, bald, batch_bald, batch_information
from lapwing.decisions.conformal_intervals import ConformalIntervals
from lapwing.decisions.conformal_sets import ConformalSets
from lapwing.decisions.ood import OODAlarm, ood_score
from lapwing.decisions.ranks import coverage_distribution
from lapwing.decisions.scores import score
from lapwing.decisions.selective import RiskCoverage, reject, risk_coverage

__all__ = [
    "Batch", "ConformalIntervals", "ConformalSets", "OODAlarm", "RiskCoverage", "bald", "batch_bald",
    "batch_information", "coverage_distribution", "ood_score", "reject", "risk_coverage", "score",
]  # fmt: skip
