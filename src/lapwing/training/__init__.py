"""Training with the evidence in the loop: prior precisions and noise are learned along with the weights."""

from lapwing.training.evidence_in_the_loop import Best, EvidenceInTheLoop
from lapwing.training.train import Epoch, Training, train_with_evidence

__all__ = ["Best", "Epoch", "EvidenceInTheLoop", "Training", "train_with_evidence"]
